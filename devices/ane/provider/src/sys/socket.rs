// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream to the host: a unix socket that this side connects, sends on and reads from.
#![allow(unsafe_code)]

use super::raw::{self, call};
use super::wait::{self, READABLE, WRITABLE};
use super::{Descriptor, Errno, uninterrupted};

const AF_UNIX: u16 = 1;
const SOCK_STREAM_CLOEXEC: usize = 1 | 0o2_000_000;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_PEEK_DONTWAIT: usize = 0x42;
const MSG_DONTWAIT: usize = 0x40;
const SOL_SOCKET: u32 = 1;
const SCM_RIGHTS: u32 = 1;
/// Longest path of a unix socket.
pub(crate) const MAX_PATH_BYTES: usize = 107;
/// Most pieces of one call.
const MAX_PIECES: usize = 64;

#[repr(C)]
struct Address {
    family: u16,
    path: [u8; MAX_PATH_BYTES + 1],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    bytes: usize,
}

/// The kernel's message header on 64 bits, padding included.
#[repr(C)]
struct Message {
    name: usize,
    name_bytes: u64,
    pieces: usize,
    piece_count: usize,
    control: usize,
    control_bytes: usize,
    flags: u64,
}

/// One descriptor beside a message.
#[repr(C)]
struct Rights {
    bytes: usize,
    level: u32,
    kind: u32,
    descriptor: i32,
    padding: i32,
}

const RIGHTS_BYTES: usize = 20;
const _: () = assert!(size_of::<Message>() == 56 && size_of::<Rights>() == 24 && size_of::<Address>() == 110);

/// A connected stream. Waits at most as long as each call says.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: Descriptor,
}

impl Stream {
    /// Connects to a path.
    pub(crate) fn connect(path: &str) -> Result<Self, Errno> {
        let mut address = Address { family: AF_UNIX, path: [0; MAX_PATH_BYTES + 1] };
        let place = address.path.get_mut(..path.len()).filter(|place| place.len() <= MAX_PATH_BYTES);
        place.ok_or(Errno::INVALID)?.copy_from_slice(path.as_bytes());
        // SAFETY: plain numbers.
        let socket = uninterrupted(|| unsafe {
            call(raw::SOCKET, [AF_UNIX.into(), SOCK_STREAM_CLOEXEC, 0, 0, 0, 0])
        })?;
        let socket = Descriptor::new(socket)?;
        let arguments =
            [socket.argument(), (&raw const address).expose_provenance(), size_of::<Address>(), 0, 0, 0];
        // SAFETY: an address of that length, which lives through the call.
        uninterrupted(|| unsafe { call(raw::CONNECT, arguments) })?;
        Ok(Self { socket })
    }

    #[cfg(test)]
    pub(crate) const fn of(socket: Descriptor) -> Self {
        Self { socket }
    }

    /// Sends all pieces one after another, and a descriptor with the first byte.
    pub(crate) fn send(
        &self,
        pieces: &[&[u8]],
        mut descriptor: Option<&Descriptor>,
        stalled_ms: u32,
    ) -> Result<(), Errno> {
        let mut done = 0;
        let total: usize = pieces.iter().map(|piece| piece.len()).sum();
        while done < total {
            let mut list = [Piece { start: 0, bytes: 0 }; MAX_PIECES];
            let mut skip = done;
            let mut count = 0;
            let left = pieces.iter().filter_map(|piece| {
                let start = skip.min(piece.len());
                skip -= start;
                piece.get(start..).filter(|rest| !rest.is_empty())
            });
            for (place, rest) in list.iter_mut().zip(left) {
                *place = Piece { start: rest.as_ptr().expose_provenance(), bytes: rest.len() };
                count += 1;
            }
            match self.send_some(&list, count, descriptor) {
                Ok(sent) => done += sent,
                Err(Errno::AGAIN) => {
                    wait::poll(self.socket.number(), WRITABLE, stalled_ms)?;
                    continue;
                }
                Err(errno) => return Err(errno),
            }
            descriptor = None;
        }
        Ok(())
    }

