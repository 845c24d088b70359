// SPDX-License-Identifier: MIT OR Apache-2.0
//! One stream's processes: the session, the render server, and the process that the render server makes for the GPU. They end
//! when this is dropped.
//!
//! ```text
//! starting ──Ready──► serving ──Context──► serving, with a process for the GPU ──Ended──► ending ──► gone
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use lighter_wire::PacketError;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::super::control::{FromSession, ToSession};
use crate::service::process::Process;
use crate::service::wardens::is_readable;

/// Where the stream is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The renderer starts.
    Starting {
        /// When that has taken too long.
        deadline: Instant,
    },
    /// It has its client.
    Serving,
    /// The session has said that its client has gone.
    Ending {
        /// When it should be gone.
        deadline: Instant,
    },
}

/// What comes from a session.
#[derive(Debug)]
pub(super) enum Heard {
    /// Nothing for the moment.
    Nothing,
    /// A message.
    Message(FromSession),
    /// What is no message.
    Rubbish(PacketError),
    /// Its end of the socket is closed.
    End,
}

/// A stream's processes.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) session: Process,
    pub(super) server: Process,
    /// The processes that the render server has made.
    gpu: Vec<OwnedFd>,
    pub(super) phase: Phase,
}

impl Live {
    pub(super) fn new(session: Process, server: Process, deadline: Instant) -> Self {
        Self { session, server, gpu: Vec::new(), phase: Phase::Starting { deadline } }
    }

    /// When something is overdue.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Starting { deadline } | Phase::Ending { deadline } => Some(deadline),
            Phase::Serving => None,
        }
    }

    /// What the session says next.
    pub(super) fn hear(&self) -> Heard {
        if !is_readable(self.session.control()) {
            return Heard::Nothing;
        }
        match self.session.message() {
            Ok(Some((message, _))) => Heard::Message(message),
            Ok(None) | Err(PacketError::Socket(_)) => Heard::End,
            Err(error) => Heard::Rubbish(error),
        }
    }

    pub(super) fn say(&self, message: &ToSession) -> Result<(), PacketError> {
        self.session.say(message, &[])
    }

    /// Gives the session its client.
    pub(super) fn pass(&mut self, stream: u64, socket: &OwnedFd) -> Result<(), PacketError> {
        self.session.say(&ToSession::Stream { stream }, &[socket.as_fd()])?;
        self.phase = Phase::Serving;
        Ok(())
    }

    /// Watches the processes that the render server has by now. One that ended before this is missed, but then the render
    /// server tells the session.
    pub(super) fn watch_gpu(&mut self) {
        let pid = self.server.pid();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        self.gpu = children
            .split_ascii_whitespace()
            .filter_map(|pid| pidfd_open(Pid::from_raw(pid.parse().ok()?)?, PidfdFlags::empty()).ok())
            .collect();
    }

    /// Which of its processes has ended, when one has.
    pub(super) fn ended(&self) -> Option<&'static str> {
        if is_readable(self.session.pidfd()) {
            Some("the session")
        } else if is_readable(self.server.pidfd()) {
            Some("the render server")
        } else if self.gpu.iter().any(is_readable) {
            Some("the process with the GPU's driver")
        } else {
            None
        }
    }

    /// What is to be watched.
    pub(super) fn fds(&self) -> impl Iterator<Item = &OwnedFd> {
        let (session, server) = (&self.session, &self.server);
        let watched = [
            Some(session.control()),
            Some(session.pidfd()),
            session.stderr(),
            Some(server.pidfd()),
            server.stderr(),
        ];
        watched.into_iter().flatten().chain(&self.gpu)
    }

    /// Has all end, the session first: its client is to be told before anything else. Waits for none.
    pub(super) fn kill(&self) {
        self.session.kill();
        self.server.kill();
    }

    /// Ends all, and tells what their last words were.
    pub(super) fn obituary(&mut self) -> String {
        self.kill();
        let server = self.server.obituary();
        let session = self.session.obituary();
        format!("; session{session}; render server{server}")
    }

    /// Ends all and waits for that.
    pub(super) fn end(&mut self) {
        self.kill();
        self.session.end();
        self.server.end();
    }
}
