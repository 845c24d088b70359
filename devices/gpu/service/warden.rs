// SPDX-License-Identifier: MIT OR Apache-2.0
//! One container: a thread that has a session and a render server for each of its streams.
//!
//! A stream's processes end together: whichever ends first, the session is killed, and with that the client is told.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::StreamOffer;
use rustix::event::{PollFd, PollFlags};

use super::super::control::{FromSession, ToSession};
use super::super::readings::Readings;
use super::Shared;
use super::live::{Heard, Live, Phase};
use super::start::start;
use crate::host::Probe;
use crate::service::crashes::Crashes;
use crate::service::limiter::{Limiter, Verdict};
use crate::service::reports::Reports;
use crate::service::wardens::{Ask, Inbox, has_hung_up, wait_for};
use crate::text::{cut, with_causes};

/// How long a session may take to end after its client has gone.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Messages of one session that are taken before another's turn comes.
const MESSAGES_A_TURN: usize = 16;

/// A stream and its processes.
#[derive(Debug)]
pub(super) struct Serving {
    live: Live,
    /// The client's socket, until the session is ready for it.
    socket: Option<OwnedFd>,
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct Warden {
    pub(super) shared: Arc<Shared>,
    pub(super) container: String,
    pub(super) device: String,
    pub(super) inbox: Inbox<Infallible>,
    pub(super) readings: Arc<Mutex<Readings>>,
    pub(super) streams: BTreeMap<u64, Serving>,
    pub(super) crashes: Crashes,
    /// Of the service's own lines about the container.
    pub(super) limiter: Limiter,
    /// Of the renderers' lines.
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
        for serving in self.streams.values() {
            fds.extend(serving.live.fds().map(|fd| PollFd::new(fd, PollFlags::IN)));
            fds.extend(serving.socket.iter().map(|socket| PollFd::new(socket, PollFlags::RDHUP)));
        }
        wait_for(&mut fds, self.streams.values().filter_map(|one| one.live.deadline()).min());
        if fds.first().is_some_and(|fd| !fd.revents().is_empty()) {
            self.inbox.reset();
        }
    }

    fn stream(&mut self, offer: &StreamOffer, socket: OwnedFd) {
        match self.admit(offer) {
            Ok((live, label)) => {
                self.shared.sessions.fetch_add(1, Ordering::Relaxed);
                tracing::info!(
                    container = self.container,
                    stream = offer.stream,
                    session = live.session.pid(),
                    render_server = live.server.pid(),
                    gpus = label,
                    "session for a Vulkan instance"
                );
                self.streams.insert(offer.stream, Serving { live, socket: Some(socket) });
                let open = self.streams.len();
                self.readings().stream_started(open);
            }
            Err(reason) => {
                // Its first request is unread, so that the client sees a broken connection and not an end.
                drop(socket);
                self.readings().failed(&reason);
                self.warn(&format!("stream {} is refused: {reason}", offer.stream));
            }
        }
    }

    /// Processes for one more stream.
    fn admit(&self, offer: &StreamOffer) -> Result<(Live, String), String> {
        if let Some(left) = self.crashes.refused_for(Instant::now()) {
            return Err(format!("its renderers crashed too often, wait {} s", left.as_secs() + 1));
        }
        let most = self.shared.config.max_instances_per_container;
        if self.streams.len() >= usize::try_from(most).unwrap_or(usize::MAX) {
            return Err(format!(
                "this container has {} Vulkan instances already (gpu.max_instances_per_container)",
                self.streams.len()
            ));
        }
        let found = self.shared.engines.get(&self.shared.config);
        if let Probe::Missing { reason, remedy } = found.probe() {
            return Err(format!("no GPU: {reason}; {remedy}"));
        }
        let choice = found
            .choose(&self.device)
            .ok_or_else(|| format!("lighter.sh/gpu={} is no GPU of this host any more", self.device))?;
        let live = start(&self.shared.config, &found, &choice, &offer.groups)
            .map_err(|reason| format!("no session: {reason}"))?;
        Ok((live, choice.label))
    }

