// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines the host has, found out when it is first asked for: by the first stream, or by the first report.
//!
//! What was found stays; that nothing was found is asked again after a moment, so that `lighter setup metal`
//! takes effect without a restart.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::MetalConfig;
use super::super::locate::{EngineFiles, locate};
use super::super::probe::probe_files;
use super::WorkerProgram;
use crate::host::Probe;

/// How long "there is none" is believed.
const MISSING_LASTS: Duration = Duration::from_secs(5);

/// The host's ggml and its engines.
#[derive(Debug)]
pub(super) struct Found {
    /// Where ggml is; `None` when it is not there.
    pub(super) files: Option<EngineFiles>,
    /// Its engines.
    pub(super) probe: Probe,
}

#[derive(Debug, Default)]
pub(super) struct Engines {
    known: Mutex<Option<(Instant, Arc<Found>)>>,
}

impl Engines {
    /// The engines; asks a child when they are not known. Others who ask meanwhile wait for the same answer.
    pub(super) fn get(&self, program: &WorkerProgram, config: &MetalConfig) -> Arc<Found> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, found)) = known.as_ref()
            && (matches!(found.probe, Probe::Found(_)) || when.elapsed() < MISSING_LASTS)
        {
            return Arc::clone(found);
        }
        let found = match locate(config, Path::new("/")) {
            Ok(files) => {
                let probe = probe_files(&program.path(), config, &files);
                Found { files: Some(files), probe }
            }
            Err(missing) => {
                let probe = Probe::Missing { reason: missing.reason, remedy: missing.remedy };
                Found { files: None, probe }
            }
        };
        match found.probe.state() {
            lighter_wire::EngineState::Available { name, version } => {
                tracing::info!(engine = name, version, "engine found");
            }
            lighter_wire::EngineState::Missing { reason, .. } => tracing::warn!(reason, "no engine"),
        }
        let found = Arc::new(found);
        *known = Some((Instant::now(), Arc::clone(&found)));
        found
    }
}
