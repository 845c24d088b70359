// SPDX-License-Identifier: MIT OR Apache-2.0
//! The daemon's end of a service: hands streams over, ends grants, asks for reports.
//!
//! Shared by threads. Every wait has a limit, and a service that has ended is an error at once rather than a
//! wait: the daemon must never hang on a service.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::{
    CONTROL_VERSION, FromService, GrantId, PacketError, ServiceReport, StreamOffer, ToService, recv, send,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{Shutdown, shutdown};

/// Longest that a message waits for room in the socket: a service that reads nothing for this long hangs.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// Why the service did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It has ended or its socket is closed.
    #[error("the service has ended ({reason})")]
    Ended {
        /// What was seen of its end.
        reason: String,
    },
    /// It did not answer in time.
    #[error("the service did not answer within {} ms", limit.as_millis())]
    Late {
        /// The limit.
        limit: Duration,
    },
    /// The message could not be sent.
    #[error("message to the service could not be sent")]
    Send(#[source] PacketError),
    /// The socket could not be prepared.
    #[error("control socket of the service could not be prepared")]
    Prepare(#[source] std::io::Error),
    /// It is of another version.
    #[error("the service speaks version {theirs} of the control messages and the daemon {CONTROL_VERSION}")]
    Version {
        /// What the service said.
        theirs: u32,
    },
    /// It answered the greeting with something else.
    #[error("the service answered the greeting with something else")]
    NoReady,
}

/// A live service, as the daemon sees it.
#[derive(Debug)]
pub struct ServiceLink {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    control: OwnedFd,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    next_seq: u64,
    /// Grants whose end is awaited; true once it is confirmed.
    revokes: HashMap<GrantId, bool>,
    /// Questions under way, and their answers once they are there.
    reports: HashMap<u64, Option<Box<ServiceReport>>>,
    /// Why the service is gone.
    ended: Option<String>,
}

impl ServiceLink {
    /// Greets the service at the other end of `control` and waits until it is ready.
    ///
    /// # Errors
    /// When the service ends, is of another version, or is not ready within `limit`.
    pub fn connect(control: OwnedFd, limit: Duration) -> Result<Self, LinkError> {
        set_socket_timeout(&control, Timeout::Send, Some(SEND_LIMIT))
            .map_err(|errno| LinkError::Prepare(errno.into()))?;
        send(&control, &ToService::Hello { version: CONTROL_VERSION }, &[]).map_err(not_sent)?;
        await_readable(&control, limit)?;
        match recv::<FromService>(&control) {
            Ok(Some((FromService::Ready { version }, _))) if version == CONTROL_VERSION => {}
            Ok(Some((FromService::Ready { version }, _))) => {
                return Err(LinkError::Version { theirs: version });
            }
            Ok(Some(_)) => return Err(LinkError::NoReady),
            Ok(None) => return Err(LinkError::Ended { reason: "it closed its socket".to_owned() }),
            Err(error) => return Err(LinkError::Ended { reason: error.to_string() }),
        }
        let shared = Arc::new(Shared { control, waiting: Mutex::default(), changed: Condvar::new() });
        let for_reader = Arc::clone(&shared);
        let reader = std::thread::Builder::new()
            .name("service-link".to_owned())
            .spawn(move || for_reader.read_all())
            .map_err(LinkError::Prepare)?;
        Ok(Self { shared, reader: Some(reader) })
    }

    /// Hands an accepted socket to the service.
    ///
    /// # Errors
    /// When the service has ended or takes no messages.
    pub fn hand_over(&self, offer: &StreamOffer, socket: OwnedFd) -> Result<(), LinkError> {
        self.shared.check_alive()?;
        let message = ToService::Stream(offer.clone());
        let sent = send(&self.shared.control, &message, &[socket.as_fd()]);
        // A kept duplicate would hide the end of the stream from the service's client.
        drop(socket);
        sent.map_err(not_sent)
    }

    /// Ends all that the service has of a grant; returns when it is gone.
    ///
    /// # Errors
    /// When the service has ended (then nothing of the grant is left either) or does not confirm in time.
    pub fn revoke(&self, grant: &GrantId, limit: Duration) -> Result<(), LinkError> {
        self.shared.check_alive()?;
        lock(&self.shared.waiting).revokes.entry(grant.clone()).or_insert(false);
        let sent = send(&self.shared.control, &ToService::Revoke { grant: grant.clone() }, &[]);
        let result = sent.map_err(not_sent).and_then(|()| {
            // Another waiter for the same grant may have taken the entry away: that, too, means confirmed.
            self.shared.wait(limit, |waiting| match waiting.revokes.get(grant) {
                Some(false) => None,
                Some(true) | None => Some(()),
            })
        });
        lock(&self.shared.waiting).revokes.remove(grant);
        result
    }

    /// Asks the service how it is.
    ///
    /// # Errors
    /// When the service has ended or does not answer in time.
    pub fn report(&self, limit: Duration) -> Result<ServiceReport, LinkError> {
        self.shared.check_alive()?;
        let seq = {
            let mut waiting = lock(&self.shared.waiting);
            waiting.next_seq += 1;
            let seq = waiting.next_seq;
            waiting.reports.insert(seq, None);
            seq
        };
        let sent = send(&self.shared.control, &ToService::Report { seq }, &[]);
        let result = sent.map_err(not_sent).and_then(|()| {
            self.shared.wait(limit, |waiting| waiting.reports.get_mut(&seq).and_then(Option::take))
        });
        lock(&self.shared.waiting).reports.remove(&seq);
        result.map(|report| *report)
    }

    /// Whether the service still holds its end open.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        lock(&self.shared.waiting).ended.is_none()
    }

    /// Closes the link: the service sees the end of its control socket and ends.
    pub fn close(&self) {
        // Fails only when the service is gone already.
        let _ = shutdown(&self.shared.control, Shutdown::Both);
    }
}

