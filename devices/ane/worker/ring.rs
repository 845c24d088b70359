// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host's side of a ring: waits for a request, copies the head out, puts the answer in.
//!
//! ```text
//!   look at REQUEST ── differs ──► serve ──► store ANSWER, wake the container ──► look
//!        │ same
//!        ├──► WAITING on the futex for a little
//!        └──► ASLEEP on the stream, where a Bell, a new ring or the end comes
//! ```

use std::fs::File;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use lighter_frames::{FrameError, HEADER_BYTES, Header, Message, ring};
use rustix::thread::futex;
use rustix::time::Timespec;

use super::memory::{MemoryError, Shared};

/// How long the host waits on the futex before it sleeps on the stream. Below a tick of the kernel's clock each wait
/// would set the processor's own timer, which costs more than the wait; longer delays the end of a stream whose client
/// is gone.
const WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Why a ring cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum RingError {
    /// Its memory.
    #[error("the ring cannot be used")]
    Memory(#[from] MemoryError),
    /// No ring's length.
    #[error("a ring of {bytes} bytes is refused, the limit is {limit}")]
    Size {
        /// Its length.
        bytes: u64,
        /// The most.
        limit: u64,
    },
    /// Its head.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// A ring.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) memory: Shared,
    /// Number of the last request that was answered.
    served: u32,
    /// Number of the one that is being served.
    current: u32,
}

impl Ring {
    /// Takes a ring over as it is.
    ///
    /// # Errors
    /// When it is not sealed, has another size, or is larger than `limit`.
    pub(super) fn new(file: File, bytes: u64, limit: u64) -> Result<Self, RingError> {
        if !ring::is_size(bytes) || bytes > limit {
            return Err(RingError::Size { bytes, limit });
        }
        let mut made = Self { memory: Shared::new(file, bytes)?, served: 0, current: 0 };
        made.served = made.word(ring::ANSWER).load(SeqCst);
        made.current = made.served;
        Ok(made)
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // Every ring is longer than its words, and they are aligned; another word would only be a wrong answer.
        static NOWHERE: AtomicU32 = AtomicU32::new(0);
        self.memory.word(offset).unwrap_or(&NOWHERE)
    }

    fn is_due(&self) -> bool {
        self.word(ring::REQUEST).load(SeqCst) != self.served
    }

    /// Waits for a request for a little; true when there is one. When there is none the container knows that it must
    /// ring.
    pub(super) fn wait(&self) -> bool {
        if self.is_due() {
            return true;
        }
        self.word(ring::HOST_STATE).store(ring::WAITING, SeqCst);
        if !self.is_due() {
            // Woken, interrupted or out of time: what counts is the word.
            let _ = futex::wait(self.word(ring::REQUEST), futex::Flags::empty(), self.served, Some(&WAIT));
        }
        if self.is_due() {
            self.word(ring::HOST_STATE).store(ring::AWAKE, SeqCst);
            return true;
        }
        self.sleep()
    }

    /// Says that the host sleeps on the stream from here on; true when a request came just before.
    pub(super) fn sleep(&self) -> bool {
        self.word(ring::HOST_STATE).store(ring::ASLEEP, SeqCst);
        if self.is_due() {
            self.word(ring::HOST_STATE).store(ring::AWAKE, SeqCst);
            return true;
        }
        false
    }

    /// Says that the host looks again.
    pub(super) fn wake_up(&self) {
        self.word(ring::HOST_STATE).store(ring::AWAKE, SeqCst);
    }

    /// Leaves the ring to another process of the host.
    pub(super) fn leave(&self) {
        self.word(ring::HOST_STATE).store(ring::ASLEEP, SeqCst);
    }

    /// Takes the request up: copies the head out and reads it.
    ///
    /// # Errors
    /// When it is no frame.
    pub(super) fn head(&mut self) -> Result<Message, RingError> {
        self.current = self.word(ring::REQUEST).load(SeqCst);
        let mut header = [0; HEADER_BYTES];
        let within = self.memory.read(ring::HEAD, &mut header);
        debug_assert!(within, "every ring has a head");
        let header = Header::decode(&header)?;
        let mut body = vec![0; usize::try_from(header.body_bytes).unwrap_or(0)];
        let within = self.memory.read(ring::HEAD + HEADER_BYTES, &mut body);
        debug_assert!(within, "a body fits the head area");
        Ok(Message::decode(header, &body)?)
    }

    /// Length of the data area.
    pub(super) fn data_bytes(&self) -> u64 {
        ring::data_bytes(u64::try_from(self.memory.length()).unwrap_or(0))
    }

    /// Puts the answer's head in and hands it over. Says whether the container must be rung for.
    pub(super) fn answer(&mut self, frame: &[u8]) -> bool {
        let within = self.memory.write(ring::HEAD, frame);
        debug_assert!(within, "a frame fits the head area");
        self.served = self.current;
        let answer = self.word(ring::ANSWER);
        answer.store(self.current, SeqCst);
        match self.word(ring::CONTAINER_STATE).load(SeqCst) {
            ring::WAITING => {
                let _ = futex::wake(answer, futex::Flags::empty(), 1);
                false
            }
            ring::ASLEEP => true,
            _ => false,
        }
    }

    /// Takes the place of a ring that was too small for the answer which is still owed: as if the same request had
    /// just been made here.
    pub(super) fn take_over(&mut self, old: &Self) {
        let before = old.served.wrapping_sub(1);
        // A container that has counted up by itself is left as it is.
        let _ = self.word(ring::REQUEST).compare_exchange(before, old.served, SeqCst, SeqCst);
        (self.served, self.current) = (before, old.served);
    }
}
