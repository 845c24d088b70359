// SPDX-License-Identifier: MIT OR Apache-2.0
//! When a container whose workers crash is refused for a while. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The crashes of one container's workers.
#[derive(Debug)]
pub(crate) struct Crashes {
    limit: usize,
    window: Duration,
    pause: Duration,
    when: VecDeque<Instant>,
    refused_until: Option<Instant>,
}

impl Crashes {
    /// `limit` crashes within `window` make a pause.
    pub(crate) fn new(limit: u32, window: Duration, pause: Duration) -> Self {
        Self {
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            window,
            pause,
            when: VecDeque::new(),
            refused_until: None,
        }
    }

    /// One more; true when the container is refused from here on for the pause.
    pub(crate) fn add(&mut self, now: Instant) -> bool {
        while self.when.front().is_some_and(|when| now.duration_since(*when) > self.window) {
            self.when.pop_front();
        }
        self.when.push_back(now);
        if self.when.len() < self.limit {
            return false;
        }
        // After the pause counting begins anew.
        self.when.clear();
        self.refused_until = Some(now + self.pause);
        true
    }

    /// How long the container is still refused.
    pub(crate) fn refused_for(&self, now: Instant) -> Option<Duration> {
        self.refused_until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_of_crashes_is_refused_and_single_ones_are_not() {
        let mut crashes = Crashes::new(3, Duration::from_secs(60), Duration::from_secs(30));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!crashes.add(at(0)));
        assert!(!crashes.add(at(50)));
        assert!(!crashes.add(at(100)), "the first is out of the window");
        assert_eq!(crashes.refused_for(at(100)), None);
        assert!(crashes.add(at(101)));
        assert_eq!(crashes.refused_for(at(111)), Some(Duration::from_secs(20)));
        assert_eq!(crashes.refused_for(at(131)), None);
        assert!(!crashes.add(at(131)));
    }
}
