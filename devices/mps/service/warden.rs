// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks after one container: gives each of its streams a worker, and sees them to their end.
//!
//! A thread a container, which waits in one poll for the service and for every worker's socket, standard error and end.
//! What a worker says is a stranger's word.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::StreamOffer;
use rustix::event::{PollFd, PollFlags};

use super::super::control::{FromWorker, Ready, ToWorker, WORKER_VERSION};
use super::super::readings::Readings;
use super::Shared;
use super::live::{Heard, Live, Phase};
use super::nursery::{Door, Wanted, live_fds};
use super::refuse::Refused;
use crate::host::Probe;
use crate::service::crashes::Crashes;
use crate::service::limiter::{Limiter, Verdict};
use crate::service::reports::Reports;
use crate::service::wardens::{Ask, Inbox, has_hung_up, is_readable, wait_for};
use crate::text::{cut, with_causes};

/// How long a worker may take to end after its stream has.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Messages of one worker that are taken before another's turn comes.
const MESSAGES_A_TURN: usize = 16;

/// A stream and its worker.
#[derive(Debug)]
pub(super) struct Serving {
    live: Live,
    /// The client's socket, until the worker is ready for it.
    socket: Option<OwnedFd>,
    wanted: Wanted,
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Warden {
    pub(super) shared: Arc<Shared>,
    pub(super) nursery: Door,
    pub(super) container: String,
    pub(super) device: String,
    pub(super) inbox: Inbox<Infallible>,
    pub(super) readings: Arc<Mutex<Readings>>,
    pub(super) streams: BTreeMap<u64, Serving>,
    pub(super) refused: Refused,
    pub(super) crashes: Crashes,
    /// Of the service's own lines about the container.
    pub(super) limiter: Limiter,
    /// Of the workers' lines.
    pub(super) chatter: Limiter,
    pub(super) reports: Reports,
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
                    Err(TryRecvError::Disconnected) => return self.stop("the service ends"),
                }
            }
            self.wait();
            self.refused.look_after();
            let streams: Vec<u64> = self.streams.keys().copied().collect();
            for stream in streams {
                self.look_after(stream);
            }
        }
    }

    fn readings(&self) -> MutexGuard<'_, Readings> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) {
        let mut fds = vec![PollFd::new(self.inbox.wake(), PollFlags::IN)];
        fds.extend(self.streams.values().flat_map(|one| live_fds(&one.live)));
        let waiting = self.streams.values().filter_map(|one| one.socket.as_ref());
        fds.extend(waiting.map(|socket| PollFd::new(socket, PollFlags::RDHUP)));
        fds.extend(self.refused.fds());
        let deadlines = self.streams.values().filter_map(|one| one.live.deadline());
        wait_for(&mut fds, deadlines.chain(self.refused.deadline()).min());
        if fds.first().is_some_and(|fd| !fd.revents().is_empty()) {
            self.inbox.reset();
        }
    }

    fn stream(&mut self, offer: &StreamOffer, socket: OwnedFd) {
        match self.admit() {
            Ok((live, wanted)) => {
                self.shared.workers.fetch_add(1, Ordering::Relaxed);
                let is_ready = live.phase == Phase::Ready;
                tracing::info!(
                    container = self.container,
                    stream = offer.stream,
                    pid = live.process.pid(),
                    device = wanted.device,
                    is_ready,
                    "worker for a stream"
                );
                self.streams.insert(offer.stream, Serving { live, socket: Some(socket), wanted });
                let open = self.streams.len();
                self.readings().stream_started(open);
                if is_ready {
                    self.pass(offer.stream);
                }
            }
            Err(Refusal { reason, to_client }) => {
                self.refused.add(socket, &to_client);
                self.readings().refused(&reason);
                self.warn(&format!("stream {} is refused: {reason}", offer.stream));
            }
        }
    }

    /// A worker for one more stream.
    fn admit(&self) -> Result<(Live, Wanted), Refusal> {
        if let Some(left) = self.crashes.refused_for(Instant::now()) {
            let reason = format!("its workers crashed too often, wait {} s", left.as_secs() + 1);
            return Err(Refusal::open(reason));
        }
        let most = self.shared.config.max_streams_per_container;
        if self.streams.len() >= usize::try_from(most).unwrap_or(usize::MAX) {
            let reason = format!(
                "this container has {} processes on the device already (mps.max_streams_per_container)",
                self.streams.len()
            );
            return Err(Refusal::open(reason));
        }
        let found = self.shared.engines.get(&self.shared.config);
        let Some(engine) = found.probe.named(&self.device) else {
            return Err(match &found.probe {
                Probe::Missing { reason, remedy } => Refusal {
                    reason: format!("no engine: {reason}; {remedy}"),
                    to_client: "the host has no torch that works; `lighter doctor` there says more"
                        .to_owned(),
                },
                Probe::Found(_) => Refusal::open(format!(
                    "lighter.sh/mps={} is no engine of this host any more",
                    self.device
                )),
            });
        };
        let wanted = Wanted { device: engine.name.clone(), found: Arc::clone(&found) };
        let live = self.nursery.take(wanted.clone()).map_err(|reason| Refusal {
            reason: format!("no worker: {reason}"),
            to_client: "the host could not start a worker; the log of lighter there says more".to_owned(),
        })?;
        Ok((live, wanted))
    }

    /// Gives a ready worker its stream, and makes sure of a spare for the next.
    fn pass(&mut self, stream: u64) {
        let Some(serving) = self.streams.get_mut(&stream) else { return };
        let Some(socket) = serving.socket.take() else { return };
        if let Err(error) = serving.live.pass(stream, &socket) {
            return self.crashed(stream, &format!("it takes no stream: {}", with_causes(&error)));
        }
        self.nursery.keep(serving.wanted.clone());
    }

    fn report(&mut self, done: Sender<()>) {
        let message = ToWorker::Report { seq: self.reports.begin(done) };
        let mut silent = Vec::new();
        for (stream, serving) in &self.streams {
            if serving.live.phase != Phase::Serving {
                continue;
            }
            match serving.live.say(&message) {
                Ok(()) => self.reports.asked(*stream),
                Err(error) => silent.push((*stream, with_causes(&error))),
            }
        }
        for (stream, error) in silent {
            self.crashed(stream, &format!("it takes no message: {error}"));
        }
        self.reports.settle();
    }

    /// Takes in what a worker says and does.
    fn look_after(&mut self, stream: u64) {
        self.log_lines(stream);
        if self.streams.get(&stream).and_then(|one| one.socket.as_ref()).is_some_and(has_hung_up) {
            // Nobody waits for this worker any more.
            return self.forget(stream);
        }
        let mut has_ended = match self.streams.get(&stream) {
            // Asked before its messages are read, so that none of them is lost.
            Some(serving) => is_readable(serving.live.process.pidfd()),
            None => return,
        };
        for _ in 0..MESSAGES_A_TURN {
            let Some(serving) = self.streams.get(&stream) else { return };
            match serving.live.hear() {
                Heard::Message(message) => self.take(stream, message),
                Heard::Rubbish(error) => {
                    return self
                        .crashed(stream, &format!("it sent what is no message: {}", with_causes(&error)));
                }
                Heard::End => {
                    has_ended = true;
                    break;
                }
                Heard::Nothing => break,
            }
        }
        let Some(serving) = self.streams.get(&stream) else { return };
        let is_late = serving.live.deadline().is_some_and(|deadline| deadline <= Instant::now());
        match serving.live.phase {
            Phase::Ending { .. } if has_ended || is_late => self.forget(stream),
            _ if has_ended => self.crashed(stream, "it ended"),
            Phase::Starting { .. } if is_late => {
                let limit_ms = self.shared.config.start_limit_ms;
                self.crashed(stream, &format!("torch was not ready within {limit_ms} ms"));
            }
            _ => {}
        }
    }

    fn take(&mut self, stream: u64, message: FromWorker) {
        let Some(serving) = self.streams.get_mut(&stream) else { return };
        match (message, serving.live.phase) {
            (FromWorker::Ready(ready), Phase::Starting { .. }) => {
                serving.live.phase = Phase::Ready;
                self.ready(stream, &ready);
            }
            (FromWorker::Failed { reason }, _) => {
                self.crashed(stream, &format!("it cannot open the engine: {}", cut(&reason)));
            }
            (FromWorker::Counters(counters), _) => {
                let seq = counters.seq;
                self.readings().update(stream, counters);
                self.reports.answered(stream, seq);
            }
            (FromWorker::Ended { stream: named, reason }, Phase::Serving) if named == stream => {
                serving.live.phase = Phase::Ending { deadline: Instant::now() + END_LIMIT };
                if let Some(reason) = reason {
                    let reason = cut(&reason);
                    self.readings().failed(&reason);
                    self.warn(&format!("stream {stream} ended: {reason}"));
                }
            }
            (FromWorker::Ready(_) | FromWorker::Ended { .. }, _) => {
                self.crashed(stream, "it said what was not its turn to say");
            }
        }
    }

    fn ready(&mut self, stream: u64, ready: &Ready) {
        if ready.version != WORKER_VERSION {
            let theirs = ready.version;
            return self.crashed(
                stream,
                &format!("it speaks version {theirs} and not {WORKER_VERSION}: lighter's parts must be of one release"),
            );
        }
        tracing::info!(
            container = self.container,
            stream,
            torch = cut(&ready.torch),
            python = cut(&ready.python),
            device = cut(&ready.device),
            "worker is ready"
        );
        self.pass(stream);
    }

    fn log_lines(&mut self, stream: u64) {
        let Some(serving) = self.streams.get_mut(&stream) else { return };
        for line in serving.live.process.read_lines() {
            let Verdict::Write { left_out } = self.chatter.check(Instant::now()) else { continue };
            tracing::debug!(container = self.container, stream, left_out, line, "worker says");
        }
    }

    fn warn(&mut self, text: &str) {
        self.limiter.warn(&self.container, text);
    }

    /// A worker is of no use any more: its stream goes with it, and the container may have to wait.
    fn crashed(&mut self, stream: u64, what: &str) {
        let Some(mut serving) = self.remove(stream) else { return };
        let pid = serving.live.process.pid();
        let text = format!("worker broke: {what}{}", serving.live.process.obituary());
        if let Some(socket) = serving.socket.take() {
            self.refused.add(socket, "the host's torch did not start; the log of lighter there says more");
        }
        drop(serving);
        tracing::error!(container = self.container, stream, pid, "{text}");
        // The trouble last: who is told of it finds the container's own account of it.
        self.readings().failed(&text);
        self.shared.trouble(format!("container {}: {text}", self.container));
        if self.crashes.add(Instant::now()) {
            let pause_s = self.shared.config.crash_pause_s;
            let text = format!("workers crash one after another: streams are refused for {pause_s} s");
            tracing::error!(container = self.container, pause_s, "{text}");
            self.shared.trouble(format!("container {}: {text}", self.container));
        }
    }

    /// A worker has ended, or should have by now.
    fn forget(&mut self, stream: u64) {
        let Some(serving) = self.remove(stream) else { return };
        tracing::debug!(container = self.container, stream, pid = serving.live.process.pid(), "worker ended");
    }

    fn remove(&mut self, stream: u64) -> Option<Serving> {
        let mut serving = self.streams.remove(&stream)?;
        // Before it is counted as gone.
        serving.live.process.end();
        self.shared.workers.fetch_sub(1, Ordering::Relaxed);
        let open = self.streams.len();
        self.readings().stream_ended(stream, open);
        self.reports.gone(stream);
        Some(serving)
    }

    /// Ends all workers.
    fn stop(&mut self, why: &str) {
        // All are told before one is waited for.
        for serving in self.streams.values() {
            serving.live.process.kill();
        }
        let streams: Vec<u64> = self.streams.keys().copied().collect();
        for stream in &streams {
            drop(self.remove(*stream));
        }
        if !streams.is_empty() {
            tracing::info!(container = self.container, streams = streams.len(), "workers ended: {why}");
        }
    }
}

/// Why a stream is not served: for the log, and for the container, which is not told about the host.
#[derive(Debug)]
struct Refusal {
    reason: String,
    to_client: String,
}

impl Refusal {
    fn open(reason: String) -> Self {
        Self { to_client: reason.clone(), reason }
    }
}
