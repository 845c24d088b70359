// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversation between `lighter`'s commands and the running daemon: one question, one answer.
//!
//! The socket is the owner's alone; whoever may write to it may stop the daemon.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lighter_wire::{PacketError, recv, send};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};

use crate::doctor::DoctorReport;
use crate::status::StatusReport;

/// Longest wait for an answer: above any service's own limits, so that the daemon's reason arrives first.
const ANSWER_LIMIT: Duration = Duration::from_secs(90);

/// What a command asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// What runs, and for whom.
    Status,
    /// Ask every service how it is.
    Doctor,
    /// Read the configuration again.
    Reload,
    /// End; answered before the daemon goes.
    Stop,
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// To [`Request::Status`].
    Status(Box<StatusReport>),
    /// To [`Request::Doctor`].
    Doctor(Box<DoctorReport>),
    /// Done as asked.
    Done,
    /// Not done.
    Failed {
        /// Why, for a person.
        reason: String,
    },
}

/// Why no answer came.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Nobody listens.
    #[error("no daemon is running at {path}: start it with `lighter start`", path = path.display())]
    NotRunning {
        /// The socket.
        path: PathBuf,
    },
    /// The socket is somebody else's.
    #[error("the daemon at {path} belongs to another user: run this command as that user (root for the system's daemon)", path = path.display())]
    NotAllowed {
        /// The socket.
        path: PathBuf,
    },
    /// The daemon did not answer in time.
    #[error("the daemon at {path} did not answer within {seconds} s; its log says more", path = path.display(), seconds = ANSWER_LIMIT.as_secs())]
    Silent {
        /// The socket.
        path: PathBuf,
    },
    /// The daemon ended before it answered.
    #[error("the daemon at {path} ended before it answered", path = path.display())]
    Ended {
        /// The socket.
        path: PathBuf,
    },
    /// Another failure.
    #[error("cannot talk to the daemon at {path}", path = path.display())]
    Failed {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: PacketError,
    },
}

/// Asks the daemon whose control socket is at `path`.
///
/// # Errors
/// When no daemon is there, it is not this user's, or it gives no answer.
pub(crate) fn ask(path: &Path, request: &Request) -> Result<Reply, ControlError> {
    let failed = |source| ControlError::Failed { path: path.to_owned(), source };
    let socket = dial(path)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_LIMIT)).map_err(|errno| failed(errno.into()))?;
    send(&socket, request, &[]).map_err(failed)?;
    match recv::<Reply>(&socket) {
        Ok(Some((reply, _))) => Ok(reply),
        Ok(None) => Err(ControlError::Ended { path: path.to_owned() }),
        Err(PacketError::Socket(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
            Err(ControlError::Silent { path: path.to_owned() })
        }
        Err(PacketError::Socket(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
            Err(ControlError::Ended { path: path.to_owned() })
        }
        Err(source) => Err(failed(source)),
    }
}

fn dial(path: &Path) -> Result<OwnedFd, ControlError> {
    use rustix::io::Errno;
    let open = || {
        let address = SocketAddrUnix::new(path)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &address)?;
        Ok(socket)
    };
    open().map_err(|errno| match errno {
        Errno::NOENT | Errno::CONNREFUSED => ControlError::NotRunning { path: path.to_owned() },
        Errno::ACCESS | Errno::PERM => ControlError::NotAllowed { path: path.to_owned() },
        errno => ControlError::Failed { path: path.to_owned(), source: errno.into() },
    })
}
