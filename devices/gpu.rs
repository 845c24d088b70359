// SPDX-License-Identifier: MIT OR Apache-2.0
//! gpu: Vulkan of a container's own Mesa (Venus), computed and drawn by the host's GPU.
//!
//! A container gets a unix socket and Mesa's variables for it; no device node, no driver of the host. Each Vulkan instance
//! has a session (a process with virglrenderer and no GPU driver) and a render server (a process with the GPU's driver).

pub mod config;
pub mod control;
pub mod edits;
pub mod locate;
pub mod probe;
pub mod readings;
pub mod service;
pub mod session;
pub mod virgl;
pub mod vtest;
pub mod worker;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use lighter_wire::{Endpoint, Kind};

pub use config::{GpuConfig, GpuConfigError, MemoryMode};

use crate::Device;
use crate::client::{ClientFile, env_file};
use crate::host::{Host, Probe};

/// lighter's Vulkan layer for render servers.
const LAYER: &str = "VkLayer_lighter_hostmem.json";

/// The folder with lighter's Vulkan layer, beside its libraries for containers.
#[must_use]
pub fn layer_folder(plugin_dir: &Path) -> PathBuf {
    plugin_dir.join(edits::FOLDER)
}

/// The gpu device with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The settings, already validated; with [`GpuConfig::layer_folder`] named.
    pub config: GpuConfig,
}

impl Device for Gpu {
    fn kind(&self) -> Kind {
        Kind::Gpu
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![Endpoint::Unix(Kind::Gpu)]
    }

    fn probe(&self, host: &Host) -> Probe {
        match probe::check_layer(&self.config) {
            Ok(_) => probe::probe(&host.program, &self.config),
            Err(missing) => missing.into(),
        }
    }

    fn client_files(&self, _host: &Host, _probe: &Probe) -> Vec<ClientFile> {
        vec![env_file(edits::FOLDER, &edits::variables())]
    }

    fn spec(&self, host: &Host, probe: &Probe, _files: &[ClientFile]) -> Option<lighter_cdi::Spec> {
        edits::spec(host, probe)
    }

    fn serve(&self, control: OwnedFd) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(service::run(control, self.config.clone())?)
    }
}
