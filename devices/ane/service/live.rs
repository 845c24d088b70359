// SPDX-License-Identifier: MIT OR Apache-2.0
//! One running worker: its process, its control socket, what it holds.
//!
//! Whatever becomes of it, the process is killed and reaped when this is dropped.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitStatus;
use std::time::Instant;

use lighter_wire::{PacketError, recv, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::control::{FromWorker, ModelHash, Shapes, ToWorker, WorkerCounters};
use super::cache::CacheFolder;
use crate::service::lines::Lines;
use crate::service::spawn::Worker;

/// Last lines of standard error that are kept to explain a crash.
const KEPT_LINES: usize = 8;

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
    worker: Worker,
    pub(super) lines: Lines,
    last_lines: VecDeque<String>,
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
    pub(super) fn new(mut worker: Worker, deadline: Instant, cache: Option<CacheFolder>) -> Self {
        let stderr = worker.child.stderr.take().map(OwnedFd::from);
        Self {
            worker,
            lines: Lines::new(stderr),
            last_lines: VecDeque::new(),
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

    pub(super) fn control(&self) -> &OwnedFd {
        &self.worker.control
    }

    pub(super) fn pidfd(&self) -> &OwnedFd {
        &self.worker.pidfd
    }

    pub(super) fn pid(&self) -> u32 {
        self.worker.child.id()
    }

    /// Sends a message at once.
    pub(super) fn say_now(&self, message: &ToWorker) -> Result<(), PacketError> {
        send(&self.worker.control, message, &[])
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
        send(&self.worker.control, message, &borrowed)
    }

    /// The next message, when there is one; `None` also at the end of its socket.
    pub(super) fn message(&self) -> Result<Option<(FromWorker, Vec<OwnedFd>)>, PacketError> {
        let mut polled = [PollFd::new(&self.worker.control, PollFlags::IN)];
        if !poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            return Ok(None);
        }
        recv(&self.worker.control)
    }

    /// Remembers lines for the case of a crash.
    pub(super) fn remember(&mut self, line: &str) {
        if self.last_lines.len() == KEPT_LINES {
            self.last_lines.pop_front();
        }
        self.last_lines.push_back(line.to_owned());
    }

    /// The line that says most about a crash, else the last.
    pub(super) fn last_words(&self) -> Option<&str> {
        let telling = |line: &&String| {
            ["panicked", "terminate called", "rror", "ssert"].iter().any(|word| line.contains(word))
        };
        self.last_lines.iter().rev().find(telling).or(self.last_lines.back()).map(String::as_str)
    }

    /// Kills it if need be and waits for its end.
    pub(super) fn end(&mut self) -> Option<ExitStatus> {
        // Fails only when it has been reaped.
        let _ = self.worker.child.kill();
        self.worker.child.wait().ok()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.end();
    }
}