    fn report(&mut self, done: Sender<()>) {
        let message = ToSession::Report { seq: self.reports.begin(done) };
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
            self.crashed(stream, &format!("the session takes no message: {error}"));
        }
        self.reports.settle();
    }

    /// Takes in what a stream's processes say and do.
    fn look_after(&mut self, stream: u64) {
        self.log_lines(stream);
        if self.streams.get(&stream).and_then(|one| one.socket.as_ref()).is_some_and(has_hung_up) {
            return self.forget(stream);
        }
        // Asked before the session's messages are read: what it said before is then read too.
        let Some(mut ended) = self.streams.get(&stream).map(|serving| serving.live.ended()) else { return };
        for _ in 0..MESSAGES_A_TURN {
            let Some(serving) = self.streams.get(&stream) else { return };
            match serving.live.hear() {
                Heard::Message(message) => self.take(stream, message),
                Heard::Rubbish(error) => {
                    return self.crashed(
                        stream,
                        &format!("the session sent what is no message: {}", with_causes(&error)),
                    );
                }
                Heard::End => {
                    ended = ended.or(Some("the session"));
                    break;
                }
                Heard::Nothing => break,
            }
        }
        let Some(serving) = self.streams.get(&stream) else { return };
        let is_late = serving.live.deadline().is_some_and(|deadline| deadline <= Instant::now());
        match (serving.live.phase, ended) {
            (Phase::Ending { .. }, Some(_)) => self.forget(stream),
            (Phase::Ending { .. }, None) if is_late => self.forget(stream),
            (_, Some(who)) => self.crashed(stream, &format!("{who} ended")),
            (Phase::Starting { .. }, None) if is_late => {
                let limit_ms = self.shared.config.start_limit_ms;
                self.crashed(stream, &format!("the renderer was not ready within {limit_ms} ms"));
            }
            _ => {}
        }
    }

    fn take(&mut self, stream: u64, message: FromSession) {
        let Some(serving) = self.streams.get_mut(&stream) else { return };
        match (message, serving.live.phase) {
            (FromSession::Ready { capset_version }, Phase::Starting { .. }) => {
                tracing::debug!(container = self.container, stream, capset_version, "renderer is ready");
                let Some(socket) = serving.socket.take() else { return };
                if let Err(error) = serving.live.pass(stream, &socket) {
                    self.crashed(stream, &format!("the session takes no client: {}", with_causes(&error)));
                }
            }
            (FromSession::Failed { reason }, _) => {
                self.crashed(stream, &format!("the renderer does not start: {}", cut(&reason)));
            }
            (FromSession::Context { name }, Phase::Serving) => {
                serving.live.watch_gpu();
                tracing::info!(container = self.container, stream, program = cut(&name), "Vulkan instance");
            }
            (FromSession::Counters(counters), _) => {
                let seq = counters.seq;
                self.readings().update(stream, counters);
                self.reports.answered(stream, seq);
            }
            (FromSession::Ended { stream: named, reason }, Phase::Serving) if named == stream => {
                serving.live.phase = Phase::Ending { deadline: Instant::now() + END_LIMIT };
                if let Some(reason) = reason {
                    let reason = cut(&reason);
                    self.readings().failed(&reason);
                    self.warn(&format!("stream {stream} ended: {reason}"));
                }
            }
            (FromSession::Ready { .. } | FromSession::Context { .. } | FromSession::Ended { .. }, _) => {
                self.crashed(stream, "the session said what was not its turn to say");
            }
        }
    }

    fn log_lines(&mut self, stream: u64) {
        let Some(serving) = self.streams.get_mut(&stream) else { return };
        let live = &mut serving.live;
        let lines = live.session.read_lines().into_iter().chain(live.server.read_lines());
        for line in lines.collect::<Vec<_>>() {
            let Verdict::Write { left_out } = self.chatter.check(Instant::now()) else { continue };
            tracing::debug!(container = self.container, stream, left_out, line, "renderer says");
        }
    }

    fn warn(&mut self, text: &str) {
        self.limiter.warn(&self.container, text);
    }

    /// A stream is of no use any more: its processes go, and the container may have to wait.
    fn crashed(&mut self, stream: u64, what: &str) {
        let Some(mut serving) = self.remove(stream) else { return };
        let text = format!("renderer broke: {what}{}", serving.live.obituary());
        drop(serving);
        tracing::error!(container = self.container, stream, "{text}");
        // The trouble last: who is told of it finds the container's own account of it.
        self.readings().failed(&text);
        self.shared.trouble(format!("container {}: {text}", self.container));
        if self.crashes.add(Instant::now()) {
            let pause_s = self.shared.config.crash_pause_s;
            let text = format!("renderers crash one after another: streams are refused for {pause_s} s");
            tracing::error!(container = self.container, pause_s, "{text}");
            self.shared.trouble(format!("container {}: {text}", self.container));
        }
    }

    /// A stream's processes have ended, or should have by now.
    fn forget(&mut self, stream: u64) {
        if self.remove(stream).is_none() {
            return;
        }
        tracing::debug!(container = self.container, stream, "session ended");
    }

    fn remove(&mut self, stream: u64) -> Option<Serving> {
        let mut serving = self.streams.remove(&stream)?;
        // Before it is counted as gone.
        serving.live.end();
        self.shared.sessions.fetch_sub(1, Ordering::Relaxed);
        let open = self.streams.len();
        self.readings().stream_ended(stream, open);
        self.reports.gone(stream);
        Some(serving)
    }

    /// Ends all.
    fn stop(&mut self, why: &str) {
        // All are told before one is waited for.
        for serving in self.streams.values() {
            serving.live.kill();
        }
        let streams: Vec<u64> = self.streams.keys().copied().collect();
        for stream in &streams {
            self.forget(*stream);
        }
        if !streams.is_empty() {
            tracing::info!(container = self.container, streams = streams.len(), "sessions ended: {why}");
        }
    }
}
