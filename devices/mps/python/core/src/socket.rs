// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writing to the socket: a batch of bytes that stops and goes on, and a thread that signals stay away from.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

/// Bytes that one thread writes; until it is given to `Stream::finish` nobody else may write.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) bytes: Vec<u8>,
    /// How many of them are written.
    pub(crate) sent: usize,
    pub(crate) socket: i32,
}

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    All,
    /// The socket takes no more at the moment.
    Full,
    /// A signal came; its handler may want to raise.
    Interrupted,
    Failed(Errno),
}

impl Batch {
    /// Writes on where it stopped; `wait` lets it sleep until the socket takes everything.
    pub(crate) fn write(&mut self, wait: bool) -> Written {
        // SAFETY: the owner keeps the socket open while a write goes on, see `Stream::set_socket`.
        let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
        let flags = SendFlags::NOSIGNAL | if wait { SendFlags::empty() } else { SendFlags::DONTWAIT };
        while let Some(rest) = self.bytes.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send(socket, rest, flags) {
                Ok(count) => self.sent = self.sent.saturating_add(count),
                Err(Errno::INTR) => return Written::Interrupted,
                Err(Errno::AGAIN) if !wait => return Written::Full,
                Err(Errno::AGAIN) => {
                    // The socket is a non-blocking one: sleep here instead.
                    let mut polled = [PollFd::new(&socket, PollFlags::OUT)];
                    match poll(&mut polled, None) {
                        Ok(_) => {}
                        Err(Errno::INTR) => return Written::Interrupted,
                        Err(error) => return Written::Failed(error),
                    }
                }
                Err(error) => return Written::Failed(error),
            }
        }
        Written::All
    }
}

/// Signals stay away from threads that are started meanwhile: Python's own threads must get them, so that a wait for
/// the host can be interrupted.
#[derive(Debug)]
pub(crate) struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    pub(crate) fn now() -> Self {
        // SAFETY: plain structs that the calls fill; a failed call leaves the mask as it was.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the mask is the one that `now` replaced.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
