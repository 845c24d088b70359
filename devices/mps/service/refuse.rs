// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tells a client why it is not served, in the form of the stream's first answer, which a worker would have given.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::service::wardens::is_readable;

const MAGIC: &[u8] = b"LMPS";
const VERSION: u16 = 1;
const REFUSED: u16 = 1;
/// The codec's tags of a text and a dictionary.
const TAG_STR: u8 = 6;
const TAG_DICT: u8 = 9;
/// Most bytes of a reason.
const MAX_REASON_BYTES: usize = 1024;
/// How long a client may take to greet.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Most clients of one container whose greetings are waited for.
const MAX_WAITING: usize = 64;

/// Refused clients that have not greeted yet. Closed before its greeting, a client would find a broken connection where
/// it is to read the reason.
#[derive(Debug, Default)]
pub(super) struct Refused(VecDeque<(OwnedFd, Instant)>);

impl Refused {
    /// Sends the reason; whether the client reads it is its own matter.
    pub(super) fn add(&mut self, socket: OwnedFd, reason: &str) {
        let _ = send(&socket, &answer(reason), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        if self.0.len() == MAX_WAITING {
            self.0.pop_front();
        }
        self.0.push_back((socket, Instant::now() + GREETING_LIMIT));
    }

    /// What is to be watched.
    pub(super) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN))
    }

    /// When the first of them has had its time.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.front().map(|(_, deadline)| *deadline)
    }

    /// Lets go of those who have greeted or had their time.
    pub(super) fn look_after(&mut self) {
        let now = Instant::now();
        self.0.retain(|(socket, deadline)| {
            let has_greeted = is_readable(socket);
            if has_greeted {
                // What is left unread breaks the connection at its end.
                let _ = recv(socket, &mut [0; 4096], RecvFlags::DONTWAIT);
            }
            !has_greeted && *deadline > now
        });
    }
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
