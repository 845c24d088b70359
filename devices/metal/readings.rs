// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the metal service counts for each container, and how a report is made of it. Pure.
//!
//! A worker counts from its own start; the service adds up the lives of a container's workers, so that a number
//! never falls when a worker ends.

use lighter_wire::ContainerReport;

use super::control::WorkerCounters;

/// The account of one container.
#[derive(Debug, Clone, Default)]
pub struct Readings {
    container: String,
    /// Sums of the workers that have ended.
    past: WorkerCounters,
    /// The last word of the worker that lives.
    current: WorkerCounters,
    /// Streams that the service passed on; the worker's own count is not needed for it.
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

    /// Takes over what the worker says of itself.
    pub fn update(&mut self, counters: WorkerCounters) {
        self.current = counters;
    }

    /// The worker has ended: what it held is free, what it did stays counted.
    pub fn worker_ended(&mut self) {
        let ended = std::mem::take(&mut self.current);
        let past = &mut self.past;
        for (sum, more) in [
            (&mut past.calls, ended.calls),
            (&mut past.graphs, ended.graphs),
            (&mut past.in_bytes, ended.in_bytes),
            (&mut past.out_bytes, ended.out_bytes),
            (&mut past.engine_us, ended.engine_us),
            (&mut past.errors, ended.errors),
        ] {
            *sum = sum.saturating_add(more);
        }
        self.streams_open = 0;
    }

    /// A stream was passed to the worker; `open` are open with it.
    pub fn stream_started(&mut self, open: usize) {
        self.streams_total += 1;
        self.streams_open = open as u64;
    }

    /// A stream ended; `open` are left.
    pub fn stream_ended(&mut self, open: usize) {
        self.streams_open = open as u64;
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

    /// The account as it is reported.
    #[must_use]
    pub fn report(&self) -> ContainerReport {
        let (past, current) = (&self.past, &self.current);
        ContainerReport {
            container: self.container.clone(),
            streams_open: self.streams_open,
            streams_total: self.streams_total,
            calls: past.calls.saturating_add(current.calls),
            in_bytes: past.in_bytes.saturating_add(current.in_bytes),
            out_bytes: past.out_bytes.saturating_add(current.out_bytes),
            held_bytes: current.held_bytes,
            engine_us: past.engine_us.saturating_add(current.engine_us),
            errors: past.errors.saturating_add(current.errors).saturating_add(self.refused),
            last_error: self.last_error.clone(),
        }
    }

    /// Graphs computed so far, for the totals.
    #[must_use]
    pub fn graphs(&self) -> u64 {
        self.past.graphs.saturating_add(self.current.graphs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_the_worker_and_its_memory_does_not() {
        let mut readings = Readings::new("c1");
        readings.stream_started(1);
        let counters = WorkerCounters {
            calls: 5,
            held_bytes: 100,
            engine_us: 7,
            errors: 1,
            ..WorkerCounters::default()
        };
        readings.update(counters.clone());
        readings.worker_ended();
        readings.stream_started(1);
        readings.update(WorkerCounters { calls: 2, held_bytes: 40, ..WorkerCounters::default() });
        readings.refused("too many");
        let report = readings.report();
        assert_eq!((report.calls, report.held_bytes, report.engine_us), (7, 40, 7));
        assert_eq!((report.streams_total, report.streams_open, report.errors), (2, 1, 2));
        assert_eq!(report.last_error.as_deref(), Some("too many"));
    }
}
