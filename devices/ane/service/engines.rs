// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which engines the host has, found out when it is first asked for: by the first stream, or by the first report.

use std::sync::Arc;

use super::super::config::AneConfig;
use super::super::control::Provider;
use super::super::probe::{AneEngine, Missing, engines};
use super::choice::EngineIndex;
use crate::service::WorkerProgram;
use crate::service::known::Known;

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
pub(super) struct Engines(Known<Answer>);

impl Engines {
    /// The engines; asks children when they are not known.
    pub(super) fn get(&self, program: &WorkerProgram, config: &AneConfig) -> Answer {
        self.0.get(Result::is_ok, || find(program, config))
    }
}

fn find(program: &WorkerProgram, config: &AneConfig) -> Answer {
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
    answer
}
