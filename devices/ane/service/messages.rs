// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a worker says to the warden of its container, and its end. A stranger's words: they are bounded here, and what
//! they ask for is checked where it is done ([`super::route`], [`super::trial`]).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use lighter_wire::PacketError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::control::{FromWorker, WORKER_VERSION, WorkerCounters};
use super::choice::EngineIndex;
use super::live::Live;
use super::warden::Warden;
use crate::text::{cut, with_causes};

/// Messages of one worker that are taken before others get their turn.
const MESSAGES_A_TURN: usize = 32;

impl Warden {
    /// Takes the messages of a worker that are there.
    pub(super) fn messages(&mut self, engine: EngineIndex) {
        for _ in 0..MESSAGES_A_TURN {
            let Some(live) = self.workers.get(&engine) else { return };
            match live.process.message() {
                Ok(Some((message, descriptors))) => self.take(engine, message, descriptors),
                Ok(None) => {
                    // Nothing more, or the end of its socket: then it is of no use any more, and poll says so again.
                    if is_closed(live) {
                        live.process.kill();
                        self.worker_ended(engine);
                    }
                    return;
                }
                Err(PacketError::Socket(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    return self.worker_ended(engine);
                }
                Err(error) => {
                    return self
                        .crashed(engine, &format!("it sent what is no message: {}", with_causes(&error)));
                }
            }
        }
    }

    fn take(&mut self, engine: EngineIndex, message: FromWorker, descriptors: Vec<OwnedFd>) {
        match message {
            FromWorker::Ready { version, ort_version, .. } => {
                self.worker_ready(engine, version, &ort_version)
            }
            FromWorker::Failed { reason } => {
                self.crashed(engine, &format!("it cannot use the engine: {}", cut(&reason)));
            }
            FromWorker::Loaded { model, compile_us } => self.loaded(engine, model, compile_us),
            FromWorker::LoadFailed { model, reason } => self.load_failed(engine, model, &cut(&reason)),
            FromWorker::HandBack { stream, wants } => self.hand_back(engine, stream, wants, descriptors),
            FromWorker::Sampled { model, shapes, inputs, outputs } => {
                self.sampled(engine, model, &shapes, inputs, outputs, descriptors);
            }
            FromWorker::TrialDone { trial, outcome } => self.trial_done(engine, trial, outcome, &descriptors),
            FromWorker::Evicted { model, shapes } => self.evicted(engine, model, &shapes),
            FromWorker::Forgotten { .. } => {}
            FromWorker::Ended { stream, error } => self.ended(engine, stream, error),
            FromWorker::Counters(counters) => {
                let look = Instant::now() + self.look_after();
                if let Some(live) = self.workers.get_mut(&engine) {
                    live.counters = counters.clone();
                    live.look_at.get_or_insert(look);
                }
                self.update_readings(engine, counters);
            }
            FromWorker::Report { seq, counters, oldest_run_us } => {
                self.update_readings(engine, counters);
                self.look_at_runs(engine, oldest_run_us);
                if seq == self.report_seq {
                    self.reports_due = self.reports_due.saturating_sub(1);
                    if self.reports_due == 0 {
                        self.reporters.clear();
                    }
                }
            }
        }
    }

    /// How long runs go on before they are looked at.
    pub(super) fn look_after(&self) -> Duration {
        Duration::from_millis(self.shared.config.run_limit_ms / 4 + 1)
    }

    fn look_at_runs(&mut self, engine: EngineIndex, oldest_run_us: Option<u64>) {
        let limit_ms = self.shared.config.run_limit_ms;
        let look = oldest_run_us.map(|_| Instant::now() + self.look_after());
        let Some(live) = self.workers.get_mut(&engine) else { return };
        (live.look_at, live.answer_by) = (look, None);
        if oldest_run_us.is_some_and(|us| us / 1000 > limit_ms) {
            self.hung(engine, &format!("a run took longer than {limit_ms} ms (ane.run_limit_ms)"));
        }
    }

    fn update_readings(&self, engine: EngineIndex, counters: WorkerCounters) {
        let name = self.engine_name(engine);
        self.readings().update(&name, counters);
    }

    fn worker_ready(&mut self, engine: EngineIndex, version: u32, ort_version: &str) {
        if version != WORKER_VERSION {
            return self
                .crashed(engine, &format!("it speaks version {version}, this service {WORKER_VERSION}"));
        }
        let name = self.engine_name(engine);
        let Some(live) = self.workers.get_mut(&engine) else { return };
        tracing::info!(
            container = self.container,
            pid = live.process.pid(),
            engine = name,
            onnxruntime = cut(ort_version),
            "worker is ready"
        );
        let sent = live.ready();
        if self.check_sent(engine, sent) {
            self.trial_worker_ready(engine);
        }
    }

    fn ended(&mut self, engine: EngineIndex, stream: u64, error: Option<String>) {
        let Some(live) = self.workers.get_mut(&engine) else { return };
        if live.streams.remove(&stream).is_none() {
            return;
        }
        if live.streams.is_empty() {
            live.idle_since = Instant::now();
        }
        if let Some(error) = error {
            let error = cut(&error);
            self.readings().failed(&error);
            self.warn(&format!("stream {stream} ended: {error}"));
        }
    }

    /// The worker's process has ended, or is about to: takes in its last words first.
    pub(super) fn worker_ended(&mut self, engine: EngineIndex) {
        loop {
            let message = match self.workers.get(&engine) {
                Some(live) => live.process.message(),
                None => return,
            };
            match message {
                Ok(Some((message, descriptors))) => self.take(engine, message, descriptors),
                Ok(None) | Err(_) => break,
            }
        }
        self.crashed(engine, "it ended");
    }
}

/// Whether a readable socket has nothing but its end.
fn is_closed(live: &Live) -> bool {
    let mut polled = [PollFd::new(live.process.control(), PollFlags::RDHUP)];
    let now = Timespec::default();
    poll(&mut polled, Some(&now)).is_ok()
        && polled.iter().any(|fd| fd.revents().intersects(PollFlags::HUP | PollFlags::RDHUP))
}
