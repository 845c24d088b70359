// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames over a container's socket while a stream is set up: one at a time, never more than the frame, within a
//! time limit.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use lighter_frames::{FrameError, HEADER_BYTES, Header, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags,
    recvmsg, sendmsg,
};

/// Descriptors for which there is room: more than one is refused, and closed.
const ROOM: usize = 4;

/// Why there is no frame.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameIoError {
    /// The container has closed the stream.
    #[error("the container closed the stream")]
    Ended,
    /// Nothing came for too long.
    #[error("the container sent nothing for {} s", limit.as_secs_f32())]
    Late {
        /// The limit.
        limit: Duration,
    },
    /// What came is no frame.
    #[error("what the container sent is no message: {0}")]
    Frame(FrameError),
    /// Descriptors that do not belong there.
    #[error("the container sent {count} descriptors beside a message that has {expected}")]
    Descriptors {
        /// How many came.
        count: usize,
        /// How many belong there.
        expected: usize,
    },
    /// The socket failed.
    #[error("the stream failed")]
    Socket(#[source] io::Error),
}

impl From<rustix::io::Errno> for FrameIoError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Socket(errno.into())
    }
}

/// One side of a stream that is being set up.
#[derive(Debug)]
pub(super) struct Frames<'a> {
    socket: &'a OwnedFd,
    limit: Duration,
}

impl<'a> Frames<'a> {
    pub(super) fn new(socket: &'a OwnedFd, limit: Duration) -> Self {
        Self { socket, limit }
    }

    /// The next message, and the descriptor beside it.
    pub(super) fn receive(&self) -> Result<(Message, Option<OwnedFd>), FrameIoError> {
        let deadline = Instant::now() + self.limit;
        let mut descriptors = Vec::new();
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, &mut descriptors, deadline)?;
        let header = Header::decode(&header).map_err(FrameIoError::Frame)?;
        // The decoder has bounded it.
        let mut body = vec![0; usize::try_from(header.body_bytes).unwrap_or(0)];
        self.fill(&mut body, &mut descriptors, deadline)?;
        if descriptors.len() > 1 {
            return Err(FrameIoError::Descriptors { count: descriptors.len(), expected: 1 });
        }
        let message = Message::decode(header, &body).map_err(FrameIoError::Frame)?;
        Ok((message, descriptors.pop()))
    }

    /// A message that has no descriptor.
    pub(super) fn receive_plain(&self) -> Result<Message, FrameIoError> {
        match self.receive()? {
            (message, None) => Ok(message),
            (_, Some(_)) => Err(FrameIoError::Descriptors { count: 1, expected: 0 }),
        }
    }

    /// Sends a message.
    pub(super) fn send(&self, message: &Message) -> Result<(), FrameIoError> {
        let bytes = message.encode().map_err(FrameIoError::Frame)?;
        let deadline = Instant::now() + self.limit;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match send_some(self.socket, rest) {
                Ok(put) => rest = rest.get(put..).unwrap_or_default(),
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn fill(
        &self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(), FrameIoError> {
        let mut done = 0;
        while done < into.len() {
            let space = into.get_mut(done..).unwrap_or_default();
            match take_some(self.socket, space, descriptors) {
                Ok(0) => return Err(FrameIoError::Ended),
                Ok(got) => done += got,
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(rustix::io::Errno::CONNRESET) => return Err(FrameIoError::Ended),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn wait(&self, what: PollFlags, deadline: Instant) -> Result<(), FrameIoError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(self.socket, what)], Some(&timeout)) {
            Ok(0) => Err(FrameIoError::Late { limit: self.limit }),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Bytes that follow a frame: each piece within the time limit.
impl Read for Frames<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let deadline = Instant::now() + self.limit;
        loop {
            let mut descriptors = Vec::new();
            match take_some(self.socket, into, &mut descriptors) {
                Ok(_) if !descriptors.is_empty() => {
                    return Err(io::Error::other(FrameIoError::Descriptors { count: 1, expected: 0 }));
                }
                Ok(got) => return Ok(got),
                Err(rustix::io::Errno::AGAIN) => {
                    self.wait(PollFlags::IN, deadline).map_err(io::Error::other)?;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn take_some(
    socket: &OwnedFd,
    into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<usize, rustix::io::Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got =
        rustix::io::retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(into)], &mut ancillary, flags))?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // More than there was room for.
        return Err(rustix::io::Errno::TOOMANYREFS);
    }
    Ok(got.bytes)
}

fn send_some(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, rustix::io::Errno> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| {
        sendmsg(socket, &[IoSlice::new(bytes)], &mut SendAncillaryBuffer::default(), flags)
    })
}
