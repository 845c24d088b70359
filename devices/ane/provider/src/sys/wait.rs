// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waiting: on words that processes share, on descriptors, for a while; and what time it is.
#![allow(unsafe_code)]

use core::sync::atomic::AtomicU32;

use super::raw::{self, call};
use super::{Errno, checked, uninterrupted};

const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;
const CLOCK_MONOTONIC: usize = 1;
pub(crate) const READABLE: i16 = 1;
pub(crate) const WRITABLE: i16 = 4;

#[repr(C)]
struct Time {
    seconds: i64,
    nanoseconds: i64,
}

impl Time {
    fn from_ms(ms: u32) -> Self {
        Self { seconds: i64::from(ms / 1000), nanoseconds: i64::from(ms % 1000) * 1_000_000 }
    }
}

#[repr(C)]
struct Poll {
    descriptor: i32,
    wanted: i16,
    got: i16,
}

/// Waits until the word is woken, differs from `seen`, a signal came, or the time is up. The caller looks again.
pub(crate) fn futex_wait(word: &AtomicU32, seen: u32, at_most_ms: u32) {
    let time = Time::from_ms(at_most_ms);
    let seen = usize::try_from(seen).unwrap_or(usize::MAX);
    // SAFETY: a word and a time that live through the call.
    let _ = unsafe {
        call(
            raw::FUTEX,
            [
                word.as_ptr().expose_provenance(),
                FUTEX_WAIT,
                seen,
                (&raw const time).expose_provenance(),
                0,
                0,
            ],
        )
    };
}

/// Wakes one that waits on the word, in any process that maps it.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: a word that lives through the call.
    let _ = unsafe { call(raw::FUTEX, [word.as_ptr().expose_provenance(), FUTEX_WAKE, 1, 0, 0, 0]) };
}

/// Waits until the descriptor is ready for what is wanted.
pub(crate) fn poll(descriptor: i32, wanted: i16, at_most_ms: u32) -> Result<(), Errno> {
    let mut poll = Poll { descriptor, wanted, got: 0 };
    // What is left of it after an interruption, the kernel writes back.
    let mut time = Time::from_ms(at_most_ms);
    let arguments = [(&raw mut poll).expose_provenance(), 1, (&raw mut time).expose_provenance(), 0, 0, 0];
    // SAFETY: one entry and a time, which live through the call; no signal mask.
    match uninterrupted(|| unsafe { call(raw::PPOLL, arguments) })? {
        0 => Err(Errno::TIMED_OUT),
        _ => Ok(()),
    }
}

/// Sleeps.
pub(crate) fn sleep_ms(ms: u32) {
    futex_wait(&AtomicU32::new(0), 0, ms);
}

/// Lets another thread run.
pub(crate) fn give_way() {
    // SAFETY: takes nothing.
    let _ = unsafe { call(raw::SCHED_YIELD, [0; 6]) };
}

/// Milliseconds of a clock that only goes forward.
pub(crate) fn now_ms() -> u64 {
    let mut time = Time { seconds: 0, nanoseconds: 0 };
    // SAFETY: a time to fill in, which lives through the call.
    let result = checked(unsafe {
        call(raw::CLOCK_GETTIME, [CLOCK_MONOTONIC, (&raw mut time).expose_provenance(), 0, 0, 0, 0])
    });
    let ms = time.seconds.saturating_mul(1000).saturating_add(time.nanoseconds / 1_000_000);
    result.ok().and_then(|_| u64::try_from(ms).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_has_changed_is_not_waited_for() {
        let before = now_ms();
        futex_wait(&AtomicU32::new(1), 0, 60_000);
        sleep_ms(2);
        let took = now_ms() - before;
        assert!((1..60_000).contains(&took), "{took}");
    }
}
