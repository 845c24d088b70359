// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unix endpoints: one listening socket a device for the whole host, in a directory of its own that is mounted into
//! containers.
//!
//! Unlike a port (`endpoints.rs`) it belongs to the agent, not to a network namespace: it opens with the device, not with
//! a grant, and whoever finds it may connect. The gate alone decides. The directory outlives the agent, so that a
//! container that has it mounted finds the next agent's socket there.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use lighter_wire::{Endpoint, Kind, SOCKET_NAME, socket_directory};
use rustix::net::{Shutdown, SocketType, shutdown};

use crate::config::Devices;
use crate::lock;
use crate::poller::{Poller, Target, Token};
use crate::unix::{SocketError, listen_at, make_directory};

/// Connections that may wait to be accepted; the kernel caps it by `somaxconn`.
const BACKLOG: i32 = 4096;

/// The sockets of all devices that have one.
#[derive(Debug)]
pub(crate) struct Sockets {
    root: PathBuf,
    open: Mutex<BTreeMap<Kind, Listening>>,
}

#[derive(Debug)]
struct Listening {
    socket: Arc<OwnedFd>,
    token: Token,
}

/// The devices that are reached over a unix socket.
fn wanted(devices: &Devices) -> BTreeSet<Kind> {
    let all = devices.values().flatten();
    all.filter_map(|endpoint| if let Endpoint::Unix(kind) = endpoint { Some(*kind) } else { None }).collect()
}

impl Sockets {
    /// None is open yet; `root` is the folder below which they will be.
    pub(crate) const fn new(root: PathBuf) -> Self {
        Self { root, open: Mutex::new(BTreeMap::new()) }
    }

    /// Opens what these devices want and is not open; all of it or nothing.
    pub(crate) fn open(&self, poller: &Poller, devices: &Devices) -> Result<(), SocketError> {
        let mut open = lock(&self.open);
        let missing: Vec<Kind> =
            wanted(devices).into_iter().filter(|kind| !open.contains_key(kind)).collect();
        let mut new = Vec::new();
        for kind in missing {
            match self.open_one(poller, kind) {
                Ok(listening) => new.push((kind, listening)),
                Err(error) => {
                    for (_, listening) in new {
                        listening.close(poller);
                    }
                    return Err(error);
                }
            }
        }
        open.extend(new);
        Ok(())
    }

    fn open_one(&self, poller: &Poller, kind: Kind) -> Result<Listening, SocketError> {
        let directory = socket_directory(&self.root, kind);
        make_directory(&directory)?;
        let path = directory.join(SOCKET_NAME);
        let socket = listen_at(&path, SocketType::STREAM, BACKLOG)?;
        let unwatched = |source: io::Error| SocketError::Make { path, what: "watch the socket", source };
        let token = poller.add(&socket, Target::Socket(kind)).map_err(unwatched)?;
        Ok(Listening { socket: Arc::new(socket), token })
    }

    /// Closes what these devices do not want. The files stay: who connects to one is refused at once.
    pub(crate) fn close_others(&self, poller: &Poller, devices: &Devices) {
        let wanted = wanted(devices);
        lock(&self.open).retain(|kind, listening| {
            let stays = wanted.contains(kind);
            if !stays {
                listening.close(poller);
            }
            stays
        });
    }

    /// The socket of a device, to accept from.
    pub(crate) fn listener(&self, kind: Kind) -> Option<(Arc<OwnedFd>, Token)> {
        lock(&self.open).get(&kind).map(|open| (Arc::clone(&open.socket), open.token))
    }
}

impl Listening {
    fn close(&self, poller: &Poller) {
        poller.remove(self.token, &*self.socket);
        // At once, also while a thread of the agent or a child that is just being started holds a copy.
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn over_unix(kinds: &[Kind]) -> Devices {
        kinds.iter().map(|&kind| (kind, vec![Endpoint::Unix(kind)])).collect()
    }

    #[test]
    fn sockets_follow_the_devices_and_their_directories_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (poller, sockets) = (Poller::new().unwrap(), Sockets::new(folder.path().join("run")));
        let path = |kind| socket_directory(&folder.path().join("run"), kind).join(SOCKET_NAME);
        let answers = |kind| UnixStream::connect(path(kind)).is_ok();
        let mut ane = over_unix(&[Kind::Ane]);
        ane.insert(Kind::Metal, vec![Endpoint::Loopback(1)]);
        sockets.open(&poller, &ane).unwrap();
        assert!(answers(Kind::Ane) && !path(Kind::Metal).parent().unwrap().exists());
        let gpu = over_unix(&[Kind::Gpu]);
        sockets.open(&poller, &gpu).unwrap();
        sockets.open(&poller, &gpu).unwrap();
        sockets.close_others(&poller, &gpu);
        assert!(!answers(Kind::Ane) && answers(Kind::Gpu));
        assert!(path(Kind::Ane).exists() && sockets.listener(Kind::Ane).is_none());
        sockets.open(&poller, &ane).unwrap();
        assert!(answers(Kind::Ane));
    }

    #[test]
    fn one_that_cannot_be_opened_opens_none() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ane"), "in the way").unwrap();
        let (poller, sockets) = (Poller::new().unwrap(), Sockets::new(folder.path().into()));
        let error = sockets.open(&poller, &over_unix(&[Kind::Gpu, Kind::Ane])).unwrap_err().to_string();
        assert!(error.contains(&folder.path().join("ane").display().to_string()), "{error}");
        assert!(UnixStream::connect(folder.path().join("gpu/socket")).is_err());
        assert!(sockets.listener(Kind::Gpu).is_none());
    }
}
