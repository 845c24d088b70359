// SPDX-License-Identifier: MIT OR Apache-2.0
//! metal: ggml's layers of a container's llama.cpp or whisper.cpp, computed by the host's ggml.
//!
//! A container gets a ggml RPC server at 127.0.0.1:50052 in its own network namespace. The service keeps one
//! worker process per container; only the worker loads ggml, so that whatever a container's messages do to
//! ggml ends with that container.

pub mod client_library;
pub mod config;
pub mod control;
pub mod edits;
pub mod ggml;
pub mod locate;
pub mod probe;
pub mod readings;
pub mod rpc;
pub mod service;
pub mod worker;

use std::os::fd::OwnedFd;

use lighter_wire::{Endpoint, Kind};

pub use config::{Libraries, MetalConfig, MetalConfigError};

use crate::Device;
use crate::client::{ClientFile, env_file};
use crate::host::{Host, Probe};

/// The metal device with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metal {
    /// The settings, already validated.
    pub config: MetalConfig,
}

impl Metal {
    fn endpoint(&self) -> Endpoint {
        Endpoint::Loopback(self.config.port)
    }
}

impl Device for Metal {
    fn kind(&self) -> Kind {
        Kind::Metal
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![self.endpoint()]
    }

    fn probe(&self, host: &Host) -> Probe {
        probe::probe(&host.program, &self.config)
    }

    fn client_files(&self, host: &Host, probe: &Probe) -> Vec<ClientFile> {
        let mut files = client_library::files(host, &self.config, probe);
        files.push(env_file(edits::FOLDER, &edits::variables(self.endpoint(), &files)));
        files
    }

    fn spec(&self, host: &Host, probe: &Probe, files: &[ClientFile]) -> Option<lighter_cdi::Spec> {
        edits::spec(host, self.endpoint(), probe, files)
    }

    fn serve(&self, control: OwnedFd) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(service::run(control, self.config.clone())?)
    }
}
