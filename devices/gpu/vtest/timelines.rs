// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client's timelines: their values, who waits for a point, and the points that rings have yet to reach. Pure.
//!
//! ```text
//! submission on a ring ──► pending(ring) ──ring has come so far──► value of its timelines ──► waits that this ends
//! ```
//! What a wait is handed out as (`W`) is the front's matter: it is given back when the wait has ended.

use std::collections::{BTreeMap, VecDeque};

use super::request::Point;

/// More than any program has; each is some bytes here.
const MAX_SYNCS: usize = 65_536;
/// Each is a descriptor here and in the client.
const MAX_WAITS: usize = 1024;
/// Points that rings have yet to reach.
const MAX_PENDING: usize = 1 << 20;

/// Why a client's timelines cannot do that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TimelineError {
    /// Too many timelines.
    #[error("the client has {MAX_SYNCS} timelines already")]
    Syncs,
    /// Too many waits.
    #[error("the client waits in {MAX_WAITS} places or for {MAX_PENDING} points already")]
    Waits,
    /// Too many points.
    #[error("the client has {MAX_PENDING} points that are not reached already")]
    Pending,
    /// No such timeline.
    #[error("the client has no timeline {sync}")]
    Unknown {
        /// Its number.
        sync: u32,
    },
}

/// The timelines of one client.
#[derive(Debug)]
pub struct Timelines<W> {
    next_sync: u32,
    values: BTreeMap<u32, u64>,
    waits: Vec<Wait<W>>,
    /// By ring: fences in their order, and the points that are reached with each.
    pending: BTreeMap<u32, VecDeque<(u64, Vec<Point>)>>,
    pending_points: usize,
}

#[derive(Debug)]
struct Wait<W> {
    handle: W,
    any: bool,
    left: Vec<Point>,
}

impl<W> Default for Timelines<W> {
    fn default() -> Self {
        Self {
            next_sync: 1,
            values: BTreeMap::new(),
            waits: Vec::new(),
            pending: BTreeMap::new(),
            pending_points: 0,
        }
    }
}

impl<W> Timelines<W> {
    /// A new timeline.
    ///
    /// # Errors
    /// When there are too many.
    pub fn create(&mut self, value: u64) -> Result<u32, TimelineError> {
        if self.values.len() >= MAX_SYNCS {
            return Err(TimelineError::Syncs);
        }
        // Numbers are not used again before all have been.
        while self.next_sync == 0 || self.values.contains_key(&self.next_sync) {
            self.next_sync = self.next_sync.wrapping_add(1);
        }
        let sync = self.next_sync;
        self.next_sync = self.next_sync.wrapping_add(1);
        self.values.insert(sync, value);
        Ok(sync)
    }

    /// Forgets a timeline. Waits for it that are under way stay.
    pub fn remove(&mut self, sync: u32) {
        self.values.remove(&sync);
    }

    /// Where a timeline is.
    ///
    /// # Errors
    /// When there is no such timeline.
    pub fn value(&self, sync: u32) -> Result<u64, TimelineError> {
        self.values.get(&sync).copied().ok_or(TimelineError::Unknown { sync })
    }

    /// Moves timelines; returns the waits that this ends.
    #[must_use]
    pub fn reach(&mut self, points: &[Point]) -> Vec<W> {
        if points.is_empty() {
            return Vec::new();
        }
        for point in points {
            if let Some(value) = self.values.get_mut(&point.sync) {
                *value = point.value;
            }
        }
        let is_reached =
            |left: &Point| points.iter().any(|point| point.sync == left.sync && point.value >= left.value);
        let mut ended = Vec::new();
        let mut still = Vec::new();
        for mut wait in self.waits.drain(..) {
            let before = wait.left.len();
            wait.left.retain(|left| !is_reached(left));
            if wait.left.is_empty() || (wait.any && wait.left.len() < before) {
                ended.push(wait.handle);
            } else {
                still.push(wait);
            }
        }
        self.waits = still;
        ended
    }

    /// Waits for points. When they are reached already, the handle comes back.
    ///
    /// # Errors
    /// When there are too many waits.
    pub fn wait(&mut self, any: bool, points: Vec<Point>, handle: W) -> Result<Option<W>, TimelineError> {
        let asked = points.len();
        let mut left = points;
        left.retain(|point| self.values.get(&point.sync).is_none_or(|value| *value < point.value));
        if left.is_empty() || (any && left.len() < asked) {
            return Ok(Some(handle));
        }
        let waiting_points: usize = self.waits.iter().map(|wait| wait.left.len()).sum();
        if self.waits.len() >= MAX_WAITS || waiting_points + left.len() > MAX_PENDING {
            return Err(TimelineError::Waits);
        }
        self.waits.push(Wait { handle, any, left });
        Ok(None)
    }

    /// Notes points that are reached when a ring has passed a fence. Fences of a ring come in ascending order.
    ///
    /// # Errors
    /// When there are too many points.
    pub fn await_ring(&mut self, ring: u32, fence: u64, points: Vec<Point>) -> Result<(), TimelineError> {
        let points_then = self.pending_points.saturating_add(points.len().max(1));
        if points_then > MAX_PENDING {
            return Err(TimelineError::Pending);
        }
        self.pending_points = points_then;
        self.pending.entry(ring).or_default().push_back((fence, points));
        Ok(())
    }

