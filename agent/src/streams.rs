// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams: accepts a connection at an endpoint, gathers the facts, asks the gate, asks the engine where the gate wants that,
//! and hands the socket over. One thread at a time per listener, so that none takes all threads.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::{Endpoint, GrantId, Kind, StreamOffer};
use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketFlags, acceptfrom_with, getsockname};

use crate::agent::Shared;
use crate::endpoints::Space;
use crate::event_loop::REST;
use crate::gate::{self, Decision, Peer};
use crate::grants::{Grant, RecordState};
use crate::lock;
use crate::ns::{self, NsId};
use crate::poller::Token;
use crate::record::{self, Question, Verdict};
use crate::{peer, unix_peer};

/// After so many connections the other endpoints get their turn.
const MAX_ACCEPTS: usize = 16;

/// A stream that waits for the engine's answer about its grant.
#[derive(Debug)]
pub(crate) struct Waiting {
    stream: OwnedFd,
    kind: Kind,
    /// The network namespace of the peer, where it can be told.
    netns: Option<NsId>,
    peer: Peer,
}

/// Arms an endpoint again when its turn is over, however it ends: an endpoint that stayed unarmed would be dead.
struct Turn<'a> {
    shared: &'a Shared,
    listener: Arc<OwnedFd>,
    token: Token,
    rest: Option<Duration>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        match self.rest {
            None => self.shared.poller.arm(self.token, &*self.listener),
            Some(time) => self.shared.rest(self.token, Arc::clone(&self.listener), time),
        }
    }
}

/// Accepts what waits at a port of a network namespace, then arms it again.
pub(crate) fn accept_at_port(shared: &Arc<Shared>, space: &Space, port: u16) {
    let Some(listening) = space.listener(port) else { return };
    accept_some(shared, listening, Endpoint::Loopback(port), |stream, address| {
        let address = address.and_then(|address| SocketAddrV4::try_from(address).ok());
        let local = getsockname(stream).ok().and_then(|address| SocketAddrV4::try_from(address).ok());
        let peer = match (address, local) {
            (Some(address), Some(local)) => peer::identify(space, address, local),
            _ => Peer::Unknown { reason: "the connection is not over IPv4".into() },
        };
        (Some(space.id), peer)
    });
}

/// Accepts what waits at the unix endpoint of a device, then arms it again.
pub(crate) fn accept_at_socket(shared: &Arc<Shared>, kind: Kind) {
    let Some(listening) = shared.sockets.listener(kind) else { return };
    accept_some(shared, listening, Endpoint::Unix(kind), |stream, _| {
        (ns::of_socket(stream).ok(), unix_peer::identify(stream))
    });
}

