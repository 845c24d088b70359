// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a grant: no new stream, endpoints closed with the last user, streams and memory in the service given up, state
//! file removed. The end of the container's init brings it about, or the device being switched off; never a poststop hook.

use std::sync::{Arc, PoisonError};

use lighter_wire::GrantId;

use crate::agent::Shared;
use crate::grants::Grant;
use crate::lock;

/// Takes a grant out of use: after this no stream is let in under it. `None` when somebody else did already.
pub(crate) fn detach(shared: &Shared, id: &GrantId) -> Option<Arc<Grant>> {
    let grant = shared.grants.remove(id)?;
    *grant.ended.write().unwrap_or_else(PoisonError::into_inner) = true;
    if let Some(token) = lock(&grant.token).take() {
        shared.poller.remove(token, &grant.pidfd);
    }
    grant.space.release(&shared.poller, id);
    // Streams that wait for the engine are closed.
    lock(&grant.changing).waiting = None;
    Some(grant)
}

/// Frees what a detached grant has in the service and on disk; may wait for the service.
pub(crate) fn finish(shared: &Shared, grant: &Grant, why: &str) {
    shared.services.revoke(grant.device.kind(), &grant.id);
    if let Err(error) = shared.state.remove(&grant.id) {
        tracing::warn!(grant = %grant.id, %error, "grant file stays behind");
    }
    tracing::info!(grant = %grant.id, container = %grant.container, device = %grant.device, why, "grant ended");
}

/// The init of a grant has ended.
pub(crate) fn init_ended(shared: &Arc<Shared>, id: &GrantId) {
    let Some(grant) = detach(shared, id) else { return };
    let (inner, kept) = (Arc::clone(shared), Arc::clone(&grant));
    let queued = shared.ends.run(move || finish(&inner, &kept, "the container ended"));
    if queued.is_err() && !shared.stopping.load(std::sync::atomic::Ordering::SeqCst) {
        // Late is better than never: memory of a container that is gone must not stay.
        finish(shared, &grant, "the container ended");
    }
}
