// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts a container's worker for one engine: its restrictions, its part of the cache, its first message.

use std::sync::atomic::Ordering;
use std::time::Instant;

use lighter_wire::Kind;

use super::super::config::Class;
use super::super::control::{Provider, ToWorker, WORKER_VERSION, WorkerConfig};
use super::super::probe::{AneEngine, command_for};
use super::choice::EngineIndex;
use super::live::Live;
use super::warden::Warden;
use crate::service::{sandbox, spawn};
use crate::text::with_causes;

/// Compiled sessions of one model with bound shapes.
const MAX_BOUND: u32 = 4;

impl Warden {
    /// Makes sure that the engine has a worker.
    pub(super) fn start(&mut self, engine: EngineIndex) -> Result<(), String> {
        if self.workers.contains_key(&engine) {
            return Ok(());
        }
        let found = self.host.as_ref().and_then(|host| host.engines.get(engine)).cloned();
        let found = found.ok_or_else(|| "no such engine".to_owned())?;
        let live = self.start_worker(&found)?;
        self.shared.workers.fetch_add(1, Ordering::Relaxed);
        tracing::info!(
            container = self.container,
            pid = live.process.pid(),
            engine = found.name,
            "worker started"
        );
        self.workers.insert(engine, live);
        Ok(())
    }

    fn start_worker(&self, engine: &AneEngine) -> Result<Live, String> {
        let shared = &self.shared;
        // The processor's own kernels keep nothing on disk.
        let cache = (engine.provider != Provider::Cpu)
            .then(|| shared.cache.take(&self.owner, &shared.build(engine)))
            .flatten();
        let sandbox = if shared.config.sandbox {
            let needs = sandbox::Needs {
                kind: Kind::Ane,
                program: shared.program.file(),
                folders: &engine.library.folders,
                own_folder: cache.as_ref().map(super::cache::CacheFolder::path),
                on_processor: engine.class == Class::Cpu,
                max_bytes: shared.max_worker_bytes,
                apart: false,
            };
            let prepared = sandbox::prepare(&needs);
            Some(
                prepared
                    .map_err(|error| format!("its worker cannot be restricted: {}", with_causes(&error)))?,
            )
        } else {
            None
        };
        if let (Some(folder), Some(user)) =
            (&cache, sandbox.as_ref().and_then(|sandbox| sandbox.user.as_ref()))
        {
            folder
                .give_to(user.uid.as_raw(), user.gid.as_raw())
                .map_err(|error| format!("its part of the cache cannot be given to it: {error}"))?;
        }
        let command = command_for(&shared.program.inherited_path(), &shared.config);
        let worker = spawn::spawn(&shared.program, command, sandbox).map_err(|error| with_causes(&error))?;
        let cache_dir = cache.as_ref().map(|folder| folder.path().to_owned());
        let live = Live::new(worker, Instant::now() + shared.config.start_limit(), cache);
        let configure = ToWorker::Configure(WorkerConfig {
            version: WORKER_VERSION,
            library: engine.library.path.clone(),
            provider: engine.provider,
            options: engine.options.clone(),
            // The processor takes any shapes; what compiles for a device wants to know them.
            bind_shapes: engine.provider != Provider::Cpu,
            max_bound: MAX_BOUND,
            threads: shared.threads,
            max_run_bytes: shared.max_run_bytes,
            max_streams: shared.config.max_streams_per_container,
            cache_dir,
        });
        live.say_now(&configure)
            .map_err(|error| format!("its worker takes no message: {}", with_causes(&error)))?;
        Ok(live)
    }
}
