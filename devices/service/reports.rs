// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who waits for the counters of a container's processes, and which of these have yet to answer. Pure.
//!
//! Those who wait hold the other ends of the senders kept here: they go on when the last answer is there, or its process gone.

use std::collections::BTreeSet;
use std::sync::mpsc::Sender;

/// The questions of one container, whose processes are known by their streams.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    seq: u64,
    due: BTreeSet<u64>,
    waiting: Vec<Sender<()>>,
}

impl Reports {
    /// One more waits; returns the number of the question. [`Self::settle`] belongs behind the last [`Self::asked`].
    pub(crate) fn begin(&mut self, done: Sender<()>) -> u64 {
        self.seq += 1;
        self.waiting.push(done);
        self.seq
    }

    /// A stream's process has been asked.
    pub(crate) fn asked(&mut self, stream: u64) {
        self.due.insert(stream);
    }

    /// It has answered the question of this number; an answer to an older one is not waited for.
    pub(crate) fn answered(&mut self, stream: u64, seq: u64) {
        if seq == self.seq {
            self.due.remove(&stream);
        }
        self.settle();
    }

    /// It has gone.
    pub(crate) fn gone(&mut self, stream: u64) {
        self.due.remove(&stream);
        self.settle();
    }

    /// Lets those who wait go on when the last answers are there.
    pub(crate) fn settle(&mut self) {
        if self.due.is_empty() {
            self.waiting.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{TryRecvError, channel};

    use super::*;

    #[test]
    fn who_waits_goes_on_with_the_last_answer_to_the_last_question_or_the_last_end() {
        let mut reports = Reports::default();
        let (first, first_done) = channel();
        let (second, second_done) = channel();
        let old = reports.begin(first);
        reports.asked(1);
        reports.asked(2);
        reports.settle();
        let new = reports.begin(second);
        reports.asked(1);
        reports.answered(1, old);
        reports.answered(2, new);
        assert_eq!(
            first_done.try_recv(),
            Err(TryRecvError::Empty),
            "stream 1 has not answered the last question"
        );
        reports.gone(1);
        assert_eq!(first_done.try_recv(), Err(TryRecvError::Disconnected));
        assert_eq!(second_done.try_recv(), Err(TryRecvError::Disconnected));
        let (third, third_done) = channel();
        reports.begin(third);
        reports.settle();
        assert_eq!(third_done.try_recv(), Err(TryRecvError::Disconnected), "nobody was asked");
    }
}
