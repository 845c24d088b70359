// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the wardens of all containers share: settings and limits, engines, journal, cache, troubles.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::config::AneConfig;
use super::super::journal::{Advice, End, Journal, Key, Line, now_s};
use super::super::probe::AneEngine;
use super::cache::Cache;
use super::engines::Engines;
use crate::service::WorkerProgram;
use crate::service::troubles::Troubles;
use crate::system;

/// Threads of one session where the configuration does not say; more make runs of other containers late.
const MAX_THREADS: u16 = 16;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: AneConfig,
    pub(super) program: WorkerProgram,
    pub(super) engines: Engines,
    pub(super) cache: Arc<Cache>,
    pub(super) workers: AtomicU64,
    pub(super) max_worker_bytes: u64,
    pub(super) max_model_bytes: u64,
    pub(super) max_run_bytes: u64,
    pub(super) threads: u16,
    system: String,
    journal: Mutex<Journal>,
    /// Attempts that are under way.
    running: Mutex<BTreeMap<Key, u32>>,
    troubles: Mutex<Troubles>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(config: AneConfig, program: WorkerProgram) -> Self {
        let half = system::memory_bytes() / 2;
        let max_worker_bytes = config.max_bytes_per_worker.unwrap_or(half);
        let cpus = system::processors().map_or(1, |count| count.min(MAX_THREADS));
        let mut journal = Journal::new(&config.state_dir);
        match journal.refresh() {
            Ok(fold) if fold.unreadable() > 0 => {
                tracing::warn!(
                    lines = fold.unreadable(),
                    "lines of the journal cannot be read and are left out"
                );
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the journal cannot be read"),
        }
        let names = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        Self {
            cache: Arc::new(Cache::new(config.cache_dir.clone(), config.cache_max_bytes)),
            max_worker_bytes,
            max_model_bytes: config.max_model_bytes_per_container.unwrap_or(half),
            max_run_bytes: max_worker_bytes / 4,
            threads: config.threads.unwrap_or(cpus),
            system: format!("{} {} {}", text(names.sysname()), text(names.release()), text(names.machine())),
            engines: Engines::default(),
            workers: AtomicU64::new(0),
            journal: Mutex::new(journal),
            running: Mutex::default(),
            troubles: Mutex::default(),
            config,
            program,
        }
    }

    pub(super) fn trouble(&self, text: String) {
        lock(&self.troubles).add(text);
    }

    pub(super) fn troubles(&self) -> Vec<String> {
        lock(&self.troubles).list()
    }

    pub(super) fn journal(&self) -> MutexGuard<'_, Journal> {
        lock(&self.journal)
    }

    /// Reads what others have added to the journal; whether there was anything to read.
    pub(super) fn journal_changed(&self) -> bool {
        let mut journal = self.journal();
        let before = journal.position();
        match journal.refresh().map(|_| ()) {
            Ok(()) => journal.position() != before,
            Err(error) => {
                tracing::debug!(%error, "the journal cannot be read");
                false
            }
        }
    }

    /// What decides besides model, shapes and engine: an upgrade of any of it tries anew.
    pub(super) fn build(&self, engine: &AneEngine) -> String {
        let options: Vec<String> =
            engine.options.iter().map(|(key, value)| format!(" {key}={value}")).collect();
        format!("{}{}, ONNX Runtime {}, {}", engine.provider, options.concat(), engine.version, self.system)
    }

    /// Whether an engine is to be tried.
    pub(super) fn advice(&self, key: &Key) -> Advice {
        let running = lock(&self.running).get(key).copied().unwrap_or(0);
        self.journal().fold().advice(key, self.config.attempts, running, now_s())
    }

    /// Writes down that an attempt begins; whether that is on disk.
    pub(super) fn begin(&self, key: &Key) -> bool {
        match self.journal().append(&[Line::Attempt { at_s: now_s(), key: key.clone() }]) {
            Ok(()) => {
                *lock(&self.running).entry(key.clone()).or_default() += 1;
                true
            }
            Err(error) => {
                let text = format!("no engine is tried, because the journal cannot be written: {error}");
                tracing::error!("{text}");
                self.trouble(text);
                false
            }
        }
    }

    /// Writes down how an attempt ended.
    pub(super) fn end(&self, key: &Key, end: End) {
        self.note(Line::Ended { at_s: now_s(), key: key.clone(), end });
        self.abandon(key);
    }

    /// An attempt is under way no longer.
    pub(super) fn abandon(&self, key: &Key) {
        let mut running = lock(&self.running);
        if let Some(count) = running.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                running.remove(key);
            }
        }
    }

    /// Takes an attempt back that came to no end through no fault of the engine's.
    pub(super) fn withdraw(&self, key: &Key) {
        self.end(key, End::Agreed { largest: 0.0, compile_us: None, us: None, cpu_us: None });
    }

    /// Whether the journal knows of this choice.
    pub(super) fn is_chosen(&self, key: &Key) -> bool {
        let journal = self.journal();
        let facts = journal.fold().models().get(&key.model);
        facts.and_then(|facts| facts.chosen.get(&key.shapes)).is_some_and(|chosen| chosen.key == *key)
    }

    pub(super) fn note(&self, line: Line) {
        if let Err(error) = self.journal().append(&[line]) {
            tracing::warn!(%error, "the journal does not take a line");
        }
    }
}
