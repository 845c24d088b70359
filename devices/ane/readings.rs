// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ane service counts for each container, and how a report is made of it. Pure.
//!
//! A container has a worker an engine, and each counts from its own start; the service adds up their lives, so that a
//! number never falls when a worker ends.

use std::collections::BTreeMap;

use lighter_wire::ContainerReport;

use super::control::WorkerCounters;

/// The account of one container.
#[derive(Debug, Clone, Default)]
pub struct Readings {
    container: String,
    /// Sums of the workers that have ended, by engine.
    past: BTreeMap<String, WorkerCounters>,
    /// The last word of each worker that lives, by engine.
    current: BTreeMap<String, WorkerCounters>,
    streams_total: u64,
    streams_open: u64,
    model_bytes: u64,
    refused: u64,
    last_error: Option<String>,
}

impl Readings {
    /// The account of a container that has done nothing.
    #[must_use]
    pub fn new(container: &str) -> Self {
        Self { container: container.to_owned(), ..Self::default() }
    }

    /// Takes over what a worker says of itself.
    pub fn update(&mut self, engine: &str, counters: WorkerCounters) {
        self.current.insert(engine.to_owned(), counters);
    }

    /// An engine's worker has ended: what it held is free, what it did stays counted.
    pub fn worker_ended(&mut self, engine: &str) {
        let Some(ended) = self.current.remove(engine) else { return };
        let past = self.past.entry(engine.to_owned()).or_default();
        for (sum, more) in [
            (&mut past.runs, ended.runs),
            (&mut past.in_bytes, ended.in_bytes),
            (&mut past.out_bytes, ended.out_bytes),
            (&mut past.engine_us, ended.engine_us),
            (&mut past.errors, ended.errors),
        ] {
            *sum = sum.saturating_add(more);
        }
        if ended.last_error.is_some() {
            self.last_error = ended.last_error;
        }
    }

    /// A stream began to be set up.
    pub fn stream_started(&mut self) {
        self.streams_total += 1;
    }

    /// What the container has now.
    pub fn holds(&mut self, streams_open: usize, model_bytes: u64) {
        self.streams_open = streams_open as u64;
        self.model_bytes = model_bytes;
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

    /// The account as it is reported. A call is a run that a container's model made here.
    #[must_use]
    pub fn report(&self) -> ContainerReport {
        let sum = |of: fn(&WorkerCounters) -> u64| {
            self.past.values().chain(self.current.values()).fold(0u64, |sum, one| sum.saturating_add(of(one)))
        };
        ContainerReport {
            container: self.container.clone(),
            streams_open: self.streams_open,
            streams_total: self.streams_total,
            calls: sum(|one| one.runs),
            in_bytes: sum(|one| one.in_bytes),
            out_bytes: sum(|one| one.out_bytes),
            held_bytes: self.model_bytes,
            engine_us: sum(|one| one.engine_us),
            errors: sum(|one| one.errors).saturating_add(self.refused),
            last_error: self
                .current
                .values()
                .find_map(|one| one.last_error.clone())
                .or_else(|| self.last_error.clone()),
        }
    }

    /// Runs so far, by engine.
    #[must_use]
    pub fn runs(&self) -> BTreeMap<String, u64> {
        let mut runs: BTreeMap<String, u64> = BTreeMap::new();
        for (engine, counters) in self.past.iter().chain(&self.current) {
            let sum = runs.entry(engine.clone()).or_default();
            *sum = sum.saturating_add(counters.runs);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(runs: u64) -> WorkerCounters {
        WorkerCounters { runs, engine_us: runs * 7, errors: 1, ..WorkerCounters::default() }
    }

    #[test]
    fn counts_of_all_engines_add_up_and_outlive_their_workers() {
        let mut readings = Readings::new("c1");
        readings.stream_started();
        readings.update("cpu", counters(5));
        readings.update("cpu", counters(6));
        readings.update("openvino-npu", counters(10));
        readings.worker_ended("cpu");
        readings.worker_ended("cuda");
        readings.update("cpu", counters(2));
        readings.refused("too many");
        readings.holds(3, 77);
        let report = readings.report();
        assert_eq!((report.calls, report.engine_us, report.errors), (18, 126, 4));
        assert_eq!((report.streams_total, report.streams_open, report.held_bytes), (1, 3, 77));
        assert_eq!(report.last_error.as_deref(), Some("too many"));
        let runs: Vec<_> = readings.runs().into_iter().collect();
        assert_eq!(runs, [("cpu".to_owned(), 8), ("openvino-npu".to_owned(), 10)]);
    }
}
