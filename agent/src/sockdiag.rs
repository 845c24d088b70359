// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asks the kernel which socket is at the other end of a connection, and who listens on a port.
//!
//! A `NETLINK_SOCK_DIAG` socket answers for the network namespace in which it was made, whoever holds it later;
//! the hook makes it inside the container's. Only the questions below are asked. The answer is checked
//! against the question: for a connection that has gone the kernel may answer with the listener instead.

mod unix;

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with, sockopt,
};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const TCP_LISTEN: u8 = 10;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 72;
const REQUEST_BYTES: usize = 72;
const ENOENT: i32 = 2;
/// The kernel answers at once or not at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// A dump of listeners on one port is small; more than this many packets is no answer to it.
const MAX_DUMP_PACKETS: usize = 64;

pub(crate) use unix::peer_of_unix;

/// One TCP socket as the kernel describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    family: u8,
    state: u8,
    source: ([u8; 16], u16),
    destination: ([u8; 16], u16),
    inode: u32,
}

/// What the kernel says about the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// There is such a socket, and a process may hold it under this inode.
    Inode(u32),
    /// There is one that no process holds any more.
    Orphan,
    /// There is none.
    Nothing,
}

impl Found {
    const fn by(inode: u32) -> Self {
        if inode == 0 { Self::Orphan } else { Self::Inode(inode) }
    }
}

/// A socket that asks about one network namespace.
#[derive(Debug)]
pub(crate) struct SockDiag {
    socket: OwnedFd,
    seq: u32,
}

/// Makes the netlink socket for the network namespace of the calling thread.
///
/// # Errors
/// When the kernel has no `sock_diag` or no descriptor is left.
pub(crate) fn open_socket() -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    Ok(socket)
}

impl SockDiag {
    /// Takes over a socket made by [`open_socket`].
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self { socket, seq: 0 })
    }

    /// The peer's end of a connection: its own address is `peer`, the accepted socket's is `local`.
    pub(crate) fn peer(&mut self, peer: SocketAddrV4, local: SocketAddrV4) -> io::Result<Found> {
        let seq =
            self.ask(&encode(self.seq.wrapping_add(1), AF_INET, NLM_F_REQUEST, u32::MAX, peer, local))?;
        let mut found = Found::Nothing;
        self.answers(seq, |answer| {
            match answer {
                Answer::Entry(body) => match parse_entry(body) {
                    Some(entry) if is_the_peer(&entry, peer, local) => found = Found::by(entry.inode),
                    _ => {}
                },
                Answer::Error(errno) if errno != ENOENT => return Err(io::Error::from_raw_os_error(errno)),
                Answer::Error(_) | Answer::Done => {}
            }
            Ok(true)
        })?;
        Ok(found)
    }

    /// Inodes of the sockets that listen on a port.
    pub(crate) fn listeners(&mut self, port: u16) -> io::Result<Vec<u32>> {
        let mut inodes = Vec::new();
        let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        let own = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port);
        for family in [AF_INET, AF_INET6] {
            let states = 1_u32 << TCP_LISTEN;
            let seq = self.ask(&encode(
                self.seq.wrapping_add(1),
                family,
                NLM_F_REQUEST | NLM_F_DUMP,
                states,
                own,
                any,
            ))?;
            self.answers(seq, |answer| match answer {
                Answer::Entry(body) => {
                    let own = parse_entry(body).filter(|entry| entry.source.1 == port && entry.inode != 0);
                    inodes.extend(own.map(|entry| entry.inode));
                    Ok(false)
                }
                Answer::Error(errno) => Err(io::Error::from_raw_os_error(errno)),
                Answer::Done => Ok(true),
            })?;
        }
        Ok(inodes)
    }

    fn ask(&mut self, request: &[u8]) -> io::Result<u32> {
        self.seq = self.seq.wrapping_add(1);
        send(&self.socket, request, SendFlags::empty())?;
        Ok(self.seq)
    }

    /// Feeds the messages that answer `seq` to `take` until it says that it has all.
    fn answers(&self, seq: u32, mut take: impl FnMut(Answer<'_>) -> io::Result<bool>) -> io::Result<()> {
        let mut buffer = [0_u8; 16 << 10];
        for _ in 0..MAX_DUMP_PACKETS {
            let (_, got) = recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = buffer.get(..got).unwrap_or_default();
            while let Some((message, after)) = split_message(rest) {
                rest = after;
                // An answer to a question that timed out earlier is passed over.
                if message.seq == seq && take(message.answer)? {
                    return Ok(());
                }
            }
        }
        Err(io::Error::other("sock_diag gave no end of its answer"))
    }
}

