// SPDX-License-Identifier: MIT OR Apache-2.0
//! One running worker: its process, and how far it is. The process ends when this is dropped.
//!
//! ```text
//! starting ──► ready ──stream──► serving ──Ended──► ending ──► gone
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use lighter_wire::PacketError;

use super::super::control::{FromWorker, ToWorker};
use crate::service::process::Process;
use crate::service::spawn::Worker;
use crate::service::wardens::is_readable;

/// What Python, torch and its drivers write when they give up.
const TELLING: &[&str] = &["Error", "Exception", "Fatal", "terminate called", "ssert"];

/// Where the worker is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Loads torch.
    Starting {
        /// When that has taken too long.
        deadline: Instant,
    },
    /// Waits for a stream.
    Ready,
    /// Has one.
    Serving,
    /// Has said that its stream has ended.
    Ending {
        /// When it should be gone.
        deadline: Instant,
    },
}

/// What comes from a worker.
#[derive(Debug)]
pub(super) enum Heard {
    /// Nothing for the moment.
    Nothing,
    /// A message.
    Message(FromWorker),
    /// What is no message.
    Rubbish(PacketError),
    /// Its end of the socket is closed: it ends, or is of no use any more.
    End,
}

/// A running worker.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) process: Process,
    pub(super) phase: Phase,
}

impl Live {
    pub(super) fn new(worker: Worker, deadline: Instant) -> Self {
        Self { process: Process::new(worker, TELLING), phase: Phase::Starting { deadline } }
    }

    /// When something is overdue.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Starting { deadline } | Phase::Ending { deadline } => Some(deadline),
            Phase::Ready | Phase::Serving => None,
        }
    }

    /// What it says next.
    pub(super) fn hear(&self) -> Heard {
        if !is_readable(self.process.control()) {
            return Heard::Nothing;
        }
        match self.process.message() {
            Ok(Some((message, _))) => Heard::Message(message),
            Ok(None) => Heard::End,
            Err(PacketError::Socket(_)) => Heard::End,
            Err(error) => Heard::Rubbish(error),
        }
    }

    pub(super) fn say(&self, message: &ToWorker) -> Result<(), PacketError> {
        self.process.say(message, &[])
    }

    /// Gives it its stream.
    pub(super) fn pass(&mut self, stream: u64, socket: &OwnedFd) -> Result<(), PacketError> {
        self.process.say(&ToWorker::Stream { stream }, &[socket.as_fd()])?;
        self.phase = Phase::Serving;
        Ok(())
    }
}
