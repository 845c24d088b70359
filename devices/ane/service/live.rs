// SPDX-License-Identifier: MIT OR Apache-2.0
//! One running worker: its process, and what it holds.
//!
//! The process ends when this is dropped, and then its part of the cache is let go.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use lighter_wire::PacketError;

use super::super::control::{ModelHash, Shapes, ToWorker, WorkerCounters};
use super::cache::CacheFolder;
use crate::service::process::Process;
use crate::service::spawn::Worker;

/// What ONNX Runtime, its drivers and Rust write when they give up.
const TELLING: &[&str] = &["panicked", "terminate called", "rror", "ssert"];

/// Where the worker is in its life.
#[derive(Debug)]
pub(super) enum Phase {
    /// Loads the library.
    Starting {
        /// When that has taken too long.
        deadline: Instant,
        /// What it gets when it is ready.
        messages: Vec<(ToWorker, Vec<OwnedFd>)>,
    },
    /// Takes messages.
    Up,
}

/// How far a model is with the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadState {
    /// It has been sent.
    Loading,
    /// It can be run.
    Loaded,
}

/// A running worker.
#[derive(Debug)]
pub(super) struct Live {
    // First, so that the process is gone when what it holds is let go.
    pub(super) process: Process,
    pub(super) phase: Phase,
    /// Models that it has.
    pub(super) models: HashMap<ModelHash, LoadState>,
    /// Shapes that it may serve.
    pub(super) approved: BTreeSet<(ModelHash, Shapes)>,
    /// Streams that it has, and the models that they are for.
    pub(super) streams: BTreeMap<u64, ModelHash>,
    /// Since when it has had nothing to do.
    pub(super) idle_since: Instant,
    pub(super) counters: WorkerCounters,
    /// When it is asked how long its runs take.
    pub(super) look_at: Option<Instant>,
    /// When its answer to that is overdue.
    pub(super) answer_by: Option<Instant>,
    /// Its part of the cache, for as long as it lives.
    _cache: Option<CacheFolder>,
}

impl Live {
    pub(super) fn new(worker: Worker, deadline: Instant, cache: Option<CacheFolder>) -> Self {
        Self {
            process: Process::new(worker, TELLING),
            phase: Phase::Starting { deadline, messages: Vec::new() },
            models: HashMap::new(),
            approved: BTreeSet::new(),
            streams: BTreeMap::new(),
            idle_since: Instant::now(),
            counters: WorkerCounters::default(),
            look_at: None,
            answer_by: None,
            _cache: cache,
        }
    }

    /// Sends a message at once.
    pub(super) fn say_now(&self, message: &ToWorker) -> Result<(), PacketError> {
        self.process.say(message, &[])
    }

    /// Sends a message, or keeps it until the worker is ready. The descriptors are closed here once they are sent.
    pub(super) fn say(&mut self, message: ToWorker, descriptors: Vec<OwnedFd>) -> Result<(), PacketError> {
        match &mut self.phase {
            Phase::Starting { messages, .. } => {
                messages.push((message, descriptors));
                Ok(())
            }
            Phase::Up => self.send(&message, &descriptors),
        }
    }

    /// The worker is ready: it gets what has waited.
    pub(super) fn ready(&mut self) -> Result<(), PacketError> {
        self.idle_since = Instant::now();
        if let Phase::Starting { messages, .. } = std::mem::replace(&mut self.phase, Phase::Up) {
            for (message, descriptors) in messages {
                self.send(&message, &descriptors)?;
            }
        }
        Ok(())
    }

    fn send(&self, message: &ToWorker, descriptors: &[OwnedFd]) -> Result<(), PacketError> {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.process.say(message, &borrowed)
    }
}