/// Whether the kernel's entry is the socket asked for. A client that uses an IPv6 socket for an IPv4
/// address has the addresses in their mapped form.
fn is_the_peer(entry: &Entry, peer: SocketAddrV4, local: SocketAddrV4) -> bool {
    let v4 = |bytes: &[u8; 16]| match entry.family {
        AF_INET => bytes.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets)),
        AF_INET6 => std::net::Ipv6Addr::from(*bytes).to_ipv4_mapped(),
        _ => None,
    };
    let same = |(bytes, port): &([u8; 16], u16), address: SocketAddrV4| {
        *port == address.port() && v4(bytes) == Some(*address.ip())
    };
    entry.state != TCP_LISTEN && same(&entry.source, peer) && same(&entry.destination, local)
}

fn encode(
    seq: u32,
    family: u8,
    flags: u16,
    states: u32,
    source: SocketAddrV4,
    destination: SocketAddrV4,
) -> [u8; REQUEST_BYTES] {
    let mut request = Request::new(72, flags, seq);
    // inet_diag_req_v2
    request.put(&[family, IPPROTO_TCP, 0, 0]);
    request.put(&states.to_ne_bytes());
    request.put(&source.port().to_be_bytes());
    request.put(&destination.port().to_be_bytes());
    for address in [source, destination] {
        request.put(&address.ip().octets());
        request.put(&[0; 12]);
    }
    request.put(&0_u32.to_ne_bytes());
    // No cookie is known.
    request.put(&[0xff; 8]);
    request.bytes
}

/// A question that is being written.
struct Request<const BYTES: usize> {
    bytes: [u8; BYTES],
    at: usize,
}

