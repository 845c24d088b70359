// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who is at the other end of an accepted TCP connection: the kernel's socket by its addresses, then the processes that
//! hold it.
//!
//! A look-up goes through the descriptors of every process, since a process anywhere may have been given the socket.
//! What it finds is remembered for a while: of a process that was found to be the only holder before, the next
//! connections are looked for among the processes of the network namespace only.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use lighter_wire::Endpoint;
use rustix::fs::{CWD, Mode, OFlags, RawDir, openat, readlinkat_raw};
use rustix::io::Errno;

use crate::cgroup::Cgroups;
use crate::endpoints::Space;
use crate::gate::{Holder, Peer};
use crate::lock;
use crate::ns::NsId;
use crate::proc;
use crate::sockdiag::{Found, SockDiag};

const REMEMBERED: Duration = Duration::from_secs(10);
const MAX_REMEMBERED: usize = 1024;

/// Processes of one network namespace that a full look-up has found, by pid and start time.
#[derive(Debug, Default)]
pub(crate) struct Seen(HashMap<(u32, u64), Instant>);

impl Seen {
    fn has_all(&self, holders: &[(u32, u64)], at: Instant) -> bool {
        !holders.is_empty()
            && holders.iter().all(|holder| {
                self.0.get(holder).is_some_and(|seen| at.saturating_duration_since(*seen) < REMEMBERED)
            })
    }

    fn add(&mut self, holders: &[(u32, u64)], at: Instant) {
        if self.0.len() >= MAX_REMEMBERED {
            self.0.retain(|_, seen| at.saturating_duration_since(*seen) < REMEMBERED);
        }
        if self.0.len() < MAX_REMEMBERED {
            self.0.extend(holders.iter().map(|holder| (*holder, at)));
        }
    }
}

/// Gathers what the gate has to know about a peer.
pub(crate) fn identify(space: &Space, peer: SocketAddrV4, local: SocketAddrV4) -> Peer {
    look_up(space, peer, local).unwrap_or_else(|error| Peer::Unknown { reason: error.to_string() })
}

