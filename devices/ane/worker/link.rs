// SPDX-License-Identifier: MIT OR Apache-2.0
//! The worker's end of its control socket.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use lighter_wire::PacketError;

use crate::ane::control::{FromWorker, ToWorker};

/// The control socket; any thread may speak.
#[derive(Debug)]
pub(super) struct Link(OwnedFd);

impl Link {
    pub(super) const fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Takes the next message of the service.
    ///
    /// # Errors
    /// When the socket fails or the message is none.
    pub(super) fn next(&self) -> Result<Option<(ToWorker, Vec<OwnedFd>)>, PacketError> {
        lighter_wire::recv(&self.0)
    }

    /// Says something to the service. A service that is gone ends this worker anyway.
    pub(super) fn say(&self, message: &FromWorker, descriptors: &[BorrowedFd<'_>]) {
        if let Err(error) = lighter_wire::send(self.0.as_fd(), message, descriptors) {
            tracing::debug!(%error, "service did not take a message");
        }
    }
}
