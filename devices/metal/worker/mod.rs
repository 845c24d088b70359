// SPDX-License-Identifier: MIT OR Apache-2.0
//! The worker process: ggml, one container's clients, nothing else.
//!
//! The service starts it with one end of a control socket. What a container's bytes may do to ggml ends with
//! this process, so it holds nothing of another container but read-only weights that all have in common.

mod assemble;
mod client;
mod engine;
mod host_step;
mod indices;
mod link;
mod plan;
mod rules;
mod shape;
mod space;
mod transfer;
mod weights;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::PacketError;

use self::client::{ClientError, Socket, is_reset, serve};
use self::engine::Engine;
pub use self::engine::OpenError;
use self::link::Link;
use super::control::{FromWorker, ToWorker, WorkerConfig};
use crate::text::with_causes;

/// How long clients' threads may take to notice the end.
const FAREWELL: Duration = Duration::from_secs(5);

/// Why a worker ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The service did not speak as it should.
    #[error("control socket failed")]
    Control(#[from] PacketError),
    /// The first message was another.
    #[error("the service sent {0} before the configuration")]
    NotConfigured(&'static str),
    /// The engine could not be opened; the service has been told.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Serves until the control socket closes.
///
/// # Errors
/// When the service does not speak as it should, or the engine cannot be opened.
pub fn run(control: OwnedFd) -> Result<(), WorkerError> {
    let link = Arc::new(Link::new(control));
    let config = match link.next()? {
        None => return Ok(()),
        Some((ToWorker::Configure(config), _)) => config,
        Some((ToWorker::Stream { .. }, _)) => return Err(WorkerError::NotConfigured("a stream")),
        Some((ToWorker::Weight { .. }, _)) => return Err(WorkerError::NotConfigured("a weight")),
        Some((ToWorker::Report { .. }, _)) => return Err(WorkerError::NotConfigured("a question")),
    };
    let engine = open(config, &link)?;
    let streams = Streams { engine, link: Arc::clone(&link), open: Arc::default() };
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    while let Some((message, mut descriptors)) = link.next()? {
        match message {
            ToWorker::Configure(_) => tracing::warn!("configured a second time, which changes nothing"),
            ToWorker::Stream { stream, major } => {
                threads.retain(|thread| !thread.is_finished());
                match descriptors.pop() {
                    Some(socket) => threads.extend(streams.start(stream, major, socket)),
                    None => streams.ended(stream, Some("the service sent no socket".to_owned())),
                }
            }
            ToWorker::Weight { seq, found } => link.answer(seq, descriptors.pop().filter(|_| found)),
            ToWorker::Report { seq } => {
                link.say(&FromWorker::Report { seq, counters: streams.engine.report() }, &[]);
            }
        }
    }
    streams.close();
    // Threads within ggml while the process ends would crash in its destructors.
    let until = Instant::now() + FAREWELL;
    while Instant::now() < until && threads.iter().any(|thread| !thread.is_finished()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn open(config: WorkerConfig, link: &Link) -> Result<Arc<Engine>, WorkerError> {
    match Engine::open(config) {
        Ok(engine) => {
            let ready = FromWorker::Ready {
                engine: engine.device.description(),
                version: engine.ggml.version().to_owned(),
            };
            link.say(&ready, &[]);
            Ok(engine)
        }
        Err(error) => {
            link.say(&FromWorker::Failed { reason: with_causes(&error) }, &[]);
            Err(error.into())
        }
    }
}

type OpenSockets = Mutex<HashMap<u64, Weak<OwnedFd>>>;

/// Starts and ends streams.
struct Streams {
    engine: Arc<Engine>,
    link: Arc<Link>,
    open: Arc<OpenSockets>,
}

impl Streams {
    fn ended(&self, stream: u64, error: Option<String>) {
        report_end(&self.engine, &self.link, stream, error);
    }

    fn start(&self, stream: u64, major: Option<u8>, socket: OwnedFd) -> Option<JoinHandle<()>> {
        let Some(place) = self.engine.enter() else {
            let most = self.engine.config.max_streams;
            self.ended(stream, Some(format!("more than {most} streams of the container are open")));
            return None;
        };
        let socket = Arc::new(socket);
        let weak = Arc::downgrade(&socket);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, weak);
        let (engine, link, open) = (Arc::clone(&self.engine), Arc::clone(&self.link), Arc::clone(&self.open));
        let body = move || {
            let socket = Socket::new(socket);
            let served = || serve(socket, major, Arc::clone(&engine), Arc::clone(&link));
            let error = match catch_unwind(AssertUnwindSafe(served)) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(describe(stream, &error)),
                Err(_) => Some("internal error, see the log".to_owned()),
            };
            open.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream);
            drop(place);
            report_end(&engine, &link, stream, error);
        };
        match std::thread::Builder::new().name(format!("stream-{stream}")).spawn(body) {
            Ok(thread) => Some(thread),
            Err(error) => {
                self.ended(stream, Some(format!("no thread for it: {error}")));
                None
            }
        }
    }

    /// Ends all streams.
    fn close(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in open.values().filter_map(Weak::upgrade) {
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
    }
}

fn describe(stream: u64, error: &ClientError) -> String {
    let line = with_causes(error);
    if is_reset(error) {
        tracing::info!(stream, reason = line, "client went away in the middle of a message");
    } else {
        tracing::warn!(stream, reason = line, "stream ended");
    }
    line
}

fn report_end(engine: &Engine, link: &Link, stream: u64, error: Option<String>) {
    if error.is_some() {
        engine.counters.errors.fetch_add(1, Relaxed);
    }
    link.say(&FromWorker::Ended { stream, error }, &[]);
}
