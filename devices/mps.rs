// SPDX-License-Identifier: MIT OR Apache-2.0
//! mps: `torch.device("mps")` of a container's own PyTorch, computed by the host's PyTorch.
//!
//! A container gets a Python package and a unix socket. The service keeps one worker process for each client process of a
//! container; only workers load torch, so that whatever a client does to it ends with that client. A worker is the
//! host's Python with lighter's package (`python/lighter_mps_host`).

pub mod client_files;
pub mod config;
pub mod control;
pub mod edits;
pub mod locate;
pub mod probe;
pub mod readings;
pub mod service;

use std::os::fd::OwnedFd;

use lighter_wire::{Endpoint, Kind};

pub use config::{MpsConfig, MpsConfigError};

use crate::Device;
use crate::client::{ClientFile, env_file};
use crate::host::{Host, Probe};

/// The mps device with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// The settings, already validated; with [`MpsConfig::host_package`] named.
    pub config: MpsConfig,
}

impl Device for Mps {
    fn kind(&self) -> Kind {
        Kind::Mps
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![Endpoint::Unix(Kind::Mps)]
    }

    fn probe(&self, host: &Host) -> Probe {
        match client_files::check(host) {
            Ok(()) => probe::probe(&self.config),
            Err(missing) => missing.into(),
        }
    }

    fn client_files(&self, host: &Host, _probe: &Probe) -> Vec<ClientFile> {
        let mut files = client_files::files(host);
        files.push(env_file(edits::FOLDER, &edits::variables(self.config.pip_find_links)));
        files
    }

    fn spec(&self, host: &Host, probe: &Probe, files: &[ClientFile]) -> Option<lighter_cdi::Spec> {
        edits::spec(host, self.config.pip_find_links, probe, files)
    }

    fn serve(&self, control: OwnedFd) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(service::run(control, self.config.clone())?)
    }
}
