// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens loopback endpoints in the network namespace of the calling thread: called by the hook for a new container, and by the
//! agent after its own restart. Brings no interface up and connects to nothing.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use lighter_wire::Endpoint;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, ipproto, listen, socket_with, sockopt::set_socket_reuseaddr,
};

use crate::sockdiag;

/// Connections that may wait to be accepted; the kernel caps it by `somaxconn`.
const BACKLOG: i32 = 4096;

/// The sockets of one network namespace.
#[derive(Debug)]
pub struct Opened {
    /// Asks who is at the other end.
    pub sock_diag: OwnedFd,
    /// One per port, in the order asked for.
    pub listeners: Vec<OwnedFd>,
}

/// Why it stopped.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The socket that asks about peers could not be made.
    #[error("no sock_diag socket can be opened in the container's network namespace")]
    SockDiag(#[source] io::Error),
    /// One port could not be opened; the other socket is there to tell who holds it.
    #[error("{} cannot be opened in the container's network namespace", Endpoint::Loopback(*port))]
    Port {
        /// Which.
        port: u16,
        /// The kernel's answer.
        #[source]
        errno: Errno,
        /// Asks who holds it.
        sock_diag: OwnedFd,
    },
}

/// Opens all of them, or says which one could not be opened.
///
/// # Errors
/// When a socket cannot be made or bound, above all when another process holds the port.
pub fn open_here(ports: &[u16]) -> Result<Opened, OpenError> {
    let sock_diag = sockdiag::open_socket().map_err(OpenError::SockDiag)?;
    let mut listeners = Vec::with_capacity(ports.len());
    for &port in ports {
        match open_one(port) {
            Ok(listener) => listeners.push(listener),
            Err(errno) => return Err(OpenError::Port { port, errno, sock_diag }),
        }
    }
    Ok(Opened { sock_diag, listeners })
}

fn open_one(port: u16) -> Result<OwnedFd, Errno> {
    // Non-blocking from the start, so that whoever accepts never waits for a client that has gone again.
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(ipproto::TCP),
    )?;
    // Streams of an agent that ran before may still be closing on this port.
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_that_is_taken_is_named() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = holder.local_addr().unwrap().port();
        let error = open_here(&[taken]).unwrap_err();
        assert!(matches!(&error, OpenError::Port { port, errno: Errno::ADDRINUSE, .. } if *port == taken));
        drop(holder);
        assert_eq!(open_here(&[taken]).unwrap().listeners.len(), 1);
    }
}
