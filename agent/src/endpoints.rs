// SPDX-License-Identifier: MIT OR Apache-2.0
//! Network namespaces in which containers with grants live, and the listeners that are open there: loopback endpoints.
//! Unix endpoints are in `sockets.rs`.
//!
//! A listener belongs to its namespace: it is opened once, serves every grant there (two devices of one container, the
//! containers of a pod, all containers with host networking), and closes with the last of them. Whoever needs a namespace
//! holds an `Arc<Space>`; with the last one gone nothing of it is held any more.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use lighter_wire::{Endpoint, GrantId};
use rustix::net::{AddressFamily, Shutdown, shutdown, sockopt};

use crate::lock;
use crate::ns::{self, NsId};
use crate::peer::Seen;
use crate::poller::{Poller, Target, Token};
use crate::sockdiag::SockDiag;

/// One network namespace.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) id: NsId,
    pub(crate) namespace: OwnedFd,
    /// Held by whoever opens endpoints here, so that two hooks never race for one port.
    opening: Mutex<()>,
    /// Asks about the peers here; made with the first listener.
    pub(crate) sock_diag: Mutex<Option<SockDiag>>,
    pub(crate) seen: Mutex<Seen>,
    listeners: Mutex<BTreeMap<u16, Listening>>,
}

#[derive(Debug)]
struct Listening {
    socket: Arc<OwnedFd>,
    token: Token,
    users: BTreeSet<GrantId>,
}

/// A listener or `sock_diag` socket that is not what it was asked to be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotAsAsked {
    #[error("the socket for {} is no listener there in the container's network namespace", Endpoint::Loopback(*port))]
    Listener { port: u16 },
    #[error("the sock_diag socket belongs to another network namespace")]
    SockDiag,
    #[error("the hook sent {got} descriptors where {wanted} were asked for")]
    Count { got: usize, wanted: usize },
    #[error("a socket of the hook cannot be used: {0}")]
    Io(io::Error),
}

impl From<io::Error> for NotAsAsked {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// All namespaces in use.
#[derive(Debug, Default)]
pub(crate) struct Spaces(Mutex<HashMap<NsId, Weak<Space>>>);

impl Spaces {
    /// The namespace behind a descriptor; the descriptor keeps it alive while the space is in use.
    pub(crate) fn get(&self, namespace: OwnedFd) -> io::Result<Arc<Space>> {
        let id = NsId::of(&namespace)?;
        let mut spaces = lock(&self.0);
        if let Some(space) = spaces.get(&id).and_then(Weak::upgrade) {
            return Ok(space);
        }
        spaces.retain(|_, space| space.strong_count() > 0);
        let space = Arc::new(Space {
            id,
            namespace,
            opening: Mutex::default(),
            sock_diag: Mutex::default(),
            seen: Mutex::default(),
            listeners: Mutex::default(),
        });
        spaces.insert(id, Arc::downgrade(&space));
        Ok(space)
    }

    /// How many are in use.
    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.0).values().filter(|space| space.strong_count() > 0).count()
    }
}

