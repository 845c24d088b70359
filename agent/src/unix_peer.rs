// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who connected to a unix endpoint: the one process that the kernel noted when the connection was made.
//!
//! The kernel keeps that process's identity with the socket, so nothing is searched. Where it gives a pidfd, that names
//! the process beyond doubt. An older kernel gives a number only, and a number may be somebody else's by the time it is
//! looked at; there the process of that number must hold the other end of this very connection.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};

use crate::cgroup::Cgroups;
use crate::gate::{Holder, Peer};
use crate::sockdiag::Found;
use crate::{credentials, ns, peer, proc, sockdiag};

/// Gathers what the gate has to know about the process at the other end of an accepted connection.
pub(crate) fn identify(stream: &OwnedFd) -> Peer {
    let found = match credentials::pidfd(stream) {
        Ok(pidfd) => by_pidfd(&pidfd),
        Err(Errno::NOPROTOOPT) => by_number(stream),
        // A kernel that gives no pidfd of a process that has gone answers with one of these.
        Err(Errno::SRCH | Errno::INVAL | Errno::NODATA) => Ok(Peer::Gone),
        Err(errno) => Err(errno.into()),
    };
    found.unwrap_or_else(|error| Peer::Unknown { reason: error.to_string() })
}

fn out_of_sight() -> io::Error {
    io::Error::other("the process that connected lives in a pid namespace out of the agent's sight")
}

fn by_pidfd(pidfd: &OwnedFd) -> io::Result<Peer> {
    let holder = match proc::pid_of_pidfd(pidfd)? {
        Some(pid) => describe(pid),
        None => Err(out_of_sight()),
    };
    // Looked at last: of a process that lives after all was read, all of it is true.
    if proc::has_ended(pidfd)? { Ok(Peer::Gone) } else { Ok(Peer::Held(vec![holder?])) }
}

fn by_number(stream: &OwnedFd) -> io::Result<Peer> {
    let pid = credentials::of(stream)?.pid.ok_or_else(out_of_sight)?;
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(Peer::Gone),
        Err(errno) => return Err(errno.into()),
    };
    let namespace = ns::namespace_of_socket(stream)?;
    let Found::Inode(inode) = sockdiag::peer_of_unix(&namespace, stream)? else { return Ok(Peer::Gone) };
    let folder = format!("/proc/{}/fd", pid.as_raw_nonzero());
    match peer::holds(&folder, &format!("socket:[{inode}]")) {
        Ok(true) => by_pidfd(&pidfd),
        Ok(false) => Err(io::Error::other("the process that connected has ended or closed its socket")),
        Err(error) if peer::has_gone(&error) => Ok(Peer::Gone),
        Err(error) => Err(error),
    }
}

fn describe(pid: u32) -> io::Result<Holder> {
    Ok(Holder {
        pid,
        // The name only: a command line is read out of the process's memory, where a hostile one can make the reader
        // wait, and all containers share this listener.
        command: proc::name(pid),
        cgroups: Cgroups::of(pid)?,
        mount_ns: proc::ns_id(pid, "mnt")?,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};

    use super::*;

    /// As the kernel at hand tells it, and as an older one would.
    const WAYS: [fn(&OwnedFd) -> Peer; 2] = [identify, |stream| {
        by_number(stream).unwrap_or_else(|error| Peer::Unknown { reason: error.to_string() })
    }];

    fn listener(folder: &Path) -> (UnixListener, PathBuf) {
        let path = folder.join("socket");
        (UnixListener::bind(&path).unwrap(), path)
    }

    fn accept(listener: &UnixListener) -> OwnedFd {
        listener.accept().unwrap().0.into()
    }

    #[test]
    fn the_own_process_is_found_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (listener, path) = listener(folder.path());
        for way in WAYS {
            let _client = UnixStream::connect(&path).unwrap();
            let Peer::Held(holders) = way(&accept(&listener)) else { panic!("not found") };
            let [holder] = &holders[..] else { panic!("{holders:?}") };
            assert_eq!(
                (holder.pid, holder.command.as_str()),
                (std::process::id(), proc::name(holder.pid).as_str())
            );
            assert_eq!(holder.mount_ns, proc::ns_id(holder.pid, "mnt").unwrap());
        }
    }

    #[test]
    fn a_process_that_has_ended_is_gone_though_another_holds_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        let (listener, path) = listener(folder.path());
        for way in WAYS {
            // The child connects a socket of this process, which keeps it open.
            let client =
                rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None);
            let client = client.unwrap();
            let script = "import socket, sys; socket.socket(fileno=0).connect(sys.argv[1])";
            let status = Command::new("python3")
                .args(["-c", script])
                .arg(&path)
                .stdin(Stdio::from(client.try_clone().unwrap()))
                .status();
            assert!(status.unwrap().success());
            assert_eq!(way(&accept(&listener)), Peer::Gone);
            drop(client);
        }
    }

    #[test]
    fn who_closed_the_socket_is_told_by_a_number_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let (listener, path) = listener(folder.path());
        drop(UnixStream::connect(&path).unwrap());
        // A child of another test that is just being started may hold the client's end for a moment.
        assert!(!matches!(by_number(&accept(&listener)), Ok(Peer::Held(_))));
    }

    #[test]
    fn a_process_of_that_number_without_the_socket_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let (listener, path) = listener(folder.path());
        let client = UnixStream::connect(&path).unwrap();
        let accepted = accept(&listener);
        // What is left when the number's process is another one: a child holds the socket, this process does not.
        let mut child =
            Command::new("sleep").arg("60").stdin(Stdio::from(OwnedFd::from(client))).spawn().unwrap();
        let found = by_number(&accepted);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.unwrap_err().to_string().contains("closed its socket"));
    }
}
