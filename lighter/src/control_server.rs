// SPDX-License-Identifier: MIT OR Apache-2.0
//! The daemon's end of the control socket: takes questions, one a connection, and answers each on a thread of
//! its own, since `doctor` may wait for a service.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use lighter_wire::{PacketError, recv, send};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, shutdown,
    socket_with,
};

use crate::control::{Reply, Request};

/// A question must follow its connection within this time, and its answer be taken.
const PEER_LIMIT: Duration = Duration::from_secs(5);
/// Most questions at one time; further ones wait in the kernel's queue.
const MOST_AT_ONCE: usize = 16;

/// The listening socket and its thread.
#[derive(Debug)]
pub(crate) struct ControlServer {
    path: PathBuf,
    listener: Arc<OwnedFd>,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl ControlServer {
    /// Listens at `path`, replacing a socket that an earlier daemon left: the caller holds the state directory's
    /// lock, so nobody else listens there.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub(crate) fn start(
        path: &Path,
        answer: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let named = || format!("cannot listen at {}", path.display());
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(named);
            }
            _ => {}
        }
        let address = SocketAddrUnix::new(path).with_context(named)?;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .with_context(named)?;
        bind(&listener, &address).with_context(named)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).with_context(named)?;
        listen(&listener, 16).with_context(named)?;
        let listener = Arc::new(listener);
        let stopping = Arc::new(AtomicBool::new(false));
        let thread = {
            let (listener, stopping) = (Arc::clone(&listener), Arc::clone(&stopping));
            let answer = Arc::new(answer);
            std::thread::Builder::new()
                .name("control".to_owned())
                .spawn(move || accept_loop(&listener, &stopping, &answer))
                .context("cannot start the control thread")?
        };
        Ok(Self { path: path.to_owned(), listener, stopping, thread })
    }

    /// Stops listening and removes the socket.
    pub(crate) fn stop(self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the thread out of accept.
        if let Err(error) = shutdown(&*self.listener, Shutdown::Both) {
            tracing::debug!(%error, "the control socket was closed already");
        }
        if self.thread.join().is_err() {
            tracing::error!("the control thread has panicked");
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the control socket could not be removed");
        }
    }
}

fn accept_loop<F: Fn(&Request) -> Reply + Send + Sync + 'static>(
    listener: &OwnedFd,
    stopping: &AtomicBool,
    answer: &Arc<F>,
) {
    let busy = Arc::new(AtomicUsize::new(0));
    while !stopping.load(Ordering::SeqCst) {
        let peer = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(peer) => peer,
            Err(_) if stopping.load(Ordering::SeqCst) => return,
            Err(error) => {
                tracing::warn!(%error, "a question could not be accepted");
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        while busy.load(Ordering::SeqCst) >= MOST_AT_ONCE && !stopping.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
        busy.fetch_add(1, Ordering::SeqCst);
        let (answer, done) = (Arc::clone(answer), Arc::clone(&busy));
        let spawned = std::thread::Builder::new().name("question".to_owned()).spawn(move || {
            if let Err(error) = serve(&peer, &*answer) {
                tracing::debug!(%error, "a question was not answered");
            }
            done.fetch_sub(1, Ordering::SeqCst);
        });
        if let Err(error) = spawned {
            busy.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!(%error, "no thread for a question");
        }
    }
}

fn serve(peer: &OwnedFd, answer: &impl Fn(&Request) -> Reply) -> Result<(), PacketError> {
    for way in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(peer, way, Some(PEER_LIMIT))?;
    }
    let reply = match recv::<Request>(peer) {
        Ok(Some((request, _))) => answer(&request),
        Ok(None) => return Ok(()),
        Err(PacketError::Malformed { source, .. }) => Reply::Failed {
            reason: format!("the question is not known to lighter {}: {source}", env!("CARGO_PKG_VERSION")),
        },
        Err(error) => return Err(error),
    };
    send(peer.as_fd(), &reply, &[])
}
