// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames on a container's socket: what was read of it before this worker got it comes first.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use lighter_frames::{FrameError, HEADER_BYTES, Header, Message};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};

/// Most pieces of one answer that are given to the kernel at once.
const MAX_PIECES: usize = 64;

/// Why a stream cannot go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    /// It broke, or ended within a message.
    #[error("connection broke")]
    Broken(#[source] io::Error),
    /// A frame that is none.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// A frame as it came.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) message: Message,
    /// Header and body.
    pub(super) bytes: Vec<u8>,
    /// The descriptor that travelled beside it.
    pub(super) file: Option<File>,
}

/// The socket of a stream.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) socket: Arc<OwnedFd>,
    pending: Vec<u8>,
    taken: usize,
}

impl Socket {
    pub(super) const fn new(socket: Arc<OwnedFd>, pending: Vec<u8>) -> Self {
        Self { socket, pending, taken: 0 }
    }

    /// What is left of the bytes that came before the socket's own.
    pub(super) fn left(&self) -> &[u8] {
        self.pending.get(self.taken..).unwrap_or_default()
    }

    /// Reads some bytes; 0 at the end. A descriptor beside them goes to `file` where one is expected, else away.
    fn read_some(&mut self, to: &mut [u8], file: Option<&mut Option<File>>) -> io::Result<usize> {
        let left = self.left();
        if !left.is_empty() {
            let count = left.len().min(to.len());
            for (to, from) in to.iter_mut().zip(left) {
                *to = *from;
            }
            self.taken += count;
            return Ok(count);
        }
        let Some(file) = file else {
            let got = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&self.socket, &mut *to, RecvFlags::empty()).map(|(_, count)| count)
            });
            return Ok(got?);
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::io::retry_on_intr(|| {
            let pieces = &mut [IoSliceMut::new(&mut *to)];
            recvmsg(&self.socket, pieces, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        })?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                rights.for_each(|right| *file = Some(right.into()));
            }
        }
        Ok(got.bytes)
    }

    /// Fills `to`; false when the stream ended before the first byte.
    fn fill(&mut self, to: &mut [u8], mut file: Option<&mut Option<File>>) -> Result<bool, SocketError> {
        let mut have = 0;
        while let Some(rest) = to.get_mut(have..).filter(|rest| !rest.is_empty()) {
            match self.read_some(rest, file.as_deref_mut()) {
                Ok(0) if have == 0 => return Ok(false),
                Ok(0) => return Err(SocketError::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => have += count,
                Err(error) if have == 0 && error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(false);
                }
                Err(error) => return Err(SocketError::Broken(error)),
            }
        }
        Ok(true)
    }

    /// The next frame; `None` at the end of the stream.
    ///
    /// # Errors
    /// When it is none, or the stream breaks within it.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, SocketError> {
        let mut file = None;
        let mut head = [0; HEADER_BYTES];
        if !self.fill(&mut head, Some(&mut file))? {
            return Ok(None);
        }
        let header = Header::decode(&head)?;
        let mut body = vec![0; usize::try_from(header.body_bytes).unwrap_or(0)];
        if !body.is_empty() && !self.fill(&mut body, None)? {
            return Err(SocketError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
        let message = Message::decode(header, &body)?;
        Ok(Some(Frame { message, bytes: [head.as_slice(), &body].concat(), file }))
    }

    /// Data behind a frame.
    ///
    /// # Errors
    /// When the stream ends before they are complete.
    pub(super) fn data(&mut self, to: &mut [u8]) -> Result<(), SocketError> {
        if to.is_empty() || self.fill(to, None)? {
            return Ok(());
        }
        Err(SocketError::Broken(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Sends pieces one after another, in as few calls as it takes.
    ///
    /// # Errors
    /// When the client is gone.
    pub(super) fn send(&self, pieces: &[&[u8]]) -> Result<(), SocketError> {
        for pieces in pieces.chunks(MAX_PIECES) {
            let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
            let mut left = slices.as_mut_slice();
            IoSlice::advance_slices(&mut left, 0);
            while !left.is_empty() {
                let sent = rustix::io::retry_on_intr(|| {
                    sendmsg(&self.socket, left, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
                });
                let sent = sent.map_err(|errno| SocketError::Broken(errno.into()))?;
                IoSlice::advance_slices(&mut left, sent);
            }
        }
        Ok(())
    }

    /// Sends a small frame if there is room for it: nobody waits for a client that does not read.
    pub(super) fn ring(&self, frame: &[u8]) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.socket, frame, flags) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(errno) => tracing::debug!(%errno, "client could not be woken"),
        }
    }
}
