// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the gpu service counts for each container, and how a report is made of it. Pure.
//!
//! A container has a session for each Vulkan instance, and each counts from its own start; the service adds up their lives,
//! so that a number never falls when a session ends.

use std::collections::BTreeMap;

use lighter_wire::ContainerReport;

use super::control::Counters;

/// The account of one container.
#[derive(Debug, Clone, Default)]
pub struct Readings {
    container: String,
    /// Sums of the sessions that have ended.
    past: Counters,
    /// The last word of each session that lives, by stream.
    current: BTreeMap<u64, Counters>,
    streams_total: u64,
    streams_open: u64,
    errors: u64,
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

    /// Takes over what a stream's session says of itself.
    pub fn update(&mut self, stream: u64, counters: Counters) {
        self.current.insert(stream, counters);
    }

    /// A stream's session has ended, `open` are left: what it held is free, what it did stays counted.
    pub fn stream_ended(&mut self, stream: u64, open: usize) {
        self.streams_open = open as u64;
        let Some(ended) = self.current.remove(&stream) else { return };
        let past = &mut self.past;
        for (sum, more) in [
            (&mut past.requests, ended.requests),
            (&mut past.bytes_in, ended.bytes_in),
            (&mut past.bytes_out, ended.bytes_out),
        ] {
            *sum = sum.saturating_add(more);
        }
    }

    /// Something went wrong, or was refused.
    pub fn failed(&mut self, reason: &str) {
        self.errors += 1;
        self.last_error = Some(reason.to_owned());
    }

    /// The account as it is reported. A call is a request on a session's socket; commands of Vulkan go past it, through
    /// memory, and how long the GPU works on them is not known here.
    #[must_use]
    pub fn report(&self) -> ContainerReport {
        let sum = |of: fn(&Counters) -> u64| {
            self.current.values().fold(of(&self.past), |sum, one| sum.saturating_add(of(one)))
        };
        ContainerReport {
            container: self.container.clone(),
            streams_open: self.streams_open,
            streams_total: self.streams_total,
            calls: sum(|one| one.requests),
            in_bytes: sum(|one| one.bytes_in),
            out_bytes: sum(|one| one.bytes_out),
            held_bytes: sum(|one| one.mapped_bytes),
            engine_us: 0,
            errors: self.errors,
            last_error: self.last_error.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_sessions_add_up_and_outlive_them() {
        let mut readings = Readings::new("c1");
        let counters = |requests, mapped_bytes| Counters { requests, mapped_bytes, ..Counters::default() };
        readings.stream_started(1);
        readings.update(1, counters(5, 100));
        readings.stream_started(2);
        readings.update(2, counters(7, 40));
        assert_eq!((readings.report().calls, readings.report().held_bytes), (12, 140));
        readings.update(1, counters(6, 90));
        readings.stream_ended(1, 1);
        readings.stream_ended(9, 1);
        readings.failed("too many");
        let report = readings.report();
        assert_eq!((report.calls, report.held_bytes, report.errors), (13, 40, 1));
        assert_eq!((report.streams_total, report.streams_open), (2, 1));
        assert_eq!(report.last_error.as_deref(), Some("too many"));
    }
}
