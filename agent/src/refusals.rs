// SPDX-License-Identifier: MIT OR Apache-2.0
//! One log line a refusal, limited per network namespace, so that a container that keeps trying cannot fill the log.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use lighter_wire::Kind;

use crate::lock;
use crate::ns::NsId;

const WINDOW: Duration = Duration::from_secs(10);
const LINES_PER_WINDOW: u32 = 5;
/// Beyond this many namespaces the oldest windows are forgotten.
const MAX_NAMESPACES: usize = 1024;

/// Counts lines per namespace.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<HashMap<NsId, Window>>);

#[derive(Debug)]
struct Window {
    since: Instant,
    lines: u32,
    dropped: u64,
}

impl Refusals {
    /// Logs a refusal, or counts it for the next line.
    pub(crate) fn log(&self, space: NsId, kind: Kind, word: &str, cause: &dyn std::fmt::Display) {
        if let Some(unlogged) = self.line(space, Instant::now()) {
            tracing::warn!(device = %kind, netns = %space, reason = word, %cause, unlogged, "stream refused");
        }
    }

    /// Whether there may be a line; with it, how many were left out before.
    fn line(&self, space: NsId, at: Instant) -> Option<u64> {
        let mut windows = lock(&self.0);
        if windows.len() >= MAX_NAMESPACES && !windows.contains_key(&space) {
            windows.retain(|_, window| at.saturating_duration_since(window.since) < WINDOW);
            if windows.len() >= MAX_NAMESPACES {
                return None;
            }
        }
        let window = windows.entry(space).or_insert(Window { since: at, lines: 0, dropped: 0 });
        if at.saturating_duration_since(window.since) >= WINDOW {
            window.since = at;
            window.lines = 0;
        }
        if window.lines >= LINES_PER_WINDOW {
            window.dropped += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.dropped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_that_keeps_trying_gets_few_lines_and_another_its_own() {
        let refusals = Refusals::default();
        let at = Instant::now();
        let lines = (0..100).filter(|_| refusals.line(NsId::fake(1), at).is_some()).count();
        assert_eq!(lines, 5);
        assert_eq!(refusals.line(NsId::fake(2), at), Some(0));
        assert_eq!(refusals.line(NsId::fake(1), at + WINDOW), Some(95));
    }

    #[test]
    fn many_namespaces_do_not_grow_it_without_end() {
        let refusals = Refusals::default();
        let at = Instant::now();
        for number in 0..5000 {
            refusals.line(NsId::fake(number), at);
        }
        assert!(lock(&refusals.0).len() <= MAX_NAMESPACES);
        assert_eq!(refusals.line(NsId::fake(9999), at + WINDOW), Some(0));
    }
}
