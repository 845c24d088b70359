// SPDX-License-Identifier: MIT OR Apache-2.0
//! The agent's one waiting thread: hooks that connect, processes that connect to endpoints, inits that end. It never blocks
//! on any of them; the work is done by pools. No error of an accept ends it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::agent::Shared;
use crate::poller::{Target, Token};
use crate::pool::Busy;
use crate::{ends, hook_server, lock, reconcile, streams};

/// How long a socket rests after an accept that failed for want of descriptors or memory.
pub(crate) const REST: Duration = Duration::from_millis(100);
/// Between two tries to open endpoints that were taken after a restart.
const REOPEN: Duration = Duration::from_secs(1);
const MAX_ACCEPTS: usize = 64;

pub(crate) fn run(shared: &Arc<Shared>, hook_token: Token, hooks: &Arc<OwnedFd>) {
    let mut reopen_at = Instant::now() + REOPEN;
    while !shared.stopping.load(Ordering::SeqCst) {
        let now = Instant::now();
        let rested = wake_rested(shared, now);
        let reopening = !lock(&shared.unopened).is_empty();
        if reopening && reopen_at <= now {
            reopen_at = now + REOPEN;
            let inner = Arc::clone(shared);
            let _ = shared.hooks.run(move || reconcile::retry_unopened(&inner));
        }
        let next = rested.into_iter().chain(reopening.then_some(reopen_at)).min();
        let events = match shared.poller.wait(next.map(|at| at.saturating_duration_since(now))) {
            Ok(events) => events,
            Err(error) => {
                // Only a kernel out of memory gets here; without a pause this would spin.
                tracing::error!(%error, "epoll failed");
                std::thread::sleep(REST);
                continue;
            }
        };
        for (token, target) in events {
            match target {
                Target::Wake => {}
                Target::Hook => accept_hooks(shared, hook_token, hooks),
                Target::Init(grant) => ends::init_ended(shared, &grant),
                Target::Port(space, port) => {
                    let Some(space) = space.upgrade() else { continue };
                    let inner = Arc::clone(shared);
                    let kept = Arc::clone(&space);
                    let queued = shared.gate.run(move || streams::accept_at_port(&inner, &kept, port));
                    rest_unless(queued, shared, token, || space.listener(port));
                }
                Target::Socket(kind) => {
                    let inner = Arc::clone(shared);
                    let queued = shared.gate.run(move || streams::accept_at_socket(&inner, kind));
                    rest_unless(queued, shared, token, || shared.sockets.listener(kind));
                }
            }
        }
    }
}

/// Lets a listener rest whose streams could not be queued: unarmed, it would be dead.
fn rest_unless(
    queued: Result<(), Busy>,
    shared: &Shared,
    token: Token,
    listener: impl FnOnce() -> Option<(Arc<OwnedFd>, Token)>,
) {
    if queued.is_err()
        && let Some((listener, _)) = listener()
    {
        shared.rest(token, listener, REST);
    }
}

/// Arms sockets whose rest is over; gives the time at which the next one is due.
fn wake_rested(shared: &Shared, now: Instant) -> Option<Instant> {
    let mut resting = lock(&shared.resting);
    resting.retain(|(at, token, listener)| {
        if *at <= now {
            shared.poller.arm(*token, &**listener);
        }
        *at > now
    });
    resting.iter().map(|(at, _, _)| *at).min()
}

fn accept_hooks(shared: &Arc<Shared>, token: Token, hooks: &Arc<OwnedFd>) {
    for _ in 0..MAX_ACCEPTS {
        match accept_with(&**hooks, SocketFlags::CLOEXEC) {
            Ok(connection) => hook_server::take(shared, connection),
            Err(Errno::WOULDBLOCK) => break,
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::error!(error = %std::io::Error::from(errno), "hooks cannot be accepted; trying again");
                shared.rest(token, Arc::clone(hooks), REST);
                return;
            }
        }
    }
    shared.poller.arm(token, &**hooks);
}
