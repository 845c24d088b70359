// SPDX-License-Identifier: MIT OR Apache-2.0
//! One running worker: its process, and what it holds.
//!
//! The process ends when this is dropped, and then its weights are let go.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use lighter_wire::PacketError;

use super::super::control::ToWorker;
use super::weights::Holder;
use crate::service::process::Process;
use crate::service::spawn::Worker;

/// A failed assertion of ggml's says most about a crash.
const TELLING: &[&str] = &["ASSERT", "panicked", "error"];

/// A stream that waits for the engine.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) stream: u64,
    pub(super) major: Option<u8>,
    pub(super) socket: OwnedFd,
}

/// Where the worker is in its life.
#[derive(Debug)]
pub(super) enum Phase {
    /// Loads the engine.
    Starting {
        /// When that has taken too long.
        deadline: Instant,
        /// Streams for it.
        waiting: Vec<Waiting>,
    },
    /// Takes streams.
    Up,
}

/// A running worker.
#[derive(Debug)]
pub(super) struct Live {
    // First, so that the process is gone when what it holds is let go.
    pub(super) process: Process,
    pub(super) phase: Phase,
    /// Streams that it has.
    pub(super) open: HashSet<u64>,
    /// Since when it has none.
    pub(super) idle_since: Instant,
    pub(super) holder: Holder,
}

impl Live {
    pub(super) fn new(worker: Worker, deadline: Instant, holder: Holder) -> Self {
        Self {
            process: Process::new(worker, TELLING),
            phase: Phase::Starting { deadline, waiting: Vec::new() },
            open: HashSet::new(),
            idle_since: Instant::now(),
            holder,
        }
    }

    /// Streams with it or waiting for it.
    pub(super) fn streams(&self) -> usize {
        match &self.phase {
            Phase::Starting { waiting, .. } => waiting.len(),
            Phase::Up => self.open.len(),
        }
    }

    pub(super) fn say(&self, message: &ToWorker) -> Result<(), PacketError> {
        self.process.say(message, &[])
    }

    /// Passes a stream on.
    pub(super) fn pass(&mut self, stream: &Waiting) -> Result<(), PacketError> {
        let message = ToWorker::Stream { stream: stream.stream, major: stream.major };
        self.process.say(&message, &[stream.socket.as_fd()])?;
        self.open.insert(stream.stream);
        Ok(())
    }

    /// Answers a question about a weight.
    pub(super) fn answer_weight(&self, seq: u64, file: Option<&OwnedFd>) -> Result<(), PacketError> {
        let message = ToWorker::Weight { seq, found: file.is_some() };
        let descriptors: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        self.process.say(&message, &descriptors)
    }
}
