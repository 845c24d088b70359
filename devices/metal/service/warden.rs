// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks after one container: starts its worker with the first stream, passes streams on, answers the worker, ends it.
//!
//! ```text
//!            first stream                 ready
//!  no worker ───────────────► starting ──────────► up ──idle──► no worker
//!      ▲                         │ late, failed     │ crash
//!      └─────────────────────────┴──────────────────┘   too many crashes: streams are refused for a while
//! ```
//! A thread a container, which waits in one poll for the service, the worker's socket, its standard error and its
//! end. What the worker says is a stranger's word.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::{Kind, Owner, PacketError, StreamOffer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::control::{FromWorker, ToWorker, WeightKey, WorkerConfig};
use super::super::probe::command_for;
use super::super::readings::Readings;
use super::Shared;
use super::live::{Live, Phase, Waiting};
use crate::host::{Engine, Probe};
use crate::service::crashes::Crashes;
use crate::service::limiter::{Limiter, Verdict};
use crate::service::wardens::{Ask, Inbox};
use crate::service::{sandbox, spawn};
use crate::system;
use crate::text::{cut, with_causes};

/// The thread's state.
#[derive(Debug)]
pub(super) struct Warden {
    pub(super) shared: Arc<Shared>,
    pub(super) container: String,
    pub(super) owner: Owner,
    pub(super) device: String,
    pub(super) inbox: Inbox<Infallible>,
    pub(super) ending: Arc<AtomicBool>,
    pub(super) readings: Arc<Mutex<Readings>>,
    pub(super) live: Option<Live>,
    pub(super) crashes: Crashes,
    /// Of the service's own lines about the container.
    pub(super) limiter: Limiter,
    /// Of the worker's lines.
    pub(super) chatter: Limiter,
    pub(super) report_seq: u64,
    pub(super) reporters: Vec<Sender<()>>,
}

/// What became ready.
#[derive(Debug, Default)]
struct Ready {
    wake: bool,
    control: bool,
    lines: bool,
    ended: bool,
}

