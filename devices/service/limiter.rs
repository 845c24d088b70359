// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bounds what one container can write into the log.

use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(10);
const LINES: u32 = 40;

/// Lets a number of lines through in a window of time, and counts the rest.
#[derive(Debug)]
pub(crate) struct Limiter {
    since: Instant,
    passed: u32,
    dropped: u64,
}

/// What to do with a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Write it; before it, that this many were left out.
    Write {
        /// How many.
        left_out: u64,
    },
    /// Leave it out.
    Drop,
}

impl Limiter {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, passed: 0, dropped: 0 }
    }

    /// Judges one line.
    pub(crate) fn check(&mut self, now: Instant) -> Verdict {
        let mut left_out = 0;
        if now.duration_since(self.since) >= WINDOW {
            left_out = self.dropped;
            *self = Self::new(now);
        }
        if self.passed < LINES {
            self.passed += 1;
            Verdict::Write { left_out }
        } else {
            self.dropped += 1;
            Verdict::Drop
        }
    }

    /// Writes a warning about a container, if it may.
    pub(crate) fn warn(&mut self, container: &str, text: &str) {
        match self.check(Instant::now()) {
            Verdict::Write { left_out: 0 } => tracing::warn!(container, "{text}"),
            Verdict::Write { left_out } => tracing::warn!(container, left_out, "{text}"),
            Verdict::Drop => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_its_size_said_in_the_next_window() {
        let start = Instant::now();
        let mut limiter = Limiter::new(start);
        let written = (0..1000).filter(|_| limiter.check(start) != Verdict::Drop).count();
        assert_eq!(written, LINES as usize);
        assert_eq!(limiter.check(start + WINDOW), Verdict::Write { left_out: 1000 - u64::from(LINES) });
        assert_eq!(limiter.check(start + WINDOW), Verdict::Write { left_out: 0 });
    }
}