    fn send_some(
        &self,
        pieces: &[Piece; MAX_PIECES],
        count: usize,
        descriptor: Option<&Descriptor>,
    ) -> Result<usize, Errno> {
        let rights = descriptor.map(|descriptor| Rights {
            bytes: RIGHTS_BYTES,
            level: SOL_SOCKET,
            kind: SCM_RIGHTS,
            descriptor: descriptor.number(),
            padding: 0,
        });
        let (control, control_bytes) = rights
            .as_ref()
            .map_or((0, 0), |rights| ((&raw const *rights).expose_provenance(), size_of::<Rights>()));
        let message = Message {
            name: 0,
            name_bytes: 0,
            pieces: pieces.as_ptr().expose_provenance(),
            piece_count: count,
            control,
            control_bytes,
            flags: 0,
        };
        let flags = MSG_NOSIGNAL | MSG_DONTWAIT;
        let arguments = [self.socket.argument(), (&raw const message).expose_provenance(), flags, 0, 0, 0];
        // SAFETY: the header, its pieces and the descriptor's place live through the call.
        uninterrupted(|| unsafe { call(raw::SENDMSG, arguments) })
    }

    /// Reads exactly as much as the buffer holds; gives up when nothing comes for `stalled_ms`.
    pub(crate) fn read_exact(&self, into: &mut [u8], stalled_ms: u32) -> Result<(), Errno> {
        let mut rest = into;
        while !rest.is_empty() {
            let (pointer, length) = (rest.as_mut_ptr().expose_provenance(), rest.len());
            let arguments = [self.socket.argument(), pointer, length, MSG_DONTWAIT, 0, 0];
            // SAFETY: a buffer of that length that lives through the call; no address is asked for.
            match uninterrupted(|| unsafe { call(raw::RECVFROM, arguments) }) {
                Ok(0) => return Err(Errno::HUNG_UP),
                Ok(got) => rest = rest.get_mut(got..).unwrap_or_default(),
                Err(Errno::AGAIN) => wait::poll(self.socket.number(), READABLE, stalled_ms)?,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Whether something has come: `Ok(true)` for bytes, `Ok(false)` for nothing, an error for the end.
    pub(crate) fn has_input(&self) -> Result<bool, Errno> {
        let mut byte = [0_u8];
        let pointer = byte.as_mut_ptr().expose_provenance();
        let arguments = [self.socket.argument(), pointer, 1, MSG_PEEK_DONTWAIT, 0, 0];
        // SAFETY: a buffer of one byte that lives through the call; no address is asked for.
        match uninterrupted(|| unsafe { call(raw::RECVFROM, arguments) }) {
            Ok(0) => Err(Errno::HUNG_UP),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Stream, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let near = Descriptor::new(usize::try_from(near.into_raw_fd()).unwrap()).unwrap();
        (Stream::of(near), far)
    }

    #[test]
    fn many_pieces_larger_than_the_sockets_buffer_arrive_in_order() {
        let (near, mut far) = pair();
        let bytes: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let pieces: Vec<&[u8]> = bytes.chunks(70_001).chain([&[][..]]).collect();
        let mut got = vec![0; bytes.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| near.send(&pieces, None, 10_000).unwrap());
            far.read_exact(&mut got).unwrap();
        });
        assert!(got == bytes);
    }

    #[test]
    fn the_end_and_silence_are_told_apart() {
        let (near, mut far) = pair();
        assert_eq!(near.has_input(), Ok(false));
        assert_eq!(near.read_exact(&mut [0], 1), Err(Errno::TIMED_OUT));
        far.write_all(b"ab").unwrap();
        assert_eq!(near.has_input(), Ok(true));
        let mut two = [0; 2];
        near.read_exact(&mut two, 1000).unwrap();
        assert_eq!(&two, b"ab");
        drop(far);
        assert_eq!(near.has_input(), Err(Errno::HUNG_UP));
        assert_eq!(near.read_exact(&mut two, 1000), Err(Errno::HUNG_UP));
    }

    #[test]
    fn a_path_that_is_too_long_or_leads_nowhere_is_an_error() {
        assert_eq!(Stream::connect(&"x".repeat(108)).unwrap_err(), Errno::INVALID);
        assert_eq!(Stream::connect("/nonexistent/socket").unwrap_err(), Errno(2));
    }
}
