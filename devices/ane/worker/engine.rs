// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all threads of a worker share: ONNX Runtime, the settings, the counters, the way to the service.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::link::Link;
use super::model::{lock, micros};
use crate::ane::control::{FromWorker, WorkerConfig, WorkerCounters};
use crate::ane::ort::{Ort, OrtError, ProviderSetup, SessionSetup};

/// How often the service hears of counters that move.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// Why the engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// ONNX Runtime.
    #[error(transparent)]
    Ort(#[from] OrtError),
    /// The service speaks another version.
    #[error("the service speaks version {service} of the workers' messages, this worker speaks {worker}")]
    Version {
        /// The service's.
        service: u32,
        /// This one's.
        worker: u32,
    },
}

/// Counters as they are counted.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) streams_open: AtomicU64,
    pub(super) streams_total: AtomicU64,
    pub(super) runs: AtomicU64,
    pub(super) in_bytes: AtomicU64,
    pub(super) out_bytes: AtomicU64,
    pub(super) engine_us: AtomicU64,
    pub(super) model_bytes: AtomicU64,
    pub(super) sessions: AtomicU64,
    errors: AtomicU64,
    last_error: Mutex<Option<String>>,
}

impl Counters {
    /// Counts an error.
    pub(super) fn failed(&self, text: &str) {
        self.errors.fetch_add(1, Relaxed);
        *lock(&self.last_error) = Some(text.chars().take(1000).collect());
    }

    fn report(&self) -> WorkerCounters {
        WorkerCounters {
            streams_open: self.streams_open.load(Relaxed),
            streams_total: self.streams_total.load(Relaxed),
            runs: self.runs.load(Relaxed),
            in_bytes: self.in_bytes.load(Relaxed),
            out_bytes: self.out_bytes.load(Relaxed),
            engine_us: self.engine_us.load(Relaxed),
            model_bytes: self.model_bytes.load(Relaxed),
            sessions: self.sessions.load(Relaxed),
            errors: self.errors.load(Relaxed),
            last_error: lock(&self.last_error).clone(),
        }
    }
}

/// The engine.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) ort: Arc<Ort>,
    pub(super) config: WorkerConfig,
    pub(super) setup: SessionSetup,
    pub(super) link: Arc<Link>,
    pub(super) counters: Counters,
    /// Held while a session is made.
    pub(super) compiling: Mutex<()>,
    running: Mutex<HashMap<u64, Instant>>,
    moved: Mutex<bool>,
    moves: Condvar,
}

impl Engine {
    pub(super) fn open(config: WorkerConfig, link: Arc<Link>) -> Result<Arc<Self>, OpenError> {
        let ort = Ort::open(&config.library)?;
        let provider = ProviderSetup { provider: config.provider, options: config.options.clone() };
        let setup = SessionSetup { provider, threads: config.threads, cache_dir: config.cache_dir.clone() };
        ort.require(config.provider)?;
        Ok(Arc::new(Self {
            ort,
            config,
            setup,
            link,
            counters: Counters::default(),
            compiling: Mutex::default(),
            running: Mutex::default(),
            moved: Mutex::new(false),
            moves: Condvar::new(),
        }))
    }

    /// Marks a run of a stream as going on, until the guard is dropped.
    pub(super) fn running(&self, stream: u64) -> Running<'_> {
        lock(&self.running).insert(stream, Instant::now());
        // A run that never ends is heard of by that it began.
        self.touch();
        Running { engine: self, stream }
    }

    /// Says that counters moved.
    pub(super) fn touch(&self) {
        let mut moved = lock(&self.moved);
        if !*moved {
            *moved = true;
            self.moves.notify_one();
        }
    }

    /// Tells the service of counters that move, and sleeps while none does. Returns never.
    pub(super) fn tell_counters(&self) -> ! {
        loop {
            let mut moved = lock(&self.moved);
            while !*moved {
                moved = self.moves.wait(moved).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            drop(moved);
            std::thread::sleep(TOLD_EVERY);
            *lock(&self.moved) = false;
            self.link.say(&FromWorker::Counters(self.counters.report()), &[]);
        }
    }

    pub(super) fn report(&self, seq: u64) -> FromWorker {
        let oldest_run_us = lock(&self.running).values().map(|start| micros(*start)).max();
        FromWorker::Report { seq, counters: self.counters.report(), oldest_run_us }
    }
}

/// A run that goes on.
#[derive(Debug)]
pub(super) struct Running<'a> {
    engine: &'a Engine,
    stream: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.engine.running).remove(&self.stream);
    }
}
