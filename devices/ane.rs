// SPDX-License-Identifier: MIT OR Apache-2.0
//! ane: ONNX models of a container's own ONNX Runtime, computed by the host's best engine for each model.
//!
//! A container gets a plug-in for its ONNX Runtime and a unix socket. The service keeps, for each container, one
//! worker process an engine; only workers load ONNX Runtime, so that whatever a container's models do to it ends
//! with that container. The processor answers at once; another engine answers once it has been seen to give the
//! same results, and to be faster.

pub mod client_files;
pub mod config;
pub mod control;
pub mod edits;
pub mod journal;
pub mod locate;
pub mod ort;
pub mod probe;
pub mod readings;
pub mod service;
pub mod worker;

use std::os::fd::OwnedFd;

use lighter_wire::{Endpoint, Kind};

pub use config::{AneConfig, AneConfigError};

use crate::Device;
use crate::client::{ClientFile, env_file};
use crate::host::{Host, Probe};

/// The ane device with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ane {
    /// The settings, already validated.
    pub config: AneConfig,
}

impl Device for Ane {
    fn kind(&self) -> Kind {
        Kind::Ane
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![Endpoint::Unix(Kind::Ane)]
    }

    fn probe(&self, host: &Host) -> Probe {
        match client_files::check(host) {
            Ok(()) => probe::probe(&host.program, &self.config),
            Err(missing) => missing.into(),
        }
    }

    fn client_files(&self, host: &Host, _probe: &Probe) -> Vec<ClientFile> {
        let mut files = client_files::files(host);
        files.push(env_file(edits::FOLDER, &edits::variables()));
        files
    }

    fn spec(&self, host: &Host, probe: &Probe, files: &[ClientFile]) -> Option<lighter_cdi::Spec> {
        edits::spec(host, probe, files)
    }

    fn serve(&self, control: OwnedFd) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(service::run(control, self.config.clone())?)
    }
}
