// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tells a client why it is not served, in the form of the stream's first answer, which a worker would have given.

use std::os::fd::OwnedFd;

use rustix::net::{SendFlags, send};

const MAGIC: &[u8] = b"LMPS";
const VERSION: u16 = 1;
const REFUSED: u16 = 1;
/// The codec's tags of a text and a dictionary.
const TAG_STR: u8 = 6;
const TAG_DICT: u8 = 9;
/// Most bytes of a reason.
const MAX_REASON_BYTES: usize = 1024;

/// Sends the reason; whether the client reads it is its own matter. It is gone as soon as the socket is dropped.
pub(super) fn refuse(socket: &OwnedFd, reason: &str) {
    let _ = send(socket, &answer(reason), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// `{"reason": …}` behind the head of an answer to a greeting.
fn answer(reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let reason = reason.get(..end).unwrap_or_default();
    let mut body = vec![TAG_DICT];
    body.extend(1u32.to_le_bytes());
    text(&mut body, "reason");
    body.push(TAG_STR);
    text(&mut body, reason);
    let mut message = MAGIC.to_vec();
    message.extend(VERSION.to_le_bytes());
    message.extend(REFUSED.to_le_bytes());
    message.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    message.extend(body);
    message
}

fn text(body: &mut Vec<u8>, text: &str) {
    body.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    body.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_as_the_client_reads_it() {
        let expected = b"LMPS\x01\0\x01\0\x16\0\0\0\x09\x01\0\0\0\x06\0\0\0reason\x06\x02\0\0\0no";
        assert_eq!(answer("no"), expected);
        let long = answer(&"é".repeat(MAX_REASON_BYTES));
        assert_eq!(long.len(), 12 + 20 + MAX_REASON_BYTES);
    }
}