    /// A ring has passed a fence, and with it all earlier ones; returns the waits that this ends.
    #[must_use]
    pub fn ring_passed(&mut self, ring: u32, fence: u64) -> Vec<W> {
        let mut ended = Vec::new();
        while let Some((_, points)) = self
            .pending
            .get_mut(&ring)
            .and_then(|fences| fences.pop_front_if(|(pending, _)| *pending <= fence))
        {
            self.pending_points = self.pending_points.saturating_sub(points.len().max(1));
            ended.extend(self.reach(&points));
        }
        ended
    }

    /// How many waits are under way.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waits.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn point(sync: u32, value: u64) -> Point {
        Point { sync, value }
    }

    #[test]
    fn a_wait_for_all_ends_with_the_last_and_one_for_any_with_the_first() {
        let mut timelines = Timelines::default();
        let (a, b) = (timelines.create(0).unwrap(), timelines.create(5).unwrap());
        assert_eq!(timelines.wait(false, vec![point(b, 5)], "reached").unwrap(), Some("reached"));
        assert_eq!(timelines.wait(false, vec![point(a, 1), point(b, 6)], "all").unwrap(), None);
        assert_eq!(timelines.wait(true, vec![point(a, 1), point(b, 6)], "any").unwrap(), None);
        assert_eq!(
            timelines.wait(true, vec![point(a, 1), point(b, 5)], "any of it").unwrap(),
            Some("any of it")
        );
        assert_eq!(timelines.reach(&[point(b, 7)]), ["any"]);
        assert_eq!(timelines.value(b), Ok(7));
        assert_eq!(timelines.reach(&[point(a, 1)]), ["all"]);
        assert_eq!(timelines.waiting(), 0);
    }

    #[test]
    fn a_ring_reaches_points_in_its_own_order_and_leaves_other_rings_alone() {
        let mut timelines = Timelines::default();
        let a = timelines.create(0).unwrap();
        timelines.await_ring(0, 1, vec![point(a, 1)]).unwrap();
        timelines.await_ring(0, 2, vec![]).unwrap();
        timelines.await_ring(0, 4, vec![point(a, 2)]).unwrap();
        timelines.await_ring(1, 3, vec![point(a, 9)]).unwrap();
        assert_eq!(timelines.wait(false, vec![point(a, 1)], 1).unwrap(), None);
        assert_eq!(timelines.wait(false, vec![point(a, 2)], 2).unwrap(), None);
        assert_eq!(timelines.ring_passed(0, 3), [1]);
        assert_eq!(timelines.ring_passed(0, 4), [2]);
        assert_eq!(timelines.value(a), Ok(2));
    }

    #[test]
    fn nothing_grows_without_end_and_what_is_not_there_is_named() {
        let mut timelines = Timelines::default();
        for _ in 0..MAX_SYNCS {
            timelines.create(0).unwrap();
        }
        assert_eq!(timelines.create(0), Err(TimelineError::Syncs));
        timelines.remove(7);
        assert_eq!(timelines.value(7), Err(TimelineError::Unknown { sync: 7 }));
        assert!(timelines.create(0).is_ok());
        for handle in 0..MAX_WAITS {
            assert_eq!(timelines.wait(false, vec![point(1, 1)], handle).unwrap(), None);
        }
        assert_eq!(timelines.wait(false, vec![point(1, 1)], 0), Err(TimelineError::Waits));
        for fence in 0..MAX_PENDING as u64 {
            timelines.await_ring(0, fence, Vec::new()).unwrap();
        }
        assert_eq!(timelines.await_ring(0, u64::MAX, Vec::new()), Err(TimelineError::Pending));
        assert!(timelines.ring_passed(0, u64::MAX).is_empty());
        assert!(timelines.await_ring(0, 1, Vec::new()).is_ok());
    }

    proptest! {
        #[test]
        fn every_wait_for_all_ends_exactly_when_its_points_are_reached(
            waits in proptest::collection::vec((1u32..4, 1u64..6), 1..8),
            moves in proptest::collection::vec((1u32..4, 1u64..8), 0..12),
        ) {
            let mut timelines = Timelines::default();
            for _ in 0..3 {
                timelines.create(0).unwrap();
            }
            for (index, (sync, value)) in waits.iter().enumerate() {
                prop_assert_eq!(timelines.wait(false, vec![point(*sync, *value)], index).unwrap(), None);
            }
            let mut ended: Vec<usize> = Vec::new();
            for (sync, value) in &moves {
                ended.extend(timelines.reach(&[point(*sync, *value)]));
            }
            ended.sort_unstable();
            let expected: Vec<usize> = waits
                .iter()
                .enumerate()
                .filter(|(_, (sync, value))| moves.iter().any(|(s, v)| s == sync && v >= value))
                .map(|(index, _)| index)
                .collect();
            prop_assert_eq!(ended, expected);
        }
    }
}
