// SPDX-License-Identifier: MIT OR Apache-2.0
//! The session's process: virglrenderer, one client, no GPU driver.
//!
//! ```text
//! service ──control socket──► this process ──its own socket──► render server ──► a process with the GPU's driver
//!                                   ▲
//! client ──────vtest────────────────┘
//! ```
//! Whatever goes wrong with the client ends this process with the client's last request unread, which the client is told.

use std::os::fd::{AsFd, OwnedFd};

use lighter_wire::{PacketError, recv, send};
use rustix::event::{PollFd, PollFlags, poll};

use super::control::{Counters, FromSession, SessionConfig, ToSession};
use super::session::Session;
use super::virgl::{Renderer, VirglError};
use super::vtest::{Turn, Vtest, VtestError};
use crate::text::with_causes;

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The service did not speak as it should.
    #[error("control socket failed")]
    Control(#[from] PacketError),
    /// It said something else than it was its turn to say.
    #[error("the service sent {what}")]
    Turn {
        /// What.
        what: &'static str,
    },
    /// The renderer does not start; the service has been told.
    #[error("the renderer does not start")]
    Start(#[from] VirglError),
    /// The client cannot be served any more; the service has been told.
    #[error("the client's stream ended")]
    Client(#[from] VtestError),
    /// Waiting failed.
    #[error("waiting for the client failed")]
    Wait(#[source] std::io::Error),
}

/// Serves until the client or the service goes. An error must end the process, so that the client is told.
///
/// # Errors
/// When the service does not speak as it should, the renderer does not start, or the client cannot be served any more.
pub fn run(control: &OwnedFd) -> Result<(), WorkerError> {
    let Some(session) = configure(control)? else { return Ok(()) };
    let Some((message, mut descriptors)) = recv(control)? else { return Ok(()) };
    let (ToSession::Stream { stream }, Some(socket)) = (message, descriptors.pop()) else {
        return Err(WorkerError::Turn { what: "something else than a client's socket" });
    };
    let mut client = Vtest::new(socket, session);
    match serve(control, &mut client) {
        Ok(()) => {
            say(control, &FromSession::Ended { stream, reason: None });
            Ok(())
        }
        Err(error) => {
            let name = if client.name().is_empty() { "a program" } else { client.name() };
            let reason = Some(format!("{name}: {}", with_causes(&error)));
            say(control, &FromSession::Ended { stream, reason });
            // The client's socket stays open until the process has ended, with what is unread in it.
            std::mem::forget(client);
            Err(error)
        }
    }
}

/// The renderer, once the service has said which; `None` when the service has gone before.
fn configure(control: &OwnedFd) -> Result<Option<Session>, WorkerError> {
    let Some((message, mut descriptors)) = recv(control)? else { return Ok(None) };
    let (ToSession::Configure(SessionConfig { library, limits }), Some(server)) =
        (message, descriptors.pop())
    else {
        return Err(WorkerError::Turn { what: "something else than the configuration and a render server" });
    };
    match Renderer::start(&library, server) {
        Ok(renderer) => {
            say(control, &FromSession::Ready { capset_version: renderer.capset_version() });
            Ok(Some(Session::new(renderer, limits)))
        }
        Err(error) => {
            say(control, &FromSession::Failed { reason: with_causes(&error) });
            Err(error.into())
        }
    }
}

fn serve(control: &OwnedFd, client: &mut Vtest) -> Result<(), WorkerError> {
    loop {
        let (has_request, has_fences, has_message) = wait(control, client)?;
        if has_fences {
            client.fences();
        }
        if has_message && !heed(control, client)? {
            return Ok(());
        }
        if has_request {
            match client.request()? {
                Turn::Served => {}
                Turn::ContextOpened => {
                    say(control, &FromSession::Context { name: client.name().to_owned() });
                }
                Turn::Gone => return Ok(()),
            }
        }
    }
}

/// Waits for the client, the renderer or the service.
fn wait(control: &OwnedFd, client: &Vtest) -> Result<(bool, bool, bool), WorkerError> {
    let (socket, renderer) = client.descriptors();
    let mut polled = vec![PollFd::new(socket, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
    polled.extend(renderer.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    loop {
        match poll(&mut polled, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(WorkerError::Wait(errno.into())),
        }
    }
    let is_ready = |index: usize| polled.get(index).is_some_and(|fd| !fd.revents().is_empty());
    Ok((is_ready(0), is_ready(2), is_ready(1)))
}

/// Answers the service; false when it has gone.
fn heed(control: &OwnedFd, client: &Vtest) -> Result<bool, WorkerError> {
    match recv(control)? {
        None => Ok(false),
        Some((ToSession::Report { seq }, _)) => {
            let (requests, bytes_in, bytes_out) = client.traffic();
            let (mapped_bytes, blobs) = client.session().held();
            let blobs = u64::try_from(blobs).unwrap_or(u64::MAX);
            let counters = Counters { seq, requests, bytes_in, bytes_out, mapped_bytes, blobs };
            say(control, &FromSession::Counters(counters));
            Ok(true)
        }
        Some((ToSession::Configure(_), _)) => Err(WorkerError::Turn { what: "a second configuration" }),
        Some((ToSession::Stream { .. }, _)) => Err(WorkerError::Turn { what: "a second client" }),
    }
}

/// Says something to the service. A service that is gone ends this process anyway.
fn say(control: &OwnedFd, message: &FromSession) {
    if let Err(error) = send(control.as_fd(), message, &[]) {
        tracing::debug!(%error, "service did not take a message");
    }
}