impl Warden {
    /// Works until the grant or the service ends.
    pub(super) fn run(mut self) {
        loop {
            loop {
                match self.inbox.next() {
                    Ok(Ask::Stream(offer, socket)) => self.stream(&offer, socket),
                    Ok(Ask::Report(done)) => self.report(done),
                    Ok(Ask::End(answer)) => {
                        self.stop("its grant ended");
                        if let Some(answer) = answer {
                            answer.done();
                        }
                        return;
                    }
                    Ok(Ask::Own(never)) => match never {},
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        self.stop("the service ends");
                        return;
                    }
                }
            }
            let ready = self.wait();
            if ready.wake {
                self.inbox.reset();
            }
            if ready.lines {
                self.log_lines();
            }
            if ready.control {
                self.one_message();
            }
            if ready.ended {
                self.worker_ended();
            }
            self.check_deadlines();
        }
    }

    fn readings(&self) -> MutexGuard<'_, Readings> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) -> Ready {
        let mut fds = vec![PollFd::new(self.inbox.wake(), PollFlags::IN)];
        if let Some(live) = &self.live {
            fds.push(PollFd::new(live.process.control(), PollFlags::IN));
            fds.push(PollFd::new(live.process.pidfd(), PollFlags::IN));
            fds.extend(live.process.stderr().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        }
        let limit = self.next_deadline().map(|deadline| {
            // A little late rather than a turn too early.
            let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 })
        });
        if let Err(errno) = poll(&mut fds, limit.as_ref())
            && errno != rustix::io::Errno::INTR
        {
            tracing::error!(container = self.container, %errno, "waiting for a worker failed");
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        Ready { wake: next(), control: next(), ended: next(), lines: next() }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let live = self.live.as_ref()?;
        match &live.phase {
            Phase::Starting { deadline, .. } => Some(*deadline),
            Phase::Up if live.open.is_empty() => Some(live.idle_since + self.shared.config.idle()),
            Phase::Up => None,
        }
    }

    fn check_deadlines(&mut self) {
        if self.next_deadline().is_none_or(|deadline| deadline > Instant::now()) {
            return;
        }
        match self.live.as_ref().map(|live| &live.phase) {
            Some(Phase::Starting { .. }) => {
                let limit_ms = self.shared.config.start_limit_ms;
                self.crashed(&format!("the engine was not ready within {limit_ms} ms"));
            }
            Some(Phase::Up) => self.stop("it was idle"),
            None => {}
        }
    }

    fn stream(&mut self, offer: &StreamOffer, socket: OwnedFd) {
        match self.admit(offer) {
            Ok(major) => self.pass(Waiting { stream: offer.stream, major, socket }),
            Err(reason) => {
                self.readings().refused(&reason);
                self.warn(&format!("stream {} is refused: {reason}", offer.stream));
                // The socket is closed here: the client sees the end of the connection.
            }
        }
    }

    /// Makes sure that there is a worker, and finds out the client's protocol major.
    fn admit(&mut self, offer: &StreamOffer) -> Result<Option<u8>, String> {
        if let Some(left) = self.crashes.refused_for(Instant::now()) {
            return Err(format!("its workers crashed too often, wait {} s", left.as_secs() + 1));
        }
        let config = &self.shared.config;
        let streams = self.live.as_ref().map_or(0, Live::streams);
        if streams >= usize::try_from(config.max_streams_per_container).unwrap_or(usize::MAX) {
            return Err(format!("it has {streams} streams already (metal.max_streams_per_container)"));
        }
        let major = config.protocol.or_else(|| self.shared.peers.major(offer.peer_pid?));
        if self.live.is_none() {
            self.live = Some(self.start()?);
        }
        Ok(major)
    }

    fn start(&self) -> Result<Live, String> {
        let shared = &self.shared;
        let found = shared.engines.get(&shared.program, &shared.config);
        let (Some(files), Some(engine)) = (&found.files, found.probe.named(&self.device)) else {
            return Err(match &found.probe {
                Probe::Missing { reason, remedy } => format!("no engine: {reason}; {remedy}"),
                Probe::Found(_) => {
                    format!("lighter.sh/metal={} is no engine of this host any more", self.device)
                }
            });
        };
        let max_bytes = max_bytes(shared.config.max_bytes_per_container, engine);
        let on_processor = engine.name.starts_with("CPU");
        let sandbox = if shared.config.sandbox {
            let prepared = sandbox::prepare(&sandbox::Needs {
                kind: Kind::Metal,
                program: shared.program.file(),
                folders: &files.folders,
                own_folder: None,
                on_processor,
                max_bytes,
                apart: false,
            });
            Some(prepared.map_err(|error| format!("its worker cannot be restricted: {error}"))?)
        } else {
            None
        };
        let command = command_for(&shared.program.inherited_path(), files);
        let worker = spawn::spawn(&shared.program, command, sandbox).map_err(|error| with_causes(&error))?;
        let deadline = Instant::now() + shared.config.start_limit();
        let holder = shared.weights.holder(shared.next_worker(), &self.owner, max_bytes);
        let live = Live::new(worker, deadline, holder);
        let configure = ToWorker::Configure(WorkerConfig {
            base_library: files.libraries.base.clone(),
            registry_library: files.libraries.registry.clone(),
            backends_dir: files.libraries.backends_dir.clone(),
            engine: engine.name.clone(),
            threads: shared.config.threads.or_else(system::processors),
            max_bytes,
            max_streams: shared.config.max_streams_per_container,
            huge_pages: shared.config.huge_pages,
            share_weights: shared.config.share_weights,
        });
        live.say(&configure).map_err(|error| format!("its worker takes no message: {error}"))?;
        shared.workers.fetch_add(1, Ordering::Relaxed);
        tracing::info!(
            container = self.container,
            pid = live.process.pid(),
            engine = engine.name,
            "worker started"
        );
        Ok(live)
    }

    fn pass(&mut self, stream: Waiting) {
        let Some(live) = &mut self.live else { return };
        match &mut live.phase {
            Phase::Starting { waiting, .. } => waiting.push(stream),
            Phase::Up => {
                if let Err(error) = live.pass(&stream) {
                    return self.crashed(&format!("it takes no stream: {}", with_causes(&error)));
                }
                let open = live.open.len();
                self.readings().stream_started(open);
            }
        }
    }

    fn report(&mut self, done: Sender<()>) {
        let Some(live) = self.live.as_ref().filter(|live| matches!(live.phase, Phase::Up)) else { return };
        self.report_seq += 1;
        if let Err(error) = live.say(&ToWorker::Report { seq: self.report_seq }) {
            return self.crashed(&format!("it takes no message: {}", with_causes(&error)));
        }
        self.reporters.push(done);
    }

    /// Takes one message of the worker's.
    fn one_message(&mut self) {
        let Some(live) = &mut self.live else { return };
        match live.process.message() {
            Ok(Some((message, descriptors))) => self.take(message, descriptors),
            // Its end of the socket is closed: it ends, or is of no use any more. Its end is seen by the pidfd.
            Ok(None) => {
                live.process.kill();
                self.worker_ended();
            }
            Err(PacketError::Socket(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                self.worker_ended();
            }
            Err(error) => self.crashed(&format!("it sent what is no message: {}", with_causes(&error))),
        }
    }

    fn take(&mut self, message: FromWorker, descriptors: Vec<OwnedFd>) {
        match message {
            FromWorker::Ready { engine, version } => self.ready(&engine, &version),
            // Not left to the worker to end: its clients wait.
            FromWorker::Failed { reason } => {
                self.crashed(&format!("it cannot open the engine: {}", cut(&reason)));
            }
            FromWorker::Find { seq, len, fnv } => self.find(seq, len, fnv),
            FromWorker::Keep { seq, key, fnv } => self.keep(seq, &key, fnv, descriptors),
            FromWorker::Report { seq, counters } => {
                self.readings().update(counters);
                if seq == self.report_seq {
                    self.reporters.clear();
                }
            }
            FromWorker::Ended { stream, error } => {
                let Some(live) = &mut self.live else { return };
                if !live.open.remove(&stream) {
                    return;
                }
                let open = live.open.len();
                if open == 0 {
                    live.idle_since = Instant::now();
                }
                self.readings().stream_ended(open);
                if let Some(error) = error {
                    let error = cut(&error);
                    self.readings().failed(&error);
                    self.warn(&format!("stream {stream} ended: {error}"));
                }
            }
        }
    }

    fn ready(&mut self, engine: &str, version: &str) {
        let Some(live) = &mut self.live else { return };
        let Phase::Starting { waiting, .. } = std::mem::replace(&mut live.phase, Phase::Up) else { return };
        live.idle_since = Instant::now();
        let (engine, version) = (cut(engine), cut(version));
        tracing::info!(
            container = self.container,
            pid = live.process.pid(),
            engine,
            version,
            "worker is ready"
        );
        for stream in waiting {
            self.pass(stream);
        }
    }

    fn find(&mut self, seq: u64, len: u64, fnv: u64) {
        let Some(live) = &self.live else { return };
        let is_ending = || self.ending.load(Ordering::Relaxed);
        let file =
            if self.shared.config.share_weights { live.holder.find(len, fnv, &is_ending) } else { None };
        let sent = live.answer_weight(seq, file.as_ref());
        self.check_sent(sent);
    }

    fn keep(&mut self, seq: u64, key: &WeightKey, fnv: u64, descriptors: Vec<OwnedFd>) {
        let Some(live) = &self.live else { return };
        let is_ending = || self.ending.load(Ordering::Relaxed);
        let kept = match descriptors.into_iter().next() {
            Some(upload) if self.shared.config.share_weights => {
                live.holder.keep(key, fnv, upload, &is_ending).map_err(|error| with_causes(&error)).map(Some)
            }
            Some(_) => Ok(None),
            None => Err("no file came with an upload".to_owned()),
        };
        let sent = live.answer_weight(seq, kept.as_ref().ok().and_then(Option::as_ref));
        if let Err(error) = kept {
            self.warn(&format!("a weight is not shared: {error}"));
        }
        self.check_sent(sent);
    }

    fn check_sent(&mut self, sent: Result<(), PacketError>) {
        if let Err(error) = sent {
            self.crashed(&format!("it takes no answer: {}", with_causes(&error)));
        }
    }

    fn log_lines(&mut self) {
        let Some(live) = &mut self.live else { return };
        for line in live.process.read_lines() {
            let Verdict::Write { left_out } = self.chatter.check(Instant::now()) else { continue };
            // A worker's own log comes this way too; ggml's chatter is for those who look for it.
            if line.contains(" WARN ") || line.contains("ERROR ") {
                tracing::warn!(container = self.container, left_out, line, "worker says");
            } else {
                tracing::debug!(container = self.container, left_out, line, "worker says");
            }
        }
    }

    fn warn(&mut self, text: &str) {
        self.limiter.warn(&self.container, text);
    }

    /// The worker's process has ended, or is about to: takes in its last words first.
    fn worker_ended(&mut self) {
        loop {
            let message = match &self.live {
                Some(live) => live.process.message(),
                None => return,
            };
            match message {
                // A dead worker gets no answers.
                Ok(Some((FromWorker::Find { .. } | FromWorker::Keep { .. }, _))) => {}
                Ok(Some((message, descriptors))) => self.take(message, descriptors),
                Ok(None) | Err(_) => break,
            }
        }
        self.crashed("it ended");
    }

    /// The worker is of no use any more: it and its streams go, and the container may have to wait.
    fn crashed(&mut self, what: &str) {
        let Some(mut live) = self.live.take() else { return };
        let streams = live.streams();
        let pid = live.process.pid();
        let end = live.process.obituary();
        drop(live);
        let text = format!("worker broke: {what}{end}");
        tracing::error!(container = self.container, pid, streams_broken = streams, "{text}");
        // The trouble last: who is told of it finds the container's own account of it.
        self.forget_worker();
        self.readings().failed(&text);
        self.shared.trouble(format!("container {}: {text}", self.container));
        if self.crashes.add(Instant::now()) {
            let pause_s = self.shared.config.crash_pause_s;
            let text = format!("workers crash one after another: streams are refused for {pause_s} s");
            tracing::error!(container = self.container, pause_s, "{text}");
            self.shared.trouble(format!("container {}: {text}", self.container));
        }
    }

    /// Ends the worker in good order.
    fn stop(&mut self, why: &str) {
        let Some(live) = self.live.take() else { return };
        let (pid, streams) = (live.process.pid(), live.streams());
        drop(live);
        self.forget_worker();
        tracing::info!(container = self.container, pid, streams, "worker ended: {why}");
    }

    fn forget_worker(&mut self) {
        self.shared.workers.fetch_sub(1, Ordering::Relaxed);
        self.readings().worker_ended();
        self.reporters.clear();
    }
}

/// The configured limit, else the memory of the engine, else that of the host.
fn max_bytes(configured: Option<u64>, engine: &Engine) -> u64 {
    configured.or(engine.memory_bytes).unwrap_or_else(system::memory_bytes)
}
