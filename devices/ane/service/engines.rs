// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines the host has, found out when it is first asked for: by the first stream, or by the first report.
//!
//! What was found stays; that nothing was found is asked again after a moment, so that `lighter setup ane` takes
//! effect without a restart.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::config::AneConfig;
use super::super::control::Provider;
use super::super::probe::{AneEngine, Missing, engines};
use super::choice::EngineIndex;
use crate::service::WorkerProgram;

/// How long "there is none" is believed.
const MISSING_LASTS: Duration = Duration::from_secs(5);

/// The engines of this host.
#[derive(Debug)]
pub(super) struct Host {
    /// Best first.
    pub(super) engines: Vec<AneEngine>,
    /// The one that answers at once.
    pub(super) cpu: EngineIndex,
}

pub(super) type Answer = Result<Arc<Host>, Missing>;

#[derive(Debug, Default)]
pub(super) struct Engines {
    known: Mutex<Option<(Instant, Answer)>>,
}

impl Engines {
    /// The engines; asks children when they are not known. Others who ask meanwhile wait for the same answer.
    pub(super) fn get(&self, program: &WorkerProgram, config: &AneConfig) -> Answer {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, answer)) = known.as_ref()
            && (answer.is_ok() || when.elapsed() < MISSING_LASTS)
        {
            return answer.clone();
        }
        let answer = engines(&program.path(), config).and_then(|engines| {
            let cpu = engines.iter().position(|engine| engine.provider == Provider::Cpu);
            let missing = || Missing {
                reason: "no library has the CPU provider".to_owned(),
                remedy: "run `lighter setup ane`".to_owned(),
            };
            Ok(Arc::new(Host { cpu: cpu.ok_or_else(missing)?, engines }))
        });
        match &answer {
            Ok(host) => {
                for engine in &host.engines {
                    tracing::info!(engine = engine.name, version = engine.version, "engine found");
                }
            }
            Err(missing) => tracing::warn!(reason = missing.reason, "no engine"),
        }
        *known = Some((Instant::now(), answer.clone()));
        answer
    }
}
