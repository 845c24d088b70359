// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a compiled model holds for one process: connections and the container's own session.
//!
//! A child of a fork shares its parent's sockets and memory; two that speak on one connection get each other's answers.
//! So all this is stamped with the process: a child starts with nothing. What was the parent's it lets go of as far as
//! that is safe: connections are closed (which leaves the parent's own open), the session is left alone, because it
//! would wait for threads that the child does not have.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::host::Connection;
use crate::ort::session::Session;
use crate::sys::getpid;
use crate::sys::lock::Lock;

/// Idle connections that are kept: as many runs may be under way at a time without connecting anew.
const MAX_IDLE: usize = 16;

/// One process's share.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    is_child: bool,
    idle: Lock<Vec<Connection>>,
    session: AtomicPtr<Session>,
}

impl Process {
    fn new(is_child: bool) -> Self {
        let idle = Lock::new(Vec::with_capacity(MAX_IDLE));
        Self { pid: getpid(), is_child, idle, session: AtomicPtr::new(null_mut()) }
    }

    /// Whether this process was forked from the one that compiled the model.
    pub(crate) const fn is_child(&self) -> bool {
        self.is_child
    }

    /// An idle connection.
    pub(crate) fn take(&self) -> Option<Connection> {
        self.idle.with(Vec::pop)
    }

    /// Keeps a connection that is in order.
    pub(crate) fn keep(&self, connection: Connection) {
        let surplus = self.idle.with(|idle| {
            if idle.len() < MAX_IDLE {
                idle.push(connection);
                return None;
            }
            Some(connection)
        });
        drop(surplus);
    }

    /// Lets go of all idle connections: where one has died, the others probably have.
    pub(crate) fn forget(&self) {
        while self.take().is_some() {}
    }

    /// The container's own session, which is made when there is none.
    pub(crate) fn session<E>(&self, make: impl FnOnce() -> Result<Session, E>) -> Result<&Session, E> {
        let mut session = self.session.load(Ordering::Acquire);
        if session.is_null() {
            let made = Box::into_raw(Box::new(make()?));
            let (on_success, on_failure) = (Ordering::AcqRel, Ordering::Acquire);
            session = match self.session.compare_exchange(null_mut(), made, on_success, on_failure) {
                Ok(_) => made,
                Err(other) => {
                    // SAFETY: nobody else has seen the one that came too late.
                    drop(unsafe { Box::from_raw(made) });
                    other
                }
            };
        }
        // SAFETY: stays until this is dropped.
        Ok(unsafe { &*session })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let session = core::mem::replace(self.session.get_mut(), null_mut());
        if !session.is_null() && self.pid == getpid() {
            // SAFETY: made by `session`, and given back once.
            drop(unsafe { Box::from_raw(session) });
        }
    }
}

/// The share of whichever process asks.
#[derive(Debug)]
pub(crate) struct PerProcess {
    current: AtomicPtr<Process>,
}

impl PerProcess {
    pub(crate) fn new() -> Self {
        Self { current: AtomicPtr::new(Box::into_raw(Box::new(Process::new(false)))) }
    }

    /// This process's share.
    pub(crate) fn current(&self) -> &Process {
        let mut current = self.current.load(Ordering::Acquire);
        // SAFETY: never null, and never given back before this is dropped.
        if unsafe { (*current).pid } != getpid() {
            let fresh = Box::into_raw(Box::new(Process::new(true)));
            current = match self.current.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(old) => {
                    // SAFETY: as above; what another thread of the parent held in the middle stays as it is.
                    let old = unsafe { &*old };
                    drop(old.idle.with_if_free(core::mem::take));
                    fresh
                }
                Err(other) => {
                    // SAFETY: nobody else has seen the one that came too late.
                    drop(unsafe { Box::from_raw(fresh) });
                    other
                }
            };
        }
        // SAFETY: as above.
        unsafe { &*current }
    }
}

impl Drop for PerProcess {
    fn drop(&mut self) {
        // SAFETY: made by a box, and given back once.
        drop(unsafe { Box::from_raw(*self.current.get_mut()) });
    }
}
