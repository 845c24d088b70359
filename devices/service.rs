// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device's service process: the loop in it, and the daemon's end of it.
//!
//! ```text
//! daemon [ServiceLink] ── one SOCK_SEQPACKET pair, the service's descriptor 0 ──► [serve] ──► a [Service]
//! ```
//!
//! The loop ends when the daemon's end closes, however the daemon came to its end; so no service outlives it.
//! A daemon of another version is refused before the first stream.
//!
//! Beside it what services with workers have in common: a thread for each container ([`wardens`]), starting a process
//! ([`spawn`]) that may do little ([`sandbox`]), that process while it lives ([`process`]), what the host has ([`known`]), who waits for
//! its counters ([`reports`]), and
//! bounds on what all that may cost ([`limiter`], [`crashes`], [`troubles`]).

pub(crate) mod crashes;
pub(crate) mod known;
pub(crate) mod limiter;
mod lines;
mod link;
pub(crate) mod process;
pub(crate) mod reports;
pub(crate) mod sandbox;
pub(crate) mod spawn;
pub(crate) mod troubles;
pub(crate) mod wardens;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use lighter_wire::{
    CONTROL_VERSION, FromService, GrantId, PacketError, ServiceReport, StreamOffer, ToService, recv, send,
};

pub use link::{LinkError, ServiceLink};
pub use sandbox::SandboxError;
pub use spawn::{SpawnError, WorkerProgram};

/// Why a service process ended other than with its daemon.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The control socket failed.
    #[error("control socket of the service failed")]
    Control(#[source] PacketError),
    /// The first message was not the greeting.
    #[error("the daemon's first message to the service was no greeting")]
    NoHello,
    /// The daemon is of another installation.
    #[error(
        "the daemon speaks version {theirs} of the control messages and this service {CONTROL_VERSION}: \
         both must come from one installation, restart the daemon"
    )]
    Version {
        /// What the daemon said.
        theirs: u32,
    },
}

/// What a device's service does. The loop calls one method at a time, so none may wait for long: whatever
/// takes time is answered later, through the answer that was given with it.
pub trait Service {
    /// A connection that passed the gate.
    fn stream(&mut self, offer: StreamOffer, socket: OwnedFd);
    /// End every stream of the grant and free its memory, then say so.
    fn revoke(&mut self, grant: GrantId, answer: RevokeAnswer);
    /// Say how things are.
    fn report(&mut self, answer: ReportAnswer);
}

/// The promise to confirm the end of one grant.
#[derive(Debug)]
pub struct RevokeAnswer {
    control: Arc<OwnedFd>,
    grant: GrantId,
}

impl RevokeAnswer {
    /// Confirms that nothing of the grant is left.
    pub fn done(self) {
        answer(&self.control, &FromService::Revoked { grant: self.grant });
    }
}

/// The promise to answer one question for a report.
#[derive(Debug)]
pub struct ReportAnswer {
    control: Arc<OwnedFd>,
    seq: u64,
}

impl ReportAnswer {
    /// Sends the report.
    pub fn send(self, report: ServiceReport) {
        answer(&self.control, &FromService::Report { seq: self.seq, report: Box::new(report) });
    }
}

fn answer(control: &OwnedFd, message: &FromService) {
    if let Err(error) = send(control, message, &[]) {
        // The end of the control socket is seen by the loop; a report that is too large is not.
        tracing::warn!(%error, "answer to the daemon could not be sent");
    }
}

/// Serves the daemon at the other end of `control` until it closes.
///
/// # Errors
/// When the daemon is of another version or the socket fails.
pub fn serve(control: OwnedFd, service: &mut impl Service) -> Result<(), ServeError> {
    let control = Arc::new(control);
    match recv::<ToService>(&control).map_err(ServeError::Control)? {
        None => return Ok(()),
        Some((ToService::Hello { version }, _)) if version == CONTROL_VERSION => {}
        Some((ToService::Hello { version }, _)) => return Err(ServeError::Version { theirs: version }),
        Some(_) => return Err(ServeError::NoHello),
    }
    send(&control, &FromService::Ready { version: CONTROL_VERSION }, &[]).map_err(ServeError::Control)?;
    loop {
        let (message, descriptors) = match recv::<ToService>(&control) {
            Ok(Some(packet)) => packet,
            Ok(None) => return Ok(()),
            // A daemon that was killed while an answer was on its way to it.
            Err(PacketError::Socket(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                return Ok(());
            }
            Err(PacketError::Socket(error)) => return Err(ServeError::Control(PacketError::Socket(error))),
            Err(error) => {
                tracing::error!(%error, "message of the daemon is not understood");
                continue;
            }
        };
        match message {
            ToService::Hello { version } => tracing::warn!(version, "the daemon greeted twice"),
            ToService::Stream(offer) => match descriptors.into_iter().next() {
                Some(socket) => service.stream(offer, socket),
                None => {
                    tracing::error!(stream = offer.stream, "the daemon offered a stream without a socket")
                }
            },
            ToService::Revoke { grant } => {
                let answer = RevokeAnswer { control: Arc::clone(&control), grant: grant.clone() };
                service.revoke(grant, answer);
            }
            ToService::Report { seq } => {
                service.report(ReportAnswer { control: Arc::clone(&control), seq });
            }
        }
    }
}
