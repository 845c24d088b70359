// SPDX-License-Identifier: MIT OR Apache-2.0
//! The wardens of a service: a thread for each grant, what it is asked, and how it is reached.
//!
//! ```text
//! daemon ──► [serve] ──► a device's Service ──► [Wardens] ──[Mailbox]──► [Inbox] of one container's warden
//! ```
//! What a warden does with its container is the device's matter.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::{EngineState, GrantId, ServiceReport, StreamOffer};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{ReportAnswer, RevokeAnswer};

/// How long a report waits for the workers' counters; then their last ones are used.
const COUNTERS_LIMIT: Duration = Duration::from_millis(500);

/// What a warden is asked; `O` is what its device asks besides.
#[derive(Debug)]
pub(crate) enum Ask<O> {
    /// Serve a stream.
    Stream(StreamOffer, OwnedFd),
    /// Ask the workers for their counters; the sender is dropped when they are there.
    Report(Sender<()>),
    /// End, and say so where asked to.
    End(Option<RevokeAnswer>),
    /// Something of the device's own.
    Own(O),
}

/// Where a warden is reached.
#[derive(Debug)]
pub(crate) struct Mailbox<O> {
    asks: Sender<Ask<O>>,
    wake: Arc<OwnedFd>,
}

// Not derived: that would ask the same of what is asked.
impl<O> Clone for Mailbox<O> {
    fn clone(&self) -> Self {
        Self { asks: self.asks.clone(), wake: Arc::clone(&self.wake) }
    }
}

impl<O> Mailbox<O> {
    pub(crate) fn send(&self, ask: Ask<O>) {
        // Fails only when the warden has ended or panicked, which is told when it is joined.
        let _ = self.asks.send(ask);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The warden's end of its mailbox.
#[derive(Debug)]
pub(crate) struct Inbox<O> {
    asks: Receiver<Ask<O>>,
    wake: Arc<OwnedFd>,
}

impl<O> Inbox<O> {
    /// What it is asked next, without waiting.
    pub(crate) fn next(&self) -> Result<Ask<O>, TryRecvError> {
        self.asks.try_recv()
    }

    /// Readable when there is something.
    pub(crate) fn wake(&self) -> &OwnedFd {
        &self.wake
    }

    /// Only resets what woke the warden; what it was woken for is in the channel.
    pub(crate) fn reset(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

/// A mailbox and its other end.
pub(crate) fn mailbox<O>() -> std::io::Result<(Mailbox<O>, Inbox<O>)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, asks) = channel();
    Ok((Mailbox { asks: sender, wake: Arc::clone(&wake) }, Inbox { asks, wake }))
}

/// The service's side of one warden; `R` is the device's account of a container.
#[derive(Debug)]
pub(crate) struct Handle<O, R> {
    pub(crate) mailbox: Mailbox<O>,
    /// Set when the warden is to end, for what it is in the middle of.
    pub(crate) ending: Arc<AtomicBool>,
    pub(crate) readings: Arc<Mutex<R>>,
    pub(crate) thread: JoinHandle<()>,
}

impl<O, R> Handle<O, R> {
    /// Has the warden end; what it is in the middle of is cut short.
    fn end(&self, answer: Option<RevokeAnswer>) {
        self.ending.store(true, Ordering::Relaxed);
        self.mailbox.send(Ask::End(answer));
    }
}

/// Accounts of containers, by grant.
pub(crate) type Accounts<R> = BTreeMap<String, Arc<Mutex<R>>>;

/// All wardens of a service.
#[derive(Debug)]
pub(crate) struct Wardens<O, R>(BTreeMap<GrantId, Handle<O, R>>);

// Not derived: that would ask the same of what they keep.
impl<O, R> Default for Wardens<O, R> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<O, R: Send + 'static> Wardens<O, R> {
    /// Hands a stream to its container's warden, which `start` makes where there is none.
    pub(crate) fn stream(
        &mut self,
        offer: StreamOffer,
        socket: OwnedFd,
        start: impl FnOnce(&StreamOffer) -> std::io::Result<Handle<O, R>>,
    ) {
        if !self.0.contains_key(&offer.grant) {
            match start(&offer) {
                Ok(handle) => drop(self.0.insert(offer.grant.clone(), handle)),
                Err(error) => {
                    tracing::error!(container = offer.container, %error, "no thread for a container");
                    return;
                }
            }
        }
        if let Some(handle) = self.0.get(&offer.grant) {
            handle.mailbox.send(Ask::Stream(offer, socket));
        }
    }

    /// Ends the warden of a grant, which answers.
    pub(crate) fn revoke(&mut self, grant: &GrantId, answer: RevokeAnswer) {
        match self.0.remove(grant) {
            Some(handle) => handle.end(Some(answer)),
            // A container that never opened a stream.
            None => answer.done(),
        }
    }

    /// Answers a question for a report, from a thread of its own: the engine and what the workers count take their time,
    /// and streams do not wait for that.
    pub(crate) fn report(
        &self,
        answer: ReportAnswer,
        engine: impl FnOnce() -> EngineState + Send + 'static,
        compose: impl FnOnce(EngineState, &Accounts<R>) -> ServiceReport + Send + 'static,
    ) {
        let (done, all_done) = channel();
        let mut accounts = Accounts::new();
        for (grant, handle) in &self.0 {
            handle.mailbox.send(Ask::Report(done.clone()));
            accounts.insert(grant.to_string(), Arc::clone(&handle.readings));
        }
        drop(done);
        let thread = std::thread::Builder::new().name("report".to_owned()).spawn(move || {
            let engine = engine();
            // Nobody sends anything: the channel closes when the last warden has let go of its end.
            if all_done.recv_timeout(COUNTERS_LIMIT) == Err(RecvTimeoutError::Timeout) {
                tracing::debug!("a worker did not say its counters in time");
            }
            answer.send(compose(engine, &accounts));
        });
        if let Err(error) = thread {
            tracing::error!(%error, "no thread for a report");
        }
    }

    /// Ends all and waits for their ends.
    pub(crate) fn end(self) {
        for handle in self.0.values() {
            handle.end(None);
        }
        for (grant, handle) in self.0 {
            if handle.thread.join().is_err() {
                tracing::error!(%grant, "the thread of a container has panicked");
            }
        }
    }
}

/// Waits until one of them is readable, or until the deadline.
pub(crate) fn wait_for(fds: &mut [PollFd<'_>], deadline: Option<Instant>) {
    let limit = deadline.map(|deadline| {
        // A little late rather than a turn too early.
        let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 })
    });
    if let Err(errno) = poll(fds, limit.as_ref())
        && errno != rustix::io::Errno::INTR
    {
        tracing::error!(%errno, "waiting for processes failed");
    }
}

/// Whether there is something to read, its end included.
pub(crate) fn is_readable(fd: &OwnedFd) -> bool {
    is_ready(fd, PollFlags::IN)
}

/// Whether a socket's other end is closed, whatever is left to be read.
pub(crate) fn has_hung_up(socket: &OwnedFd) -> bool {
    is_ready(socket, PollFlags::RDHUP)
}

fn is_ready(fd: &OwnedFd, what: PollFlags) -> bool {
    let mut polled = [PollFd::new(fd, what)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