fn look_up(space: &Space, peer: SocketAddrV4, local: SocketAddrV4) -> io::Result<Peer> {
    let found = match lock(&space.sock_diag).as_mut() {
        Some(sock_diag) => sock_diag.peer(peer, local)?,
        None => return Err(io::Error::other("no sock_diag socket in this network namespace")),
    };
    let Found::Inode(inode) = found else { return Ok(Peer::Gone) };
    let scan = holders(space, inode)?;
    if scan.holders.is_empty() {
        return Ok(Peer::NoHolder { unreadable: scan.unreadable });
    }
    let mut known = Vec::with_capacity(scan.holders.len());
    for (pid, start_time) in scan.holders {
        match describe(pid, start_time) {
            Ok(holder) => known.push(holder),
            // Ended since: it holds nothing any more.
            Err(error) if has_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(if known.is_empty() { Peer::Gone } else { Peer::Held(known) })
}

fn describe(pid: u32, start_time: u64) -> io::Result<Holder> {
    let holder = Holder {
        pid,
        command: proc::command(pid),
        cgroups: Cgroups::of(pid)?,
        mount_ns: proc::ns_id(pid, "mnt")?,
    };
    // Read before and after: all of it is about one process.
    if proc::start_time(pid)? != start_time {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(holder)
}

pub(crate) fn has_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

#[derive(Debug, Default)]
struct Scan {
    holders: Vec<(u32, u64)>,
    unreadable: usize,
}

/// All processes that hold the socket with this inode.
fn holders(space: &Space, inode: u32) -> io::Result<Scan> {
    let wanted = format!("socket:[{inode}]");
    let mut scan = Scan::default();
    let (here, elsewhere) = by_namespace(space.id, &mut scan)?;
    for &pid in &here {
        scan.look_into(pid, &format!("/proc/{pid}/fd"), &wanted);
    }
    let at = Instant::now();
    if lock(&space.seen).has_all(&scan.holders, at) {
        return Ok(scan);
    }
    for &pid in &elsewhere {
        scan.look_into(pid, &format!("/proc/{pid}/fd"), &wanted);
    }
    if scan.holders.is_empty() {
        // A thread may have descriptors of its own.
        for &pid in &here {
            for thread in threads(pid) {
                scan.look_into(pid, &format!("/proc/{pid}/task/{thread}/fd"), &wanted);
            }
        }
    }
    lock(&space.seen).add(&scan.holders, at);
    Ok(scan)
}

/// Processes in the namespace, and all others.
fn by_namespace(id: NsId, scan: &mut Scan) -> io::Result<(Vec<u32>, Vec<u32>)> {
    let (mut here, mut elsewhere) = (Vec::new(), Vec::new());
    for pid in proc::pids()? {
        match proc::ns_id(pid, "net") {
            Ok(namespace) if namespace == id => here.push(pid),
            Ok(_) => elsewhere.push(pid),
            Err(error) if has_gone(&error) => {}
            Err(_) => scan.unreadable += 1,
        }
    }
    Ok((here, elsewhere))
}

fn threads(pid: u32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&id| id != pid)
        .collect()
}

impl Scan {
    fn look_into(&mut self, pid: u32, directory: &str, wanted: &str) {
        match holds(directory, wanted) {
            Ok(true) => {
                if let Ok(start_time) = proc::start_time(pid) {
                    let holder = (pid, start_time);
                    if !self.holders.contains(&holder) {
                        self.holders.push(holder);
                    }
                }
            }
            Ok(false) => {}
            Err(error) if has_gone(&error) => {}
            Err(_) => self.unreadable += 1,
        }
    }
}

/// Why a port could not be opened, in words for a user: a port that is taken is told with its holder.
pub(crate) fn why_not_opened(port: u16, errno: Errno, sock_diag: OwnedFd) -> String {
    let endpoint = Endpoint::Loopback(port);
    if errno != Errno::ADDRINUSE {
        return format!("{endpoint} cannot be opened in its network namespace: {}", io::Error::from(errno));
    }
    let by = match listener_of(port, sock_diag) {
        Ok(Some(pid)) => format!("process {pid} ({})", proc::command(pid)),
        Ok(None) => "a process that could not be found".to_owned(),
        Err(error) => format!("a process that could not be looked up: {error}"),
    };
    format!("{endpoint} is already in use in its network namespace, by {by}")
}

fn listener_of(port: u16, sock_diag: OwnedFd) -> io::Result<Option<u32>> {
    for inode in SockDiag::new(sock_diag)?.listeners(port)? {
        let wanted = format!("socket:[{inode}]");
        let mut scan = Scan::default();
        for pid in proc::pids()? {
            scan.look_into(pid, &format!("/proc/{pid}/fd"), &wanted);
            if let Some((pid, _)) = scan.holders.first() {
                return Ok(Some(*pid));
            }
        }
    }
    Ok(None)
}

/// Whether one of the links in a directory of descriptors says `wanted`.
pub(crate) fn holds(directory: &str, wanted: &str) -> io::Result<bool> {
    let directory: OwnedFd =
        openat(CWD, directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut space = [MaybeUninit::<u8>::uninit(); 4096];
    let mut link = [MaybeUninit::<u8>::uninit(); 64];
    let mut entries = RawDir::new(directory.as_fd(), &mut space);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        match readlinkat_raw(&directory, entry.file_name(), &mut link) {
            Ok((text, _)) if *text == *wanted.as_bytes() => return Ok(true),
            // Closed meanwhile, or `.` and `..`, which are no links.
            Ok(_) | Err(Errno::NOENT | Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Mutex;

    use super::*;
    use crate::endpoints::Spaces;
    use crate::sockdiag::open_socket;

    fn own_space() -> std::sync::Arc<Space> {
        let space = Spaces::default().get(File::open("/proc/self/ns/net").unwrap().into()).unwrap();
        *lock(&space.sock_diag) = Some(SockDiag::new(open_socket().unwrap()).unwrap());
        space
    }

    fn v4(address: SocketAddr) -> SocketAddrV4 {
        let SocketAddr::V4(address) = address else { panic!("{address}") };
        address
    }

    /// A child between fork and exec holds every socket of this process, so sockets and children take turns.
    static FORKS: Mutex<()> = Mutex::new(());

    #[test]
    fn the_own_process_is_found_and_one_that_closed_is_gone() {
        let _no_fork = lock(&FORKS);
        let space = own_space();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = v4(listener.local_addr().unwrap());
        for _ in 0..2 {
            let client = TcpStream::connect(local).unwrap();
            let (_accepted, peer) = listener.accept().unwrap();
            let Peer::Held(holders) = identify(&space, v4(peer), local) else { panic!("not found") };
            assert_eq!(holders.len(), 1);
            assert_eq!(holders[0].pid, std::process::id());
            drop(client);
            assert_eq!(identify(&space, v4(peer), local), Peer::Gone);
        }
    }

    #[test]
    fn a_child_that_inherited_the_socket_is_a_holder_too() {
        use std::process::{Command, Stdio};
        let _own_fork = lock(&FORKS);
        let space = own_space();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = v4(listener.local_addr().unwrap());
        let client = TcpStream::connect(local).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        assert!(matches!(identify(&space, v4(peer), local), Peer::Held(holders) if holders.len() == 1));
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::from(OwnedFd::from(client.try_clone().unwrap())))
            .spawn()
            .unwrap();
        let Peer::Held(holders) = identify(&space, v4(peer), local) else { panic!("not found") };
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(holders.len(), 2);
        assert!(holders.iter().any(|holder| holder.pid == child.id() && holder.command == "sleep 60"));
    }

    #[test]
    fn what_was_seen_is_forgotten_after_a_while() {
        let mut seen = Seen::default();
        let at = Instant::now();
        seen.add(&[(1, 1)], at);
        assert!(seen.has_all(&[(1, 1)], at));
        assert!(
            !seen.has_all(&[(1, 2)], at) && !seen.has_all(&[(1, 1), (2, 1)], at) && !seen.has_all(&[], at)
        );
        assert!(!seen.has_all(&[(1, 1)], at + REMEMBERED));
    }
}
