// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the agent needs of whoever runs the services; the daemon implements it.

use std::os::fd::OwnedFd;

use lighter_wire::{GrantId, Kind, StreamOffer};

/// The services, as the agent sees them. Called from several threads at once.
pub trait Services: Send + Sync {
    /// Gives an accepted socket to the service of `kind`. The agent keeps no copy of it; a copy that the implementation
    /// kept would hide the end of the stream from the service.
    ///
    /// # Errors
    /// When the service does not run; the stream is closed then.
    fn hand_over(&self, kind: Kind, offer: StreamOffer, stream: OwnedFd) -> Result<(), ServiceUnavailable>;

    /// Ends every stream of a grant and frees its memory. Comes back when the service says that it is done, or after
    /// a time limit of the implementation's own. No stream of the grant is handed over afterwards.
    fn revoke(&self, kind: Kind, grant: &GrantId);
}

/// The service of a device takes no streams.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {kind} service takes no stream: {reason}")]
pub struct ServiceUnavailable {
    /// Which.
    pub kind: Kind,
    /// Why.
    pub reason: String,
}
