// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines the host has, found out when it is first asked for: by the first stream, or by the first report.

use std::path::Path;
use std::sync::Arc;

use super::super::MetalConfig;
use super::super::locate::{EngineFiles, locate};
use super::super::probe::probe_files;
use super::WorkerProgram;
use crate::host::Probe;
use crate::service::known::Known;

/// The host's ggml and its engines.
#[derive(Debug)]
pub(super) struct Found {
    /// Where ggml is; `None` when it is not there.
    pub(super) files: Option<EngineFiles>,
    /// Its engines.
    pub(super) probe: Probe,
}

#[derive(Debug, Default)]
pub(super) struct Engines(Known<Arc<Found>>);

impl Engines {
    /// The engines; asks a child when they are not known.
    pub(super) fn get(&self, program: &WorkerProgram, config: &MetalConfig) -> Arc<Found> {
        self.0.get(|found| matches!(found.probe, Probe::Found(_)), || Arc::new(find(program, config)))
    }
}

fn find(program: &WorkerProgram, config: &MetalConfig) -> Found {
    let found = match locate(config, Path::new("/")) {
        Ok(files) => {
            let probe = probe_files(&program.path(), config, &files);
            Found { files: Some(files), probe }
        }
        Err(missing) => {
            let probe = missing.into();
            Found { files: None, probe }
        }
    };
    match found.probe.state() {
        lighter_wire::EngineState::Available { name, version } => {
            tracing::info!(engine = name, version, "engine found");
        }
        lighter_wire::EngineState::Missing { reason, .. } => tracing::warn!(reason, "no engine"),
    }
    found
}
