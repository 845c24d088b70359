// SPDX-License-Identifier: MIT OR Apache-2.0
//! The other end of a unix connection, by its inode: what tells the process behind a pid from one that got its number.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::{Answer, ENOENT, Found, NLM_F_REQUEST, Request, SockDiag, open_socket, u16_at, u32_at};
use crate::ns;

const AF_UNIX: u8 = 1;
/// The request: 16 bytes of netlink header, 24 of `unix_diag_req`.
const REQUEST_BYTES: usize = 40;
/// `unix_diag_msg`, before its attributes.
const ENTRY_BYTES: usize = 16;
const SHOW_PEER: u32 = 4;
const ATTRIBUTE_PEER: u16 = 2;
const ATTRIBUTE_HEADER_BYTES: usize = 4;

/// The other end of an accepted unix socket that lives in `namespace`.
pub(crate) fn peer_of_unix(namespace: &OwnedFd, stream: &OwnedFd) -> io::Result<Found> {
    let own = u32::try_from(rustix::fs::fstat(stream)?.st_ino).map_err(io::Error::other)?;
    let socket = ns::within_network(namespace.as_fd(), open_socket)?;
    SockDiag::new(socket)?.unix_peer(own)
}

impl SockDiag {
    /// The socket that is connected with the one of this inode.
    fn unix_peer(&mut self, own: u32) -> io::Result<Found> {
        let seq = self.ask(&encode(self.seq.wrapping_add(1), own))?;
        let mut found = Found::Nothing;
        self.answers(seq, |answer| {
            match answer {
                Answer::Entry(body) => match parse_entry(body) {
                    Some((inode, Some(peer))) if inode == own => found = Found::by(peer),
                    _ => {}
                },
                Answer::Error(errno) if errno != ENOENT => return Err(io::Error::from_raw_os_error(errno)),
                Answer::Error(_) | Answer::Done => {}
            }
            Ok(true)
        })?;
        Ok(found)
    }
}

fn encode(seq: u32, own: u32) -> [u8; REQUEST_BYTES] {
    let mut request = Request::new(40, NLM_F_REQUEST, seq);
    request.put(&[AF_UNIX, 0, 0, 0]);
    // In any state.
    request.put(&u32::MAX.to_ne_bytes());
    request.put(&own.to_ne_bytes());
    request.put(&SHOW_PEER.to_ne_bytes());
    // No cookie is known.
    request.put(&[0xff; 8]);
    request.bytes
}

/// A `unix_diag_msg`: the socket's own inode, and its peer's where the kernel says one.
pub(super) fn parse_entry(body: &[u8]) -> Option<(u32, Option<u32>)> {
    if *body.first()? != AF_UNIX {
        return None;
    }
    let own = u32_at(body, 4)?;
    let mut rest = body.get(ENTRY_BYTES..)?;
    while !rest.is_empty() {
        let length = usize::from(u16_at(rest, 0)?);
        let value = rest.get(ATTRIBUTE_HEADER_BYTES..length)?;
        if u16_at(rest, 2)? == ATTRIBUTE_PEER {
            return Some((own, Some(u32_at(value, 0)?)));
        }
        rest = rest.get(length.checked_next_multiple_of(4)?..).unwrap_or_default();
    }
    Some((own, None))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;

    fn inode_of(socket: impl AsFd) -> u32 {
        u32::try_from(rustix::fs::fstat(socket).unwrap().st_ino).unwrap()
    }

    #[test]
    fn the_other_end_is_found_until_it_is_closed() {
        let mut diag = SockDiag::new(open_socket().unwrap()).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        assert_eq!(diag.unix_peer(inode_of(&near)).unwrap(), Found::Inode(inode_of(&far)));
        let own = inode_of(&near);
        drop(far);
        // A child of another test that is just being started may hold either end for a moment.
        while matches!(diag.unix_peer(own).unwrap(), Found::Inode(_)) {
            std::thread::yield_now();
        }
        drop(near);
        while diag.unix_peer(own).unwrap() != Found::Nothing {
            std::thread::yield_now();
        }
    }

    proptest! {
        #[test]
        fn no_entry_panics_or_loops(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse_entry(&bytes);
            let mut whole = vec![AF_UNIX; ENTRY_BYTES];
            whole.extend(bytes);
            let _ = parse_entry(&whole);
        }

        #[test]
        fn a_peer_is_read_behind_other_attributes(own in any::<u32>(), peer in any::<u32>(), name in ".{0,20}") {
            let attribute = |kind: u16, value: &[u8]| {
                let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).unwrap();
                let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
                bytes.extend(value);
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                bytes
            };
            let mut body = vec![AF_UNIX, 1, 1, 0];
            body.extend(own.to_ne_bytes());
            body.extend([7; 8]);
            prop_assert_eq!(parse_entry(&body), Some((own, None)));
            body.extend(attribute(0, name.as_bytes()));
            body.extend(attribute(ATTRIBUTE_PEER, &peer.to_ne_bytes()));
            body.extend(attribute(4, &[0; 8]));
            prop_assert_eq!(parse_entry(&body), Some((own, Some(peer))));
        }
    }
}
