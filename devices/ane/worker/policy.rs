// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which shapes of a model this worker serves, and of which it owes the service a sample. Pure.

use std::collections::HashSet;

use crate::ane::control::Shapes;

/// What the service has said about one model.
#[derive(Debug, Default)]
pub(super) struct Policy {
    all: bool,
    approved: HashSet<Shapes>,
    recalled: HashSet<Shapes>,
    samples: HashSet<Shapes>,
}

impl Policy {
    pub(super) fn approve_all(&mut self) {
        self.all = true;
    }

    pub(super) fn approve(&mut self, shapes: Shapes) {
        self.recalled.remove(&shapes);
        self.approved.insert(shapes);
    }

    pub(super) fn recall(&mut self, shapes: Shapes) {
        self.approved.remove(&shapes);
        self.recalled.insert(shapes);
    }

    /// Forgets an approval whose session is gone; true when there was one.
    pub(super) fn evict(&mut self, shapes: &Shapes) -> bool {
        self.approved.remove(shapes)
    }

    pub(super) fn serves(&self, shapes: &Shapes) -> bool {
        (self.all || self.approved.contains(shapes)) && !self.recalled.contains(shapes)
    }

    pub(super) fn want_sample(&mut self, shapes: Shapes) {
        self.samples.insert(shapes);
    }

    /// Whether a run of these shapes is to be sent as a sample; says so once.
    pub(super) fn take_sample(&mut self, shapes: &Shapes) -> bool {
        !self.samples.is_empty() && self.samples.remove(shapes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes(dim: u64) -> Shapes {
        Shapes(vec![vec![dim]])
    }

    #[test]
    fn only_what_is_approved_is_served() {
        let mut policy = Policy::default();
        assert!(!policy.serves(&shapes(1)));
        policy.approve(shapes(1));
        assert!(policy.serves(&shapes(1)) && !policy.serves(&shapes(2)));
        assert!(policy.evict(&shapes(1)) && !policy.evict(&shapes(1)));
        assert!(!policy.serves(&shapes(1)));
    }

    #[test]
    fn a_recall_holds_until_the_next_approval() {
        let mut policy = Policy::default();
        policy.approve_all();
        policy.recall(shapes(1));
        policy.approve_all();
        assert!(!policy.serves(&shapes(1)) && policy.serves(&shapes(2)));
        policy.approve(shapes(1));
        assert!(policy.serves(&shapes(1)));
    }

    #[test]
    fn a_sample_is_taken_once() {
        let mut policy = Policy::default();
        policy.want_sample(shapes(1));
        assert!(!policy.take_sample(&shapes(2)));
        assert!(policy.take_sample(&shapes(1)) && !policy.take_sample(&shapes(1)));
    }
}
