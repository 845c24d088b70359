// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks after one container: keeps its workers, one an engine, passes its streams to them, and ends them.
//!
//! A thread a container, which waits in one poll for the service and for its workers' sockets, standard errors and
//! ends. What workers say is taken in by [`super::messages`]. Where streams go is in [`super::route`], which engine is chosen in
//! [`super::trial`].

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lighter_frames::Refusal;
use lighter_wire::{Owner, PacketError, StreamOffer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::control::{ModelHash, ToWorker};
use super::super::readings::Readings;
use super::choice::EngineIndex;
use super::engines::Host;
use super::live::{Live, LoadState, Phase};
use super::route::Entry;
use super::setup::{Ready, Setups, refuse};
use super::shared::Shared;
use super::trial::Trials;
use crate::service::crashes::Crashes;
use crate::service::limiter::{Limiter, Verdict};
use crate::service::wardens::{Ask, Inbox, Mailbox};
use crate::text::{cut, with_causes};

/// How long a worker may take to say how long its runs take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// What a warden is asked besides, by the threads that set streams up.
#[derive(Debug)]
pub(super) enum Own {
    /// A stream is set up.
    Ready(Box<Ready>),
    /// A stream could not be set up.
    NotReady { stream: u64, reason: String },
    /// Let go of models that no stream uses, then drop the sender.
    MakeRoom(Sender<()>),
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Warden {
    pub(super) shared: Arc<Shared>,
    pub(super) container: String,
    pub(super) owner: Owner,
    pub(super) device: String,
    pub(super) inbox: Inbox<Own>,
    pub(super) mailbox: Mailbox<Own>,
    pub(super) readings: Arc<Mutex<Readings>>,
    pub(super) setups: Setups,
    /// The engines, once they are known; the same for the container's whole life.
    pub(super) host: Option<Arc<Host>>,
    pub(super) workers: BTreeMap<EngineIndex, Live>,
    pub(super) models: BTreeMap<ModelHash, Entry>,
    pub(super) trials: Trials,
    pub(super) crashes: Crashes,
    /// Of the service's own lines about the container.
    pub(super) limiter: Limiter,
    /// Of the workers' lines.
    pub(super) chatter: Limiter,
    pub(super) report_seq: u64,
    pub(super) reports_due: usize,
    pub(super) reporters: Vec<Sender<()>>,
}

/// What became ready of one worker.
#[derive(Debug, Clone, Copy)]
struct Woken {
    engine: EngineIndex,
    control: bool,
    ended: bool,
    lines: bool,
}

impl Warden {
    /// Works until the grant or the service ends.
    pub(super) fn run(mut self) {
        loop {
            loop {
                match self.inbox.next() {
                    Ok(Ask::Stream(offer, socket)) => self.stream(&offer, socket),
                    Ok(Ask::Own(Own::Ready(ready))) => self.ready(*ready),
                    Ok(Ask::Own(Own::NotReady { stream, reason })) => self.refused(stream, &reason),
                    Ok(Ask::Own(Own::MakeRoom(done))) => {
                        self.forget_unused();
                        drop(done);
                    }
                    Ok(Ask::Report(done)) => self.report(done),
                    Ok(Ask::End(answer)) => {
                        self.stop_all("its grant ended");
                        if let Some(answer) = answer {
                            answer.done();
                        }
                        return;
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.stop_all("the service ends"),
                }
            }
            self.notice_forgotten();
            self.next_trial();
            self.note_holdings();
            let (wake, ready) = self.wait();
            if wake {
                self.inbox.reset();
            }
            for ready in ready {
                if ready.lines {
                    self.log_lines(ready.engine);
                }
                if ready.control {
                    self.messages(ready.engine);
                }
                if ready.ended {
                    self.worker_ended(ready.engine);
                }
            }
            self.check_deadlines();
        }
    }

    pub(super) fn readings(&self) -> MutexGuard<'_, Readings> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) -> (bool, Vec<Woken>) {
        let mut fds = vec![PollFd::new(self.inbox.wake(), PollFlags::IN)];
        for live in self.workers.values() {
            fds.push(PollFd::new(live.process.control(), PollFlags::IN));
            fds.push(PollFd::new(live.process.pidfd(), PollFlags::IN));
            // Its pipe closes before the process is reaped; then the process stands in for it.
            match live.process.stderr() {
                Some(pipe) => fds.push(PollFd::new(pipe, PollFlags::IN)),
                None => fds.push(PollFd::new(live.process.pidfd(), PollFlags::empty())),
            }
        }
        let limit = self.next_deadline().map(|deadline| {
            // A little late rather than a turn too early.
            let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 })
        });
        if let Err(errno) = poll(&mut fds, limit.as_ref())
            && errno != rustix::io::Errno::INTR
        {
            tracing::error!(container = self.container, %errno, "waiting for workers failed");
        }
        let mut flags = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || flags.next().unwrap_or(false);
        let wake = next();
        let ready = self
            .workers
            .keys()
            .map(|engine| Woken { engine: *engine, control: next(), ended: next(), lines: next() })
            .collect();
        (wake, ready)
    }

    fn next_deadline(&self) -> Option<Instant> {
        let workers = self.workers.iter().filter_map(|(engine, live)| self.deadline_of(*engine, live));
        workers.chain(self.trials.deadline()).min()
    }

    fn deadline_of(&self, engine: EngineIndex, live: &Live) -> Option<Instant> {
        match &live.phase {
            Phase::Starting { deadline, .. } => Some(*deadline),
            Phase::Up if self.is_idle(engine, live) => Some(live.idle_since + self.shared.config.idle()),
            Phase::Up => [live.look_at, live.answer_by].into_iter().flatten().min(),
        }
    }

    fn is_idle(&self, engine: EngineIndex, live: &Live) -> bool {
        let waits = self.is_cpu(engine) && self.models.values().any(|entry| !entry.waiting.is_empty());
        live.streams.is_empty() && !waits && !self.trials.needs(engine, self.is_cpu(engine))
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        let due: Vec<EngineIndex> = self
            .workers
            .iter()
            .filter(|(engine, live)| self.deadline_of(**engine, live).is_some_and(|deadline| deadline <= now))
            .map(|(engine, _)| *engine)
            .collect();
        for engine in due {
            let Some(live) = self.workers.get_mut(&engine) else { continue };
            if matches!(live.phase, Phase::Starting { .. }) {
                let limit_ms = self.shared.config.start_limit_ms;
                self.hung(engine, &format!("it was not ready within {limit_ms} ms"));
            } else if live.answer_by.is_some_and(|by| by <= now) {
                self.hung(engine, &format!("it did not answer within {} s", ANSWER_LIMIT.as_secs()));
            } else if live.look_at.is_some_and(|at| at <= now) {
                (live.look_at, live.answer_by) = (None, Some(now + ANSWER_LIMIT));
                let sent = live.say_now(&ToWorker::Report { seq: 0 });
                self.check_sent(engine, sent);
            } else {
                self.stop(engine, "it was idle");
            }
        }
        if self.trials.deadline().is_some_and(|deadline| deadline <= now) {
            self.trial_late();
        }
    }

    fn stream(&mut self, offer: &StreamOffer, socket: OwnedFd) {
        self.readings().stream_started();
        if let Some(left) = self.crashes.refused_for(Instant::now()) {
            let reason = format!("its workers crashed too often, wait {} s", left.as_secs() + 1);
            return self.refuse(offer.stream, &socket, &reason);
        }
        let most = usize::try_from(self.shared.config.max_streams_per_container).unwrap_or(usize::MAX);
        let streams = self.streams();
        if streams >= most {
            let reason = format!("it has {streams} streams already (ane.max_streams_per_container)");
            return self.refuse(offer.stream, &socket, &reason);
        }
        let Some(busy) = self.setups.begin() else {
            return self.refuse(offer.stream, &socket, "too many of its streams are being set up");
        };
        let (setups, mailbox, stream) = (self.setups.clone(), self.mailbox.clone(), offer.stream);
        let thread = std::thread::Builder::new().name("set-up".to_owned()).spawn(move || {
            let outcome = match setups.run(stream, socket) {
                Ok(ready) => ready.map(|ready| Own::Ready(Box::new(ready))),
                Err(reason) => Some(Own::NotReady { stream, reason }),
            };
            drop(busy);
            if let Some(outcome) = outcome {
                mailbox.send(Ask::Own(outcome));
            }
        });
        if let Err(error) = thread {
            tracing::error!(container = self.container, %error, "no thread for a stream");
        }
    }

    /// Streams that are with workers, wait for one, or are being set up.
    fn streams(&self) -> usize {
        let with_workers: usize = self.workers.values().map(|live| live.streams.len()).sum();
        let waiting: usize = self.models.values().map(|entry| entry.waiting.len()).sum();
        with_workers + waiting + self.setups.busy.load(Ordering::Relaxed)
    }

    pub(super) fn refuse(&mut self, stream: u64, socket: &OwnedFd, reason: &str) {
        refuse(socket, Refusal::Busy, reason);
        self.refused(stream, reason);
    }

    pub(super) fn refused(&mut self, stream: u64, reason: &str) {
        let reason = cut(reason);
        self.readings().refused(&reason);
        self.warn(&format!("stream {stream} is refused: {reason}"));
    }

    fn note_holdings(&self) {
        let streams = self.workers.values().map(|live| live.streams.len()).sum();
        self.readings().holds(streams, self.setups.models.bytes());
    }

    fn report(&mut self, done: Sender<()>) {
        self.report_seq += 1;
        self.reports_due = 0;
        let seq = self.report_seq;
        let engines: Vec<EngineIndex> = self.workers.keys().copied().collect();
        for engine in engines {
            let Some(live) = self.workers.get(&engine).filter(|live| matches!(live.phase, Phase::Up)) else {
                continue;
            };
            let sent = live.say_now(&ToWorker::Report { seq });
            self.reports_due += usize::from(sent.is_ok());
            self.check_sent(engine, sent);
        }
        if self.reports_due > 0 {
            self.reporters.push(done);
        }
    }

    pub(super) fn check_sent(&mut self, engine: EngineIndex, sent: Result<(), PacketError>) -> bool {
        match sent {
            Ok(()) => true,
            Err(error) => {
                self.crashed(engine, &format!("it takes no message: {}", with_causes(&error)));
                false
            }
        }
    }

    fn log_lines(&mut self, engine: EngineIndex) {
        let name = self.engine_name(engine);
        let Some(live) = self.workers.get_mut(&engine) else { return };
        for line in live.process.read_lines() {
            let Verdict::Write { left_out } = self.chatter.check(Instant::now()) else { continue };
            // A worker's own log comes this way too; an engine's chatter is for those who look for it.
            if line.contains(" WARN ") || line.contains("ERROR ") {
                tracing::warn!(container = self.container, engine = name, left_out, line, "worker says");
            } else {
                tracing::debug!(container = self.container, engine = name, left_out, line, "worker says");
            }
        }
    }

    pub(super) fn warn(&mut self, text: &str) {
        self.limiter.warn(&self.container, text);
    }

    /// The worker takes too long.
    pub(super) fn hung(&mut self, engine: EngineIndex, what: &str) {
        self.broke(engine, what, true);
    }

    /// The worker is of no use any more.
    pub(super) fn crashed(&mut self, engine: EngineIndex, what: &str) {
        self.broke(engine, what, false);
    }

    /// The worker and its streams go. Their clients connect again and are served by what is left; a container whose
    /// workers break one after another has to wait.
    fn broke(&mut self, engine: EngineIndex, what: &str, is_hung: bool) {
        let Some(mut live) = self.workers.remove(&engine) else { return };
        let (pid, streams) = (live.process.pid(), live.streams.len());
        let end = live.process.obituary();
        let name = self.engine_name(engine);
        let text = format!("worker of {name} broke: {what}{end}");
        tracing::error!(container = self.container, pid, engine = name, streams_broken = streams, "{text}");
        // The trouble last: who is told of it finds the container's own account of it.
        self.worker_gone(&name);
        self.readings().failed(&text);
        self.shared.trouble(format!("container {}: {text}", self.container));
        let is_trial = self.trials.is_attempt_at(engine);
        let starting = matches!(live.phase, Phase::Starting { .. });
        self.lost_worker(engine, &live, &text, is_hung);
        drop(live);
        // What is tried is bounded by the journal.
        if (self.is_cpu(engine) || !is_trial || starting) && self.crashes.add(Instant::now()) {
            let pause_s = self.shared.config.crash_pause_s;
            let text = format!("workers crash one after another: streams are refused for {pause_s} s");
            tracing::error!(container = self.container, pause_s, "{text}");
            self.shared.trouble(format!("container {}: {text}", self.container));
        }
    }

    /// Ends a worker in good order.
    fn stop(&mut self, engine: EngineIndex, why: &str) {
        let Some(live) = self.workers.remove(&engine) else { return };
        let (pid, streams, name) = (live.process.pid(), live.streams.len(), self.engine_name(engine));
        self.left_worker(engine);
        drop(live);
        if self.is_cpu(engine) {
            self.no_processor();
        }
        self.worker_gone(&name);
        tracing::info!(container = self.container, pid, engine = name, streams, "worker ended: {why}");
    }

    fn stop_all(&mut self, why: &str) {
        self.trials.clear();
        let engines: Vec<EngineIndex> = self.workers.keys().copied().collect();
        for engine in engines {
            self.stop(engine, why);
        }
        self.models.clear();
    }

    fn worker_gone(&mut self, name: &str) {
        self.shared.workers.fetch_sub(1, Ordering::Relaxed);
        self.readings().worker_ended(name);
        self.reporters.clear();
        self.reports_due = 0;
    }

    pub(super) fn is_cpu(&self, engine: EngineIndex) -> bool {
        self.host.as_ref().is_some_and(|host| host.cpu == engine)
    }

    pub(super) fn engine_name(&self, engine: EngineIndex) -> String {
        let engine = self.host.as_ref().and_then(|host| host.engines.get(engine));
        engine.map_or_else(|| "an unknown engine".to_owned(), |engine| engine.name.clone())
    }

    pub(super) fn load_state(&self, engine: EngineIndex, model: &ModelHash) -> Option<LoadState> {
        self.workers.get(&engine)?.models.get(model).copied()
    }
}