impl Drop for ServiceLink {
    fn drop(&mut self) {
        self.close();
        if let Some(reader) = self.reader.take()
            && reader.join().is_err()
        {
            tracing::error!("the reader of a service's answers has panicked");
        }
    }
}

impl Shared {
    fn check_alive(&self) -> Result<(), LinkError> {
        match &lock(&self.waiting).ended {
            Some(reason) => Err(LinkError::Ended { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    fn wait<T>(
        &self,
        limit: Duration,
        mut ready: impl FnMut(&mut Waiting) -> Option<T>,
    ) -> Result<T, LinkError> {
        let deadline = Instant::now() + limit;
        let mut waiting = lock(&self.waiting);
        loop {
            if let Some(value) = ready(&mut waiting) {
                return Ok(value);
            }
            if let Some(reason) = &waiting.ended {
                return Err(LinkError::Ended { reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LinkError::Late { limit });
            }
            waiting = self.changed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn read_all(&self) {
        let reason = loop {
            match recv::<FromService>(&self.control) {
                Ok(Some((message, _))) => self.take(message),
                Ok(None) => break "it closed its socket".to_owned(),
                Err(error @ PacketError::Socket(_)) => break error.to_string(),
                Err(error) => tracing::warn!(%error, "message of a service is not understood"),
            }
        };
        lock(&self.waiting).ended = Some(reason);
        self.changed.notify_all();
    }

    fn take(&self, message: FromService) {
        let mut waiting = lock(&self.waiting);
        match message {
            FromService::Ready { .. } => tracing::warn!("a service said twice that it is ready"),
            FromService::Revoked { grant } => {
                if let Some(done) = waiting.revokes.get_mut(&grant) {
                    *done = true;
                }
            }
            FromService::Report { seq, report } => {
                // An answer after its asker has gone is dropped.
                if let Some(slot) = waiting.reports.get_mut(&seq) {
                    *slot = Some(report);
                }
            }
        }
        self.changed.notify_all();
    }
}

fn lock(mutex: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A message that finds nobody is the end of the service, seen a moment before the reader sees it.
fn not_sent(error: PacketError) -> LinkError {
    match &error {
        PacketError::Socket(cause)
            if matches!(
                cause.kind(),
                std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
            ) =>
        {
            LinkError::Ended { reason: "it closed its socket".to_owned() }
        }
        _ => LinkError::Send(error),
    }
}

fn await_readable(control: &OwnedFd, limit: Duration) -> Result<(), LinkError> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(control, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(LinkError::Late { limit }),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(LinkError::Prepare(errno.into())),
        }
    }
}
