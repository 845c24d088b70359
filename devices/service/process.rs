// SPDX-License-Identifier: MIT OR Apache-2.0
//! One running worker as a process: its control socket, its words, its end.
//!
//! Whatever becomes of it, the process is killed and reaped when this is dropped. What the worker is doing is its
//! warden's matter.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitStatus;

use lighter_wire::{PacketError, recv, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group, pidfd_send_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::lines::Lines;
use super::spawn::Worker;
use crate::text::cut;

/// Last lines of standard error that are kept to explain a crash.
const KEPT_LINES: usize = 8;
/// How often what a dead worker wrote is read, a piece each time; more does not explain more.
const LAST_READS: usize = 32;

/// A worker's process.
#[derive(Debug)]
pub(crate) struct Process {
    worker: Worker,
    lines: Lines,
    last_lines: VecDeque<String>,
    telling: &'static [&'static str],
    is_reaped: bool,
}

impl Process {
    /// Takes a started worker. A line that holds one of `telling` says most about a crash.
    pub(crate) fn new(mut worker: Worker, telling: &'static [&'static str]) -> Self {
        let stderr = worker.child.stderr.take().map(OwnedFd::from);
        Self { worker, lines: Lines::new(stderr), last_lines: VecDeque::new(), telling, is_reaped: false }
    }

    pub(crate) fn control(&self) -> &OwnedFd {
        &self.worker.control
    }

    pub(crate) fn pidfd(&self) -> &OwnedFd {
        &self.worker.pidfd
    }

    pub(crate) fn pid(&self) -> u32 {
        self.worker.child.id()
    }

    /// Its standard error, until that closes.
    pub(crate) fn stderr(&self) -> Option<&OwnedFd> {
        self.lines.pipe()
    }

    pub(crate) fn say(
        &self,
        message: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), PacketError> {
        send(&self.worker.control, message, descriptors)
    }

    /// The next message, when there is one; `None` also at the end of its socket.
    pub(crate) fn message<M: DeserializeOwned>(&self) -> Result<Option<(M, Vec<OwnedFd>)>, PacketError> {
        let mut polled = [PollFd::new(&self.worker.control, PollFlags::IN)];
        if !poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            return Ok(None);
        }
        match recv(&self.worker.control) {
            // Told once by a worker's end that left a message of ours unread; what it said before that is still there.
            Err(PacketError::Socket(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                recv(&self.worker.control)
            }
            message => message,
        }
    }

    /// The lines that it has written since the last call; remembered for the case of a crash.
    pub(crate) fn read_lines(&mut self) -> Vec<String> {
        let lines = self.lines.read();
        for line in &lines {
            if self.last_lines.len() == KEPT_LINES {
                self.last_lines.pop_front();
            }
            self.last_lines.push_back(line.clone());
        }
        lines
    }

    /// Has it end, and does not wait for that.
    pub(crate) fn kill(&self) {
        // Fails only when it has ended.
        let _ = pidfd_send_signal(&self.worker.pidfd, Signal::KILL);
    }

    /// Ends it and tells how it ended and what it said last, to be put behind another text: ` (…); its last words: …`.
    pub(crate) fn obituary(&mut self) -> String {
        let status = self.end();
        for _ in 0..LAST_READS {
            self.read_lines();
        }
        let how = status.map_or_else(String::new, |status| format!(" ({status})"));
        let words =
            self.last_words().map_or_else(String::new, |words| format!("; its last words: {}", cut(words)));
        how + &words
    }

    /// The line that says most about a crash, else the last.
    fn last_words(&self) -> Option<&str> {
        let is_telling = |line: &&String| self.telling.iter().any(|word| line.contains(word));
        self.last_lines.iter().rev().find(is_telling).or(self.last_lines.back()).map(String::as_str)
    }

    /// Kills it if need be, with the processes that it has made, and waits for its end.
    pub(crate) fn end(&mut self) -> Option<ExitStatus> {
        if !self.is_reaped {
            // It leads its group, whose number is nobody else's before it has been reaped.
            let _ = kill_process_group(Pid::from_child(&self.worker.child), Signal::KILL);
            self.is_reaped = true;
        }
        self.worker.child.wait().ok()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}