impl<const BYTES: usize> Request<BYTES> {
    /// Begins with the netlink header.
    fn new(length: u32, flags: u16, seq: u32) -> Self {
        let mut request = Self { bytes: [0; BYTES], at: 0 };
        request.put(&length.to_ne_bytes());
        request.put(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        request.put(&flags.to_ne_bytes());
        request.put(&seq.to_ne_bytes());
        request.put(&0_u32.to_ne_bytes());
        request
    }

    fn put(&mut self, part: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(self.at).zip(part) {
            *to = *from;
        }
        self.at += part.len();
    }
}

/// One netlink message, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Message<'a> {
    seq: u32,
    answer: Answer<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer<'a> {
    /// A socket, as its family describes it.
    Entry(&'a [u8]),
    Error(i32),
    Done,
}

/// Takes the first message off a packet; `None` when what is left is no whole message.
fn split_message(bytes: &[u8]) -> Option<(Message<'_>, &[u8])> {
    let length = usize::try_from(u32_at(bytes, 0)?).ok()?;
    let kind = u16_at(bytes, 4)?;
    let seq = u32_at(bytes, 8)?;
    let body = bytes.get(HEADER_BYTES..length)?;
    let answer = match kind {
        NLMSG_DONE => Answer::Done,
        NLMSG_ERROR => {
            Answer::Error(i32::from_ne_bytes(*body.first_chunk()?).checked_neg().unwrap_or(i32::MAX))
        }
        SOCK_DIAG_BY_FAMILY => Answer::Entry(body),
        _ => return None,
    };
    let after = bytes.get(length.checked_next_multiple_of(4)?..).unwrap_or_default();
    Some((Message { seq, answer }, after))
}

/// An `inet_diag_msg`.
fn parse_entry(body: &[u8]) -> Option<Entry> {
    if body.len() < ENTRY_BYTES {
        return None;
    }
    let address = |at: usize| body.get(at..)?.first_chunk::<16>().copied();
    let port = |at: usize| Some(u16::from_be_bytes(*body.get(at..)?.first_chunk()?));
    Some(Entry {
        family: *body.first()?,
        state: *body.get(1)?,
        source: (address(8)?, port(4)?),
        destination: (address(24)?, port(6)?),
        inode: u32_at(body, 68)?,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Takes any bytes for a packet of answers.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(input: &[u8]) {
    let mut tcp = Request::<{ HEADER_BYTES + ENTRY_BYTES }>::new(88, 0, 1);
    tcp.put(&[AF_INET, 1, 0, 0]);
    let mut unix = Request::<{ HEADER_BYTES + 24 }>::new(40, 0, 1);
    unix.put(&[1, 1, 1, 0]);
    // Behind the fixed part, an attribute of 8 bytes: the peer.
    unix.put(&[0; 12]);
    unix.put(&8_u16.to_ne_bytes());
    unix.put(&2_u16.to_ne_bytes());
    let bytes = crate::fuzzing::shaped(input, &[&tcp.bytes, &unix.bytes]);
    let mut rest = bytes.as_slice();
    while let Some((message, after)) = split_message(rest) {
        if let Answer::Entry(body) = message.answer {
            let any = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1);
            let _ = parse_entry(body).map(|entry| is_the_peer(&entry, any, any));
            let _ = unix::parse_entry(body);
        }
        assert!(after.len() < rest.len(), "a message of no length");
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;

    fn v4(address: SocketAddr) -> SocketAddrV4 {
        match address {
            SocketAddr::V4(address) => address,
            SocketAddr::V6(address) => {
                SocketAddrV4::new(address.ip().to_ipv4_mapped().unwrap(), address.port())
            }
        }
    }

    fn inode_of(socket: impl AsFd) -> u32 {
        u32::try_from(rustix::fs::fstat(socket).unwrap().st_ino).unwrap()
    }

    #[test]
    fn the_clients_own_socket_is_found_also_when_it_is_an_ipv6_one() {
        let mut diag = SockDiag::new(open_socket().unwrap()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = v4(listener.local_addr().unwrap());
        for target in [format!("127.0.0.1:{}", local.port()), format!("[::ffff:127.0.0.1]:{}", local.port())]
        {
            let client = TcpStream::connect(target).unwrap();
            let (accepted, peer) = listener.accept().unwrap();
            assert_eq!(diag.peer(v4(peer), local).unwrap(), Found::Inode(inode_of(&client)));
            drop(client);
            assert!(!matches!(diag.peer(v4(peer), local).unwrap(), Found::Inode(_)), "closed");
            drop(accepted);
        }
    }

    #[test]
    fn an_unknown_connection_is_nothing_though_somebody_listens_there() {
        let mut diag = SockDiag::new(open_socket().unwrap()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let (local, peer) = (v4(listener.local_addr().unwrap()), v4(other.local_addr().unwrap()));
        assert_eq!(diag.peer(peer, local).unwrap(), Found::Nothing);
    }

    #[test]
    fn the_listener_on_a_port_is_found() {
        let mut diag = SockDiag::new(open_socket().unwrap()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(diag.listeners(port).unwrap(), vec![inode_of(&listener)]);
        drop(listener);
        assert!(diag.listeners(port).unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn no_answer_panics_or_loops(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = bytes.as_slice();
            while let Some((message, after)) = split_message(rest) {
                if let Answer::Entry(body) = message.answer {
                    let _ = parse_entry(body);
                }
                prop_assert!(after.len() < rest.len());
                rest = after;
            }
        }

        #[test]
        fn an_entry_is_read_where_the_kernel_puts_it(
            inode in any::<u32>(), sport in any::<u16>(), dport in any::<u16>(), seq in any::<u32>(),
            source in any::<[u8; 4]>(), destination in any::<[u8; 4]>(),
        ) {
            let mut body = vec![AF_INET, 1, 0, 0];
            body.extend(sport.to_be_bytes());
            body.extend(dport.to_be_bytes());
            body.extend(source);
            body.extend([0; 12]);
            body.extend(destination);
            body.extend([0; 12]);
            body.extend([0; 28]);
            body.extend(inode.to_ne_bytes());
            let mut packet = Vec::from(88_u32.to_ne_bytes());
            packet.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
            packet.extend([0; 2]);
            packet.extend(seq.to_ne_bytes());
            packet.extend([0; 4]);
            packet.extend(body);
            let (message, rest) = split_message(&packet).unwrap();
            prop_assert!(rest.is_empty() && message.seq == seq);
            let Answer::Entry(body) = message.answer else { panic!("{message:?}") };
            let entry = parse_entry(body).unwrap();
            prop_assert_eq!(entry.inode, inode);
            let peer = SocketAddrV4::new(source.into(), sport);
            let local = SocketAddrV4::new(destination.into(), dport);
            prop_assert!(is_the_peer(&entry, peer, local));
        }
    }
}
