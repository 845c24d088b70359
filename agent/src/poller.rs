// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one epoll set of the agent: which descriptor means what. Every entry fires once and is armed again by whoever
//! dealt with it, so that no event is handled twice and nothing can make the loop spin.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use lighter_wire::{GrantId, Kind};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::endpoints::Space;
use crate::lock;

/// What an event means.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// Somebody wants the loop to look around.
    Wake,
    /// A hook connects.
    Hook,
    /// A container's process connects to a port of its network namespace.
    Port(Weak<Space>, u16),
    /// Somebody connects to the unix endpoint of a device.
    Socket(Kind),
    /// A container's init has ended.
    Init(GrantId),
}

/// Names an entry of the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Token(u64);

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    wake: OwnedFd,
    next: AtomicU64,
    targets: Mutex<HashMap<u64, Target>>,
}

const ARMED: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let poller = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            next: AtomicU64::new(1),
            targets: Mutex::default(),
        };
        lock(&poller.targets).insert(0, Target::Wake);
        epoll::add(&poller.epoll, &poller.wake, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(poller)
    }

    pub(crate) fn add(&self, descriptor: impl AsFd, target: Target) -> io::Result<Token> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.targets).insert(number, target);
        if let Err(errno) = epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(number), ARMED) {
            lock(&self.targets).remove(&number);
            return Err(errno.into());
        }
        Ok(Token(number))
    }

    /// Lets the entry fire again; one that was removed meanwhile stays removed.
    pub(crate) fn arm(&self, token: Token, descriptor: impl AsFd) {
        let _ = epoll::modify(&self.epoll, descriptor, epoll::EventData::new_u64(token.0), ARMED);
    }

    pub(crate) fn remove(&self, token: Token, descriptor: impl AsFd) {
        lock(&self.targets).remove(&token.0);
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Waits for events; an event whose entry was removed meanwhile is left out.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> io::Result<Vec<(Token, Target)>> {
        let mut events = Vec::with_capacity(64);
        let limit =
            limit.map(|limit| Timespec::try_from(limit).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 }));
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(errno.into()),
        }
        let targets = lock(&self.targets);
        let found: Vec<_> = events
            .iter()
            .filter_map(|event| {
                let number = event.data.u64();
                targets.get(&number).map(|target| (Token(number), target.clone()))
            })
            .collect();
        drop(targets);
        if found.iter().any(|(_, target)| matches!(target, Target::Wake)) {
            let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_fires_once_until_it_is_armed_again() {
        let poller = Poller::new().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let token = poller.add(&read, Target::Hook).unwrap();
        rustix::io::write(&write, b"x").unwrap();
        let now = || poller.wait(Some(Duration::ZERO)).unwrap().len();
        assert_eq!((now(), now()), (1, 0));
        poller.arm(token, &read);
        assert_eq!(now(), 1);
        poller.arm(token, &read);
        poller.remove(token, &read);
        poller.arm(token, &read);
        assert_eq!(now(), 0);
        poller.wake();
        assert_eq!((now(), now()), (1, 0));
    }
}
