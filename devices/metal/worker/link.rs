// SPDX-License-Identifier: MIT OR Apache-2.0
//! The worker's end of its control socket: questions of client threads, answers by number.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lighter_wire::PacketError;

use crate::metal::control::{FromWorker, ToWorker};

/// A service that takes longer is taken for one that says no; the client's upload goes on without.
const PATIENCE: Duration = Duration::from_secs(10);

/// The control socket.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    waiting: Mutex<HashMap<u64, SyncSender<Option<OwnedFd>>>>,
    next: AtomicU64,
}

impl Link {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, waiting: Mutex::default(), next: AtomicU64::new(1) }
    }

    /// Takes the next message of the service.
    ///
    /// # Errors
    /// When the socket fails or the message is none.
    pub(super) fn next(&self) -> Result<Option<(ToWorker, Vec<OwnedFd>)>, PacketError> {
        lighter_wire::recv(&self.socket)
    }

    /// Says something to the service. A service that is gone ends this worker anyway.
    pub(super) fn say(&self, message: &FromWorker, descriptors: &[BorrowedFd<'_>]) {
        if let Err(error) = lighter_wire::send(self.socket.as_fd(), message, descriptors) {
            tracing::debug!(%error, "service did not take a message");
        }
    }

    /// Asks for a shared file; `None` when the service has none, or does not answer.
    pub(super) fn ask(
        &self,
        question: impl FnOnce(u64) -> FromWorker,
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<OwnedFd> {
        let seq = self.next.fetch_add(1, Relaxed);
        let (give, take) = sync_channel(1);
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(seq, give);
        self.say(&question(seq), descriptors);
        let answer = take.recv_timeout(PATIENCE).ok().flatten();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&seq);
        answer
    }

    /// Brings an answer to who asked; one that nobody waits for is dropped.
    pub(super) fn answer(&self, seq: u64, file: Option<OwnedFd>) {
        let asker = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&seq);
        if let Some(asker) = asker {
            // It may have lost its patience just now.
            let _ = asker.try_send(file);
        }
    }
}
