// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the mps service counts for each container, and how a report is made of it. Pure.
//!
//! A container has a worker a stream, and each counts from its own start; the service adds up their lives, so that a
//! number never falls when a worker ends.

use std::collections::BTreeMap;

use lighter_wire::ContainerReport;

use super::control::Counters;
use crate::text::cut;

/// The account of one container.
#[derive(Debug, Clone, Default)]
pub struct Readings {
    container: String,
    /// Sums of the workers that have ended.
    past: Counters,
    /// The last word of each worker that lives, by stream.
    current: BTreeMap<u64, Counters>,
    streams_total: u64,
    streams_open: u64,
    refused: u64,
    last_error: Option<String>,
}

impl Readings {
    /// The account of a container that has done nothing.
    #[must_use]
    pub fn new(container: &str) -> Self {
        Self { container: container.to_owned(), ..Self::default() }
    }

    /// A stream has been taken; `open` are open with it.
    pub fn stream_started(&mut self, open: usize) {
        self.streams_total += 1;
        self.streams_open = open as u64;
    }

    /// Takes over what a stream's worker says of itself.
    pub fn update(&mut self, stream: u64, counters: Counters) {
        self.current.insert(stream, counters);
    }

    /// A stream's worker has ended, `open` are left: what it held is free, what it did stays counted.
    pub fn stream_ended(&mut self, stream: u64, open: usize) {
        self.streams_open = open as u64;
        let Some(ended) = self.current.remove(&stream) else { return };
        let past = &mut self.past;
        for (sum, more) in [
            (&mut past.calls, ended.calls),
            (&mut past.bytes_in, ended.bytes_in),
            (&mut past.bytes_out, ended.bytes_out),
            (&mut past.engine_us, ended.engine_us),
            (&mut past.errors, ended.errors),
        ] {
            *sum = sum.saturating_add(more);
        }
        if let Some(error) = ended.last_error {
            self.failed(&cut(&error));
        }
    }

    /// A stream was refused by the service itself.
    pub fn refused(&mut self, reason: &str) {
        self.refused += 1;
        self.failed(reason);
    }

    /// Something went wrong.
    pub fn failed(&mut self, reason: &str) {
        self.last_error = Some(reason.to_owned());
    }

    /// The account as it is reported. A call is an operator that ran here.
    #[must_use]
    pub fn report(&self) -> ContainerReport {
        let sum = |of: fn(&Counters) -> u64| {
            self.current.values().fold(of(&self.past), |sum, one| sum.saturating_add(of(one)))
        };
        let latest = self.current.values().rev().find_map(|one| one.last_error.as_deref());
        ContainerReport {
            container: self.container.clone(),
            streams_open: self.streams_open,
            streams_total: self.streams_total,
            calls: sum(|one| one.calls),
            in_bytes: sum(|one| one.bytes_in),
            out_bytes: sum(|one| one.bytes_out),
            held_bytes: sum(|one| one.held_bytes),
            engine_us: sum(|one| one.engine_us),
            errors: sum(|one| one.errors).saturating_add(self.refused),
            last_error: latest.map(cut).or_else(|| self.last_error.clone()),
        }
    }

    /// Storages that the container holds, for the totals.
    #[must_use]
    pub fn storages(&self) -> u64 {
        self.current.values().fold(0, |sum, one| sum.saturating_add(one.storages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_streams_add_up_and_outlive_their_workers() {
        let mut readings = Readings::new("c1");
        let counters = |calls, held_bytes| Counters { calls, held_bytes, errors: 1, ..Counters::default() };
        readings.stream_started(1);
        readings.update(1, counters(5, 100));
        readings.stream_started(2);
        readings.update(2, counters(7, 40));
        assert_eq!((readings.report().calls, readings.report().held_bytes), (12, 140));
        readings.update(1, Counters { last_error: Some("a\u{1b}b".into()), ..counters(6, 90) });
        readings.stream_ended(1, 1);
        readings.stream_ended(9, 1);
        readings.refused("too many");
        let report = readings.report();
        assert_eq!((report.calls, report.held_bytes, report.errors), (13, 40, 3));
        assert_eq!((report.streams_total, report.streams_open), (2, 1));
        assert_eq!(report.last_error.as_deref(), Some("too many"));
        readings.update(2, Counters { last_error: Some("a\u{1b}b".into()), ..counters(7, 0) });
        assert_eq!(readings.report().last_error.as_deref(), Some("ab"));
    }
}
