// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a device is, and the devices themselves: one folder each, with the same files.
//!
//! To add a device, copy a folder and implement [`Device`]. The daemon probes, writes the CDI spec that the
//! device's edits make of the result, lays out the client folder, and starts the service as a child process
//! that calls [`Device::serve`].

pub mod ane;
pub mod ask;
pub mod client;
pub mod engine_root;
pub mod gpu;
pub mod host;
pub mod metal;
pub mod mps;
pub mod service;
mod settings;
mod spec;
mod system;
mod text;

use std::os::fd::OwnedFd;

use lighter_wire::{Endpoint, Kind};

use crate::client::ClientFile;
use crate::host::{Host, Probe};

/// Name of the CDI device that stands for the best engine of a kind.
pub const ALL: &str = "all";

/// What every part of lighter asks of a device.
pub trait Device: Send + Sync {
    /// Which of the four it is.
    fn kind(&self) -> Kind;
    /// Where a container reaches it.
    fn endpoints(&self) -> Vec<Endpoint>;
    /// Looks for engines. Takes at most some seconds, and loads none into this process.
    fn probe(&self, host: &Host) -> Probe;
    /// Files for containers, below the client folder. Looks at what is there, and changes nothing.
    fn client_files(&self, host: &Host, probe: &Probe) -> Vec<ClientFile>;
    /// The CDI spec for what the probe found and these client files; `None` when there is nothing to offer. Pure.
    fn spec(&self, host: &Host, probe: &Probe, files: &[ClientFile]) -> Option<lighter_cdi::Spec>;
    /// The service process: serves the daemon at the other end of `control` until it closes.
    ///
    /// # Errors
    /// When the service cannot go on.
    fn serve(&self, control: OwnedFd) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}