impl Space {
    pub(crate) fn begin_opening(&self) -> MutexGuard<'_, ()> {
        lock(&self.opening)
    }

    /// Counts a grant as a user of those of its ports that are open, and tells which are not.
    pub(crate) fn reserve(&self, endpoints: &[Endpoint], grant: &GrantId) -> Vec<u16> {
        let mut listeners = lock(&self.listeners);
        let mut missing = Vec::new();
        for endpoint in endpoints {
            // The socket of a unix endpoint is the host's, not a namespace's.
            let Endpoint::Loopback(port) = endpoint else { continue };
            match listeners.get_mut(port) {
                Some(listening) => {
                    listening.users.insert(grant.clone());
                }
                None => missing.push(*port),
            }
        }
        missing
    }

    /// Takes sockets that a hook opened, after a look at what they are; `sock_diag` comes first.
    pub(crate) fn check(
        &self,
        ports: &[u16],
        mut sockets: Vec<OwnedFd>,
    ) -> Result<(OwnedFd, Vec<OwnedFd>), NotAsAsked> {
        let wanted = ports.len() + 1;
        if sockets.len() != wanted {
            return Err(NotAsAsked::Count { got: sockets.len(), wanted });
        }
        let listeners = sockets.split_off(1);
        let Some(sock_diag) = sockets.pop() else { return Err(NotAsAsked::Count { got: 0, wanted }) };
        self.check_sock_diag(&sock_diag)?;
        for (listener, &port) in listeners.iter().zip(ports) {
            let as_asked = ns::of_socket(listener)? == self.id
                && sockopt::socket_acceptconn(listener).map_err(io::Error::from)?
                && rustix::net::getsockname(listener).ok().and_then(|address| address.try_into().ok())
                    == Some(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port));
            if !as_asked {
                return Err(NotAsAsked::Listener { port });
            }
            // An accept that blocked would hold a thread of the agent.
            rustix::io::ioctl_fionbio(listener, true).map_err(io::Error::from)?;
        }
        Ok((sock_diag, listeners))
    }

    pub(crate) fn check_sock_diag(&self, sock_diag: &OwnedFd) -> Result<(), NotAsAsked> {
        let netlink = sockopt::socket_domain(sock_diag).map_err(io::Error::from)? == AddressFamily::NETLINK;
        if netlink && ns::of_socket(sock_diag)? == self.id { Ok(()) } else { Err(NotAsAsked::SockDiag) }
    }

    /// Puts checked sockets into use for a grant.
    pub(crate) fn install(
        self: &Arc<Self>,
        poller: &Poller,
        sock_diag: OwnedFd,
        listeners: impl IntoIterator<Item = (u16, OwnedFd)>,
        grant: &GrantId,
    ) -> io::Result<()> {
        let mut own_sock_diag = lock(&self.sock_diag);
        if own_sock_diag.is_none() {
            *own_sock_diag = Some(SockDiag::new(sock_diag)?);
        }
        drop(own_sock_diag);
        for (port, socket) in listeners {
            let mut open = lock(&self.listeners);
            let token = poller.add(&socket, Target::Port(Arc::downgrade(self), port))?;
            let users = BTreeSet::from([grant.clone()]);
            open.insert(port, Listening { socket: Arc::new(socket), token, users });
        }
        Ok(())
    }

    /// The listener at a port, to accept from.
    pub(crate) fn listener(&self, port: u16) -> Option<(Arc<OwnedFd>, Token)> {
        lock(&self.listeners).get(&port).map(|open| (Arc::clone(&open.socket), open.token))
    }

    /// Ends a grant's use of every port here; what nobody uses any more is closed.
    pub(crate) fn release(&self, poller: &Poller, grant: &GrantId) {
        lock(&self.listeners).retain(|_, open| {
            open.users.remove(grant);
            if open.users.is_empty() {
                open.close(poller);
            }
            !open.users.is_empty()
        });
    }

    /// Closes every port here: the agent stops.
    pub(crate) fn close_all(&self, poller: &Poller) {
        let mut listeners = lock(&self.listeners);
        for open in listeners.values() {
            open.close(poller);
        }
        listeners.clear();
    }
}

impl Listening {
    fn close(&self, poller: &Poller) {
        poller.remove(self.token, self.socket.as_fd());
        // Stops listening at once, also while a thread of the agent is about to accept from it.
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{TcpListener, TcpStream};

    use lighter_wire::Kind;

    use super::*;
    use crate::open::open_here;

    fn own_space(spaces: &Spaces) -> Arc<Space> {
        spaces.get(File::open("/proc/self/ns/net").unwrap().into()).unwrap()
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn a_listener_serves_all_grants_of_a_namespace_and_closes_with_the_last() {
        let (spaces, poller) = (Spaces::default(), Poller::new().unwrap());
        let space = own_space(&spaces);
        assert!(Arc::ptr_eq(&space, &own_space(&spaces)));
        let port = free_port();
        let endpoints = [Endpoint::Loopback(port), Endpoint::Unix(Kind::Ane)];
        let (a, b) = (GrantId("a".into()), GrantId("b".into()));
        assert_eq!(space.reserve(&endpoints, &a), vec![port], "only ports are opened in a namespace");
        let opened = open_here(&[port]).unwrap();
        let mut sockets = vec![opened.sock_diag];
        sockets.extend(opened.listeners);
        let (sock_diag, listeners) = space.check(&[port], sockets).unwrap();
        space.install(&poller, sock_diag, [port].into_iter().zip(listeners), &a).unwrap();
        assert!(space.reserve(&endpoints, &b).is_empty());
        space.release(&poller, &a);
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        let held_by_a_worker = space.listener(port).unwrap();
        space.release(&poller, &b);
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        drop(held_by_a_worker);
        drop(space);
        assert_eq!(spaces.len(), 0);
    }

    #[test]
    fn sockets_that_are_not_what_was_asked_for_are_refused() {
        let space = own_space(&Spaces::default());
        let (asked, other) = (free_port(), free_port());
        let open = |port| {
            let opened = open_here(&[port]).unwrap();
            let mut sockets = vec![opened.sock_diag];
            sockets.extend(opened.listeners);
            sockets
        };
        assert!(matches!(space.check(&[asked], open(other)), Err(NotAsAsked::Listener { .. })));
        let mut reversed = open(asked);
        reversed.reverse();
        assert!(matches!(space.check(&[asked], reversed), Err(NotAsAsked::SockDiag)));
        let mut short = open(asked);
        short.pop();
        assert!(matches!(space.check(&[asked], short), Err(NotAsAsked::Count { got: 1, wanted: 2 })));
        assert!(space.check(&[asked], open(asked)).is_ok());
    }
}
