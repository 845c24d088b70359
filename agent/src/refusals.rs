// SPDX-License-Identifier: MIT OR Apache-2.0
//! One log line a refusal, limited per network namespace and in all, so that nobody who keeps trying can fill the log: a
//! unix endpoint is in reach of every user, and a user can make namespaces.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use lighter_wire::Kind;

use crate::lock;
use crate::ns::NsId;

const WINDOW: Duration = Duration::from_secs(10);
const LINES_PER_WINDOW: u32 = 5;
const LINES_IN_ALL: u32 = 100;
/// Beyond this many namespaces the oldest windows are forgotten.
const MAX_NAMESPACES: usize = 1024;

/// Counts lines per namespace of the peer; `None` stands for all peers whose namespace could not be told.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: Option<Window>,
    each: HashMap<Option<NsId>, Window>,
}

#[derive(Debug)]
struct Window {
    since: Instant,
    lines: u32,
    dropped: u64,
}

impl Window {
    const fn new(since: Instant) -> Self {
        Self { since, lines: 0, dropped: 0 }
    }

    /// Whether there is room for another line.
    fn has_room(&mut self, at: Instant, max_lines: u32) -> bool {
        if at.saturating_duration_since(self.since) >= WINDOW {
            self.since = at;
            self.lines = 0;
        }
        self.lines < max_lines
    }
}

impl Refusals {
    /// Logs a refusal, or counts it for the next line.
    pub(crate) fn log(&self, netns: Option<NsId>, kind: Kind, word: &str, cause: &dyn std::fmt::Display) {
        if let Some(unlogged) = self.line(netns, Instant::now()) {
            let netns = netns.map_or_else(|| "unknown".to_owned(), |netns| netns.to_string());
            tracing::warn!(device = %kind, netns, reason = word, %cause, unlogged, "stream refused");
        }
    }

    /// Whether there may be a line; with it, how many were left out before.
    fn line(&self, netns: Option<NsId>, at: Instant) -> Option<u64> {
        let mut counts = lock(&self.0);
        let Counts { all, each } = &mut *counts;
        if each.len() >= MAX_NAMESPACES && !each.contains_key(&netns) {
            each.retain(|_, window| at.saturating_duration_since(window.since) < WINDOW);
            if each.len() >= MAX_NAMESPACES {
                return None;
            }
        }
        let window = each.entry(netns).or_insert(Window::new(at));
        let all = all.get_or_insert(Window::new(at));
        if !window.has_room(at, LINES_PER_WINDOW) || !all.has_room(at, LINES_IN_ALL) {
            window.dropped += 1;
            return None;
        }
        window.lines += 1;
        all.lines += 1;
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
        let lines = (0..100).filter(|_| refusals.line(Some(NsId::fake(1)), at).is_some()).count();
        assert_eq!(lines, 5);
        assert_eq!(refusals.line(Some(NsId::fake(2)), at), Some(0));
        assert_eq!(refusals.line(Some(NsId::fake(1)), at + WINDOW), Some(95));
    }

    #[test]
    fn many_namespaces_do_not_grow_it_without_end() {
        let refusals = Refusals::default();
        let at = Instant::now();
        for number in 0..5000 {
            refusals.line(Some(NsId::fake(number)), at);
        }
        assert!(lock(&refusals.0).each.len() <= MAX_NAMESPACES);
        assert_eq!(refusals.line(Some(NsId::fake(9999)), at + WINDOW), Some(0));
    }

    #[test]
    fn who_has_many_namespaces_gets_no_more_lines_for_it() {
        let refusals = Refusals::default();
        let at = Instant::now();
        let lines = (0..1000).filter(|number| refusals.line(Some(NsId::fake(*number)), at).is_some()).count();
        assert_eq!(lines, 100);
        assert_eq!(refusals.line(None, at), None);
        assert_eq!(refusals.line(None, at + WINDOW), Some(1));
    }
}
