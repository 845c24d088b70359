// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which torch the host has, found out when it is first asked for: by the first stream, or by the first report. Found out
//! again once the Python, its torch or the host's devices have changed.

use std::sync::Arc;

use super::super::config::MpsConfig;
use super::super::probe::{self, Seen, Torch};
use crate::host::Probe;
use crate::service::WorkerProgram;
use crate::service::known::Known;
use crate::text::with_causes;

/// The host's torch.
#[derive(Debug)]
pub(super) struct Found {
    /// What starts a worker; `None` when there is no torch.
    pub(super) start: Option<Start>,
    /// Its engines.
    pub(super) probe: Probe,
}

/// What starts a worker.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) torch: Torch,
    pub(super) program: WorkerProgram,
    seen: Seen,
}

#[derive(Debug, Default)]
pub(super) struct Engines(Known<Arc<Found>>);

impl Engines {
    /// The engines; asks children when they are not known.
    pub(super) fn get(&self, config: &MpsConfig) -> Arc<Found> {
        let holds = |found: &Arc<Found>| {
            found.start.as_ref().is_some_and(|start| start.seen == probe::look(&start.torch, config))
        };
        self.0.get(holds, || Arc::new(find(config)))
    }
}

fn find(config: &MpsConfig) -> Found {
    let torch = probe::torch(config);
    let mut probe = probe::as_probe(&torch, config);
    let mut start = None;
    if let Ok(torch) = torch {
        // Before the file is opened: a change in between is then noticed.
        let seen = probe::look(&torch, config);
        match probe::program(&torch.executable, config, "worker") {
            Ok(program) => start = Some(Start { torch, program, seen }),
            Err(error) => {
                probe = Probe::Missing {
                    reason: with_causes(&error),
                    remedy: "name a Python that is there with `lighter config --torch-python PATH`"
                        .to_owned(),
                }
            }
        }
    }
    match probe.state() {
        lighter_wire::EngineState::Available { name, version } => {
            tracing::info!(engine = name, version, "engine found");
        }
        lighter_wire::EngineState::Missing { reason, .. } => tracing::warn!(reason, "no engine"),
    }
    Found { start, probe }
}
