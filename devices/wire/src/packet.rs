// SPDX-License-Identifier: MIT OR Apache-2.0
//! One JSON message a packet over `SOCK_SEQPACKET`, with descriptors beside it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest message; a report about a thousand containers fits.
pub const MAX_PACKET_BYTES: usize = 1 << 20;
/// Most descriptors beside one message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Why a packet could not be sent or taken.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// The message is larger than a packet may be.
    #[error("message of {bytes} bytes is over the limit of {MAX_PACKET_BYTES}")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// More descriptors than a packet may carry.
    #[error("{count} descriptors are over the limit of {MAX_DESCRIPTORS}")]
    TooManyDescriptors {
        /// How many.
        count: usize,
    },
    /// The packet or its descriptors were cut: too many of them, or the receiver may open no more descriptors.
    #[error(
        "packet was cut short: larger than {max_bytes} bytes or {MAX_DESCRIPTORS} descriptors, or this process has \
         no descriptors left"
    )]
    Truncated {
        /// Most bytes that this receiver takes.
        max_bytes: usize,
    },
    /// Not a message of ours.
    #[error("packet of {bytes} bytes is no valid message")]
    Malformed {
        /// Size of the packet.
        bytes: usize,
        /// What the parser said.
        #[source]
        source: serde_json::Error,
    },
    /// The socket failed.
    #[error("socket failed")]
    Socket(#[source] std::io::Error),
}

impl From<rustix::io::Errno> for PacketError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Socket(errno.into())
    }
}

/// Sends one message and its descriptors in one packet.
///
/// # Errors
/// When the message or its descriptors are over the caps, or the socket fails.
pub fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), PacketError> {
    let bytes = serde_json::to_vec(message).map_err(|source| PacketError::Malformed { bytes: 0, source })?;
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(PacketError::TooLarge { bytes: bytes.len() });
    }
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(PacketError::TooManyDescriptors { count: descriptors.len() });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Takes one packet: the message and its descriptors (close-on-exec), or `None` at the end of the stream.
///
/// # Errors
/// When the packet was cut, is no message of type `T`, or the socket fails. Descriptors of a packet that is
/// refused are closed.
pub fn recv<T: DeserializeOwned>(socket: impl AsFd) -> Result<Option<(T, Vec<OwnedFd>)>, PacketError> {
    recv_up_to(socket, MAX_PACKET_BYTES)
}

/// [`recv`] with a smaller cap, for senders that are trusted with less memory.
///
/// # Errors
/// As [`recv`].
pub fn recv_up_to<T: DeserializeOwned>(
    socket: impl AsFd,
    max_bytes: usize,
) -> Result<Option<(T, Vec<OwnedFd>)>, PacketError> {
    let mut bytes = vec![0; max_bytes];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        })
        .flatten()
        .collect();
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(PacketError::Truncated { max_bytes });
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    let body = bytes.get(..got.bytes).unwrap_or_default();
    let message =
        serde_json::from_slice(body).map_err(|source| PacketError::Malformed { bytes: got.bytes, source })?;
    Ok(Some((message, descriptors)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::{GrantId, ToService};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_message_arrives_with_its_descriptor() {
        let (a, b) = pair();
        let (mut near, far) = UnixStream::pair().unwrap();
        let message = ToService::Revoke { grant: GrantId("g1".into()) };
        send(&a, &message, &[far.as_fd()]).unwrap();
        drop(far);
        let (got, mut descriptors) = recv::<ToService>(&b).unwrap().unwrap();
        assert_eq!(got, message);
        let mut far = UnixStream::from(descriptors.pop().unwrap());
        far.write_all(b"x").unwrap();
        let mut byte = [0];
        near.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn a_packet_over_the_receivers_own_cap_is_refused() {
        let (a, b) = pair();
        send(&a, &"12345678", &[]).unwrap();
        send(&a, &"12345678", &[]).unwrap();
        assert!(matches!(recv_up_to::<String>(&b, 9), Err(PacketError::Truncated { max_bytes: 9 })));
        assert_eq!(recv_up_to::<String>(&b, 10).unwrap().unwrap().0, "12345678");
    }

    #[test]
    fn the_end_of_the_stream_is_none_and_rubbish_is_refused() {
        let (a, b) = pair();
        rustix::io::write(&a, b"{\"revoke\":1}").unwrap();
        assert!(matches!(recv::<ToService>(&b), Err(PacketError::Malformed { bytes: 12, .. })));
        drop(a);
        assert!(recv::<ToService>(&b).unwrap().is_none());
    }
}
