// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames out of a stream of bytes, and answers into a socket.
//!
//! A client sends a message in three pieces and about ten messages a token, so one read takes what there is,
//! and an answer leaves in one write straight from where its bytes lie.

use std::io::{ErrorKind, IoSlice, Read, Result};
use std::os::fd::AsFd;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::command::FRAME_HEAD_BYTES;

/// A token's burst of small uploads fits several times.
const BUFFER_BYTES: usize = 128 << 10;

/// A buffered reader of frames.
#[derive(Debug)]
pub struct Reader<S> {
    source: S,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    taken: u64,
}

impl<S: Read> Reader<S> {
    /// Reads from `source`.
    pub fn new(source: S) -> Self {
        Self { source, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), start: 0, end: 0, taken: 0 }
    }

    /// What it reads from.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Bytes handed out so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// The next frame's command and the length of its body, or `None` where the stream ends between frames.
    ///
    /// # Errors
    /// When the stream fails or ends within the head.
    pub fn frame(&mut self) -> Result<Option<(u8, u64)>> {
        if self.start == self.end {
            self.start = 0;
            self.end = read(&mut self.source, &mut self.buffer)?;
            if self.end == 0 {
                return Ok(None);
            }
        }
        let mut head = [0; FRAME_HEAD_BYTES];
        self.read_into(&mut head)?;
        let [command, length @ ..] = head;
        Ok(Some((command, u64::from_le_bytes(length))))
    }

    /// Fills `target`: what is buffered first, the rest straight from the source when it is large.
    ///
    /// # Errors
    /// When the stream fails or ends before.
    pub fn read_into(&mut self, target: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < target.len() {
            let rest = target.get_mut(filled..).unwrap_or_default();
            let ready = self.buffer.get(self.start..self.end).unwrap_or_default();
            if let Some(count) = Some(ready.len().min(rest.len())).filter(|count| *count > 0) {
                copy_front(rest, ready, count);
                self.start += count;
                filled += count;
            } else if rest.len() >= self.buffer.len() {
                filled += some(read(&mut self.source, rest)?)?;
            } else {
                self.start = 0;
                self.end = 0;
                self.end = some(read(&mut self.source, &mut self.buffer)?)?;
            }
        }
        self.taken += target.len() as u64;
        Ok(())
    }
}

fn copy_front(to: &mut [u8], from: &[u8], count: usize) {
    if let (Some(to), Some(from)) = (to.get_mut(..count), from.get(..count)) {
        to.copy_from_slice(from);
    }
}

fn some(count: usize) -> Result<usize> {
    if count == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(count) }
}

fn read(source: &mut impl Read, target: &mut [u8]) -> Result<usize> {
    loop {
        match source.read(target) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Sends one answer: its length and its bytes, in one write unless the socket takes less at a time.
///
/// # Errors
/// When the socket fails.
pub fn reply(socket: impl AsFd, body: &[u8]) -> Result<u64> {
    let length = (body.len() as u64).to_le_bytes();
    let total = length.len() + body.len();
    let mut sent = 0;
    while sent < total {
        let head = length.get(sent..).unwrap_or_default();
        let rest = body.get(sent.saturating_sub(length.len())..).unwrap_or_default();
        let slices = [IoSlice::new(head), IoSlice::new(rest)];
        let mut nothing_beside = SendAncillaryBuffer::default();
        match sendmsg(&socket, &slices, &mut nothing_beside, SendFlags::NOSIGNAL) {
            Ok(count) => sent += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(total as u64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;

    /// A source that gives its bytes in pieces of the given sizes.
    struct Pieces(Vec<u8>, Vec<usize>);

    impl Read for Pieces {
        fn read(&mut self, target: &mut [u8]) -> Result<usize> {
            let piece = self.1.pop().unwrap_or(usize::MAX).max(1);
            let count = piece.min(target.len()).min(self.0.len());
            target[..count].copy_from_slice(&self.0[..count]);
            self.0.drain(..count);
            Ok(count)
        }
    }

    proptest! {
        #[test]
        fn frames_come_out_whole_however_the_bytes_arrive(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 0..6),
            large in 0_usize..3,
            pieces in proptest::collection::vec(1_usize..200, 0..40),
        ) {
            let mut bodies = bodies;
            bodies.extend((0..large).map(|i| vec![7; BUFFER_BYTES + i]));
            let mut bytes = Vec::new();
            for body in &bodies {
                bytes.push(6);
                bytes.extend((body.len() as u64).to_le_bytes());
                bytes.extend(body);
            }
            let total = bytes.len() as u64;
            let mut reader = Reader::new(Pieces(bytes, pieces));
            for body in &bodies {
                let (command, length) = reader.frame().unwrap().unwrap();
                prop_assert_eq!((command, length), (6, body.len() as u64));
                let mut got = vec![0; body.len()];
                reader.read_into(&mut got).unwrap();
                prop_assert_eq!(&got, body);
            }
            prop_assert!(reader.frame().unwrap().is_none());
            prop_assert_eq!(reader.taken(), total);
        }
    }

    #[test]
    fn an_end_within_a_frame_is_an_error() {
        let mut reader = Reader::new(&[6_u8, 1, 0][..]);
        assert_eq!(reader.frame().unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut reader = Reader::new(&[6_u8, 9, 0, 0, 0, 0, 0, 0, 0, 1][..]);
        reader.frame().unwrap();
        assert!(reader.read_into(&mut [0; 9]).is_err());
    }

    #[test]
    fn an_answer_has_its_length_before_it() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let body = vec![5; 1 << 20];
        let writer = std::thread::spawn(move || reply(&near, &body).unwrap());
        let mut got = vec![0; 8 + (1 << 20)];
        far.read_exact(&mut got).unwrap();
        assert_eq!(writer.join().unwrap(), 8 + (1 << 20));
        assert_eq!(got[..8], (1_u64 << 20).to_le_bytes());
        assert!(got[8..].iter().all(|byte| *byte == 5));
    }
}
