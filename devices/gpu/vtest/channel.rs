// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client's socket: requests in, answers and descriptors out.
//!
//! The last word of a request that is answered stays in the socket until the answer is out, see [`super`].

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use crate::service::wardens::has_hung_up;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, send, sendmsg};

use super::request::{Command, HEADER_BYTES, Header, RequestError};

/// What stays unread.
const KEPT_BYTES: usize = 4;
/// Mesa's driver writes a request in one or two pieces, so that the rest is there already.
const PEEK_AGAIN: std::time::Duration = std::time::Duration::from_micros(200);

/// Why the socket is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Nothing comes from it.
    #[error("nothing can be read from the client")]
    Receive(#[source] std::io::Error),
    /// Nothing goes into it.
    #[error("the client cannot be answered")]
    Send(#[source] std::io::Error),
    /// What came is no request.
    #[error("the client sent what is no request of Mesa's Venus driver")]
    Request(#[from] RequestError),
}

/// A client's socket.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    bytes_in: u64,
    bytes_out: u64,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, bytes_in: 0, bytes_out: 0 }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(super) fn bytes_in(&self) -> u64 {
        self.bytes_in
    }

    pub(super) fn bytes_out(&self) -> u64 {
        self.bytes_out
    }

    /// The next request's header, which stays in the socket; `None` when the client has gone.
    pub(super) fn header(&self, limit_bytes: u64) -> Result<Option<Header>, ChannelError> {
        let mut bytes = [0; HEADER_BYTES];
        if !self.fill(&mut bytes, RecvFlags::PEEK)? {
            return Ok(None);
        }
        Ok(Some(Header::parse(bytes, limit_bytes)?))
    }

    /// The payload behind a header, all but the kept bytes taken out of the socket; `None` when the client has gone.
    pub(super) fn payload(&mut self, header: &Header) -> Result<Option<Vec<u8>>, ChannelError> {
        let all = HEADER_BYTES + header.payload_bytes;
        let taken = if header.command.is_answered() { all - KEPT_BYTES } else { all };
        let mut bytes = vec![0; all];
        let (first, last) = bytes.split_at_mut(taken);
        if !self.fill(first, RecvFlags::empty())? || !self.fill(last, RecvFlags::PEEK)? {
            return Ok(None);
        }
        self.bytes_in = self.bytes_in.saturating_add(all as u64);
        Ok(Some(bytes.split_off(HEADER_BYTES)))
    }

    /// Takes the kept bytes: the answer is out.
    pub(super) fn answered(&self, header: &Header) -> Result<(), ChannelError> {
        if header.command.is_answered() {
            self.fill(&mut [0; KEPT_BYTES], RecvFlags::empty())?;
        }
        Ok(())
    }

    /// An answer.
    pub(super) fn reply(&mut self, command: Command, words: &[u32]) -> Result<(), ChannelError> {
        let length = u32::try_from(words.len()).unwrap_or(u32::MAX);
        let words = [length, command as u32].into_iter().chain(words.iter().copied());
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let mut left = bytes.as_slice();
        while !left.is_empty() {
            match send(&self.socket, left, SendFlags::NOSIGNAL) {
                Ok(sent) => left = left.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(ChannelError::Send(errno.into())),
            }
        }
        self.bytes_out = self.bytes_out.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// A descriptor, with the one byte that carries it.
    pub(super) fn descriptor(&mut self, descriptor: &OwnedFd) -> Result<(), ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => {
                    self.bytes_out = self.bytes_out.saturating_add(1);
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(ChannelError::Send(errno.into())),
            }
        }
    }

    /// Fills `bytes`; false when the client has gone before.
    fn fill(&self, bytes: &mut [u8], how: RecvFlags) -> Result<bool, ChannelError> {
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match recv(&self.socket, &mut *rest, how | RecvFlags::WAITALL) {
                Ok((0, _)) => return Ok(false),
                // A peek does not wait for the rest, and begins at the front again.
                Ok((got, _)) if how.contains(RecvFlags::PEEK) && got < rest.len() => {
                    if has_hung_up(&self.socket) {
                        return Ok(false);
                    }
                    std::thread::sleep(PEEK_AGAIN);
                }
                Ok((got, _)) => filled += got,
                Err(Errno::INTR) => {}
                // A client that died with an answer unread.
                Err(Errno::CONNRESET) => return Ok(false),
                Err(errno) => return Err(ChannelError::Receive(errno.into())),
            }
        }
        Ok(true)
    }
}
