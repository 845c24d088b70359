// SPDX-License-Identifier: MIT OR Apache-2.0
//! One running worker: its process, its control socket, what it holds.
//!
//! Whatever becomes of it, the process is killed and reaped when this is dropped, and then its weights are let go.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitStatus;
use std::time::Instant;

use lighter_wire::{PacketError, recv, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::control::{FromWorker, ToWorker};
use super::weights::Holder;
use crate::service::lines::Lines;
use crate::service::spawn::Worker;

/// Last lines of standard error that are kept to explain a crash.
const KEPT_LINES: usize = 8;

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
    worker: Worker,
    pub(super) lines: Lines,
    last_lines: VecDeque<String>,
    pub(super) phase: Phase,
    /// Streams that it has.
    pub(super) open: HashSet<u64>,
    /// Since when it has none.
    pub(super) idle_since: Instant,
    pub(super) holder: Holder,
}

impl Live {
    pub(super) fn new(mut worker: Worker, deadline: Instant, holder: Holder) -> Self {
        let stderr = worker.child.stderr.take().map(OwnedFd::from);
        Self {
            worker,
            lines: Lines::new(stderr),
            last_lines: VecDeque::new(),
            phase: Phase::Starting { deadline, waiting: Vec::new() },
            open: HashSet::new(),
            idle_since: Instant::now(),
            holder,
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

    /// Streams with it or waiting for it.
    pub(super) fn streams(&self) -> usize {
        match &self.phase {
            Phase::Starting { waiting, .. } => waiting.len(),
            Phase::Up => self.open.len(),
        }
    }

    pub(super) fn say(&self, message: &ToWorker) -> Result<(), PacketError> {
        send(&self.worker.control, message, &[])
    }

    /// Passes a stream on.
    pub(super) fn pass(&mut self, stream: &Waiting) -> Result<(), PacketError> {
        let message = ToWorker::Stream { stream: stream.stream, major: stream.major };
        send(&self.worker.control, &message, &[stream.socket.as_fd()])?;
        self.open.insert(stream.stream);
        Ok(())
    }

    /// Answers a question about a weight.
    pub(super) fn answer_weight(&self, seq: u64, file: Option<&OwnedFd>) -> Result<(), PacketError> {
        let message = ToWorker::Weight { seq, found: file.is_some() };
        let descriptors: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        send(&self.worker.control, &message, &descriptors)
    }

    /// The next message, when there is one; `None` also at the end of its socket.
    pub(super) fn message(&self) -> Result<Option<(FromWorker, Vec<OwnedFd>)>, PacketError> {
        if !is_readable(&self.worker.control) {
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

    /// The line that says most about a crash: a failed assertion of ggml's, else the last.
    pub(super) fn last_words(&self) -> Option<&str> {
        let telling =
            |line: &&String| line.contains("ASSERT") || line.contains("panicked") || line.contains("error");
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

fn is_readable(socket: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