/// `identify` tells of a stream whence it came, and who is at the other end.
fn accept_some(
    shared: &Arc<Shared>,
    (listener, token): (Arc<OwnedFd>, Token),
    endpoint: Endpoint,
    identify: impl Fn(&OwnedFd, Option<SocketAddrAny>) -> (Option<NsId>, Peer),
) {
    let mut turn = Turn { shared, listener, token, rest: None };
    for _ in 0..MAX_ACCEPTS {
        // The new socket blocks: it is the service's, which makes of it what it likes.
        match acceptfrom_with(&*turn.listener, SocketFlags::CLOEXEC) {
            Ok((stream, address)) => {
                // Else the device was switched off a moment ago; its listener is about to close.
                if let Some(kind) = shared.kind_at(endpoint) {
                    let (netns, peer) = identify(&stream, address);
                    decide(shared, Waiting { stream, kind, netns, peer }, shared.limits.record_retry);
                }
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            // Nothing waits, or it was closed: with its last grant, or with the device.
            Err(Errno::WOULDBLOCK | Errno::INVAL) => return,
            Err(errno) => {
                tracing::error!(%endpoint, error = %std::io::Error::from(errno),
                    "streams cannot be accepted; trying again");
                turn.rest = Some(REST);
                return;
            }
        }
    }
}

/// `denied_for`: for how long an engine's denial stands before it counts as not asked.
fn decide(shared: &Arc<Shared>, arrived: Waiting, denied_for: Duration) {
    let containers = shared.grants.containers(denied_for);
    match gate::decide(arrived.kind, &arrived.peer, &containers) {
        Decision::Allow { grant, pid } => deliver(shared, arrived, &grant, pid),
        Decision::AskRecord { grant } => wait_for_record(shared, arrived, &grant),
        Decision::Refuse(reason) => {
            shared.refusals.log(arrived.netns, arrived.kind, reason.word(), &reason);
        }
    }
}

fn deliver(shared: &Shared, allowed: Waiting, id: &GrantId, pid: u32) {
    let refuse = |word, cause: &dyn std::fmt::Display| {
        shared.refusals.log(allowed.netns, allowed.kind, word, cause);
    };
    let Some(grant) = shared.grants.get(id) else { return refuse("ended", &"the container ended meanwhile") };
    let Some(owner) = grant.owner() else { return refuse("not_recorded", &"the engine's record was lost") };
    let ended = grant.ended.read().unwrap_or_else(PoisonError::into_inner);
    if *ended {
        return refuse("ended", &"the container ended meanwhile");
    }
    let offer = StreamOffer {
        stream: shared.streams.fetch_add(1, Ordering::Relaxed),
        grant: id.clone(),
        container: grant.container.clone(),
        owner,
        device: grant.device.name().to_owned(),
        peer_pid: Some(pid),
        groups: grant.init.groups.clone(),
    };
    tracing::debug!(stream = offer.stream, grant = %id, pid, "stream handed over");
    if let Err(error) = shared.services.hand_over(allowed.kind, offer, allowed.stream) {
        shared.refusals.log(allowed.netns, allowed.kind, "no_service", &error);
    }
}

/// Parks a stream until the engine has answered about its grant; the first one to come makes the engine be asked.
fn wait_for_record(shared: &Arc<Shared>, stream: Waiting, id: &GrantId) {
    let Some(grant) = shared.grants.get(id) else { return };
    let mut changing = lock(&grant.changing);
    match &mut changing.waiting {
        Some(waiting) if waiting.len() >= shared.limits.waiting_streams => {
            drop(changing);
            shared.refusals.log(
                stream.netns,
                stream.kind,
                "too_many_waiting",
                &"too many streams wait for the engine's answer about this container",
            );
        }
        Some(waiting) => waiting.push(stream),
        None => {
            changing.waiting = Some(vec![stream]);
            drop(changing);
            let (inner, asked) = (Arc::clone(shared), Arc::clone(&grant));
            if shared.engines.run(move || ask(&inner, &asked)).is_err() {
                answered(
                    shared,
                    &grant,
                    Verdict::Denied { reason: "too many engine look-ups are running".into() },
                );
            }
        }
    }
}

fn ask(shared: &Arc<Shared>, grant: &Grant) {
    let deadline = Instant::now() + shared.limits.record_timeout;
    let question = Question {
        uid: grant.caller_uid,
        container: &grant.container,
        init_pid: grant.init.pid,
        device: &grant.device,
        deadline,
    };
    let verdict = record::ask(&shared.records, question);
    answered(shared, grant, verdict);
}

fn answered(shared: &Arc<Shared>, grant: &Grant, verdict: Verdict) {
    let mut changing = lock(&grant.changing);
    changing.record = match verdict {
        Verdict::Confirmed { project } => RecordState::Confirmed { project },
        Verdict::Denied { reason } => RecordState::Denied { reason, at: Instant::now() },
    };
    let confirmed = matches!(changing.record, RecordState::Confirmed { .. });
    let waiting = changing.waiting.take().unwrap_or_default();
    drop(changing);
    if confirmed {
        save_confirmed(shared, grant);
    }
    for stream in waiting {
        // This is the answer they waited for, however short its life: asking again for them would never end.
        decide(shared, stream, Duration::MAX);
    }
}

/// Writes down that the engine confirmed a grant, so that a daemon that starts while the engine is away need not ask.
fn save_confirmed(shared: &Shared, grant: &Grant) {
    let ended = grant.ended.read().unwrap_or_else(PoisonError::into_inner);
    if *ended {
        return;
    }
    if let Err(error) = grant.save(&shared.state) {
        tracing::warn!(grant = %grant.id, %error, "the engine's confirmation is not written down");
    }
}
