// SPDX-License-Identifier: MIT OR Apache-2.0
//! The worker process: one ONNX Runtime with one provider, one grant's models and streams, nothing else.
//!
//! The service starts it with one end of a control socket. What a container's models and data may do to ONNX Runtime
//! ends with this process, which holds nothing of another container.
//!
//! ```text
//!   control socket ─► this thread: approvals, recalls, streams, questions: never waits for the engine
//!                       ├─► jobs, one thread: loading and trials, which take as long as compiling takes
//!                       ├─► one thread a stream: runs
//!                       └─► one thread that tells of counters while they move
//! ```

mod compute;
mod engine;
mod link;
mod memory;
mod model;
mod parcel;
mod policy;
mod proto;
mod ring;
mod socket;
mod stream;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::PacketError;

use self::engine::Engine;
pub use self::engine::OpenError;
use self::link::Link;
use self::model::{LoadedModel, lock};
use self::ring::Ring;
use self::socket::Socket;
use self::stream::{End, Stream, StreamError};
use super::control::{
    Bytes, FromWorker, Handover, Model, ModelHash, Outcome, Shapes, ToWorker, Trial, WORKER_VERSION,
    WorkerConfig,
};
use super::ort::Stop;
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
    #[error("the service sent another message before the configuration")]
    NotConfigured,
    /// The engine could not be opened; the service has been told.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The system has no thread for a part of it.
    #[error("no thread for the worker's own work")]
    Thread(#[source] std::io::Error),
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
        Some(_) => return Err(WorkerError::NotConfigured),
    };
    let engine = open(config, &link)?;
    let (jobs, queue) = channel();
    let models = Models::default();
    let counting = Arc::clone(&engine);
    start("counters", move || counting.tell_counters())?;
    let working = Worker { engine, models: Arc::new(models), jobs, streams: Arc::default() };
    let working_jobs = Arc::clone(&working.models);
    let jobs_engine = Arc::clone(&working.engine);
    let mut threads = vec![start("jobs", move || do_jobs(&jobs_engine, &working_jobs, &queue))?];
    while let Some((message, descriptors)) = link.next()? {
        threads.retain(|thread| !thread.is_finished());
        threads.extend(working.take(message, descriptors));
    }
    working.close();
    // With it goes the sender of jobs, and with that their thread.
    drop(working);
    // Threads within the engine while the process ends would crash in its destructors.
    let until = Instant::now() + FAREWELL;
    while Instant::now() < until && threads.iter().any(|thread| !thread.is_finished()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, WorkerError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(WorkerError::Thread)
}

fn open(config: WorkerConfig, link: &Arc<Link>) -> Result<Arc<Engine>, WorkerError> {
    let version = config.version;
    let opened = if version == WORKER_VERSION {
        Engine::open(config, Arc::clone(link))
    } else {
        Err(OpenError::Version { service: version, worker: WORKER_VERSION })
    };
    match opened {
        Ok(engine) => {
            let (ort_version, providers) = (engine.ort.version().to_owned(), engine.ort.providers().to_vec());
            link.say(&FromWorker::Ready { version: WORKER_VERSION, ort_version, providers }, &[]);
            Ok(engine)
        }
        Err(error) => {
            link.say(&FromWorker::Failed { reason: with_causes(&error) }, &[]);
            Err(error.into())
        }
    }
}

/// Models by name.
type Models = Mutex<HashMap<ModelHash, Arc<LoadedModel>>>;
/// Streams by number.
type Streams = Mutex<HashMap<u64, Watched>>;

/// What ends a stream from outside of its thread.
struct Watched {
    model: ModelHash,
    socket: Weak<OwnedFd>,
    stop: Weak<Stop>,
}

/// What takes as long as the engine takes.
enum Job {
    Load(Arc<LoadedModel>),
    Trial(Arc<LoadedModel>, Trial, OwnedFd),
}

fn do_jobs(engine: &Engine, models: &Models, queue: &Receiver<Job>) {
    for job in queue {
        match job {
            Job::Load(model) => load(engine, models, &model),
            Job::Trial(model, trial, file) => {
                let tried = catch_unwind(AssertUnwindSafe(|| compute::trial(engine, &model, &trial, &file)));
                let (outcome, file) = tried.unwrap_or_else(|_| {
                    (Outcome::NotRun { reason: "internal error, see the log".to_owned() }, None)
                });
                let descriptors: Vec<_> = file.iter().map(AsFd::as_fd).collect();
                let message = FromWorker::TrialDone { trial: trial.trial, outcome };
                engine.link.say(&message, &descriptors);
            }
        }
    }
}

/// Looks a model through, and compiles the session that serves all shapes, where there is one.
fn load(engine: &Engine, models: &Models, model: &Arc<LoadedModel>) {
    let hash = model.hash;
    let compiled = if engine.config.bind_shapes {
        model.check().map(|()| 0)
    } else {
        model.session(&Shapes::default()).map(|compiled| compiled.compile_us)
    };
    match compiled {
        Ok(compile_us) => engine.link.say(&FromWorker::Loaded { model: hash, compile_us }, &[]),
        Err(reason) => {
            lock(models).remove(&hash);
            engine.counters.failed(&reason);
            engine.link.say(&FromWorker::LoadFailed { model: hash, reason }, &[]);
        }
    }
}

/// The control thread's view.
struct Worker {
    engine: Arc<Engine>,
    models: Arc<Models>,
    jobs: Sender<Job>,
    streams: Arc<Streams>,
}

impl Worker {
    /// Does what a message says; gives back the thread of a new stream.
    fn take(&self, message: ToWorker, mut descriptors: Vec<OwnedFd>) -> Option<JoinHandle<()>> {
        match message {
            ToWorker::Configure(_) => tracing::warn!("configured a second time, which changes nothing"),
            ToWorker::Load(model) => self.load(&model, descriptors.pop()),
            ToWorker::ApproveAll { model } => self.with(model, |model| model.policy().approve_all()),
            ToWorker::Approve { model, shapes } => {
                self.with(model, |model| model.policy().approve(shapes));
            }
            ToWorker::Recall { model, shapes } => self.with(model, |model| model.policy().recall(shapes)),
            ToWorker::Sample { model, shapes } => {
                self.with(model, |model| model.policy().want_sample(shapes));
            }
            ToWorker::Stream(handover) => return self.start_stream(handover, descriptors),
            ToWorker::Trial(trial) => self.trial(trial, descriptors.pop()),
            ToWorker::Forget { model } => self.forget(model),
            ToWorker::Report { seq } => self.engine.link.say(&self.engine.report(seq), &[]),
        }
        None
    }

    fn find(&self, model: ModelHash) -> Option<Arc<LoadedModel>> {
        lock(&self.models).get(&model).cloned()
    }

    fn with(&self, model: ModelHash, act: impl FnOnce(&LoadedModel)) {
        match self.find(model) {
            Some(model) => act(&model),
            None => tracing::debug!(%model, "message about a model that is not loaded"),
        }
    }

    fn load(&self, model: &Model, file: Option<OwnedFd>) {
        let hash = model.model;
        if let Some(there) = self.find(hash) {
            return self.queue(Job::Load(there));
        }
        let loaded = match file {
            Some(file) => LoadedModel::new(&self.engine, model, &file).map_err(|error| with_causes(&error)),
            None => Err("the service sent no file".to_owned()),
        };
        match loaded {
            Ok(loaded) => {
                let loaded = Arc::new(loaded);
                lock(&self.models).insert(hash, Arc::clone(&loaded));
                self.queue(Job::Load(loaded));
            }
            Err(reason) => {
                self.engine.counters.failed(&reason);
                self.engine.link.say(&FromWorker::LoadFailed { model: hash, reason }, &[]);
            }
        }
    }

    fn trial(&self, trial: Trial, file: Option<OwnedFd>) {
        match (self.find(trial.model), file) {
            (Some(model), Some(file)) => self.queue(Job::Trial(model, trial, file)),
            (model, _) => {
                let what = if model.is_none() { "the model is not loaded" } else { "no inputs came" };
                let outcome = Outcome::NotRun { reason: what.to_owned() };
                self.engine.link.say(&FromWorker::TrialDone { trial: trial.trial, outcome }, &[]);
            }
        }
    }

    fn queue(&self, job: Job) {
        // The thread lives as long as the sender.
        if self.jobs.send(job).is_err() {
            tracing::error!("the thread for jobs is gone");
        }
    }

    fn forget(&self, model: ModelHash) {
        let found = lock(&self.models).remove(&model);
        match found {
            None => self.engine.link.say(&FromWorker::Forgotten { model }, &[]),
            Some(found) => {
                found.forget();
                self.shut(|of| of == model);
            }
        }
    }

    /// Ends streams, and the runs in them.
    fn shut(&self, which: impl Fn(ModelHash) -> bool) {
        for watched in lock(&self.streams).values().filter(|watched| which(watched.model)) {
            if let Some(socket) = watched.socket.upgrade() {
                let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
            }
            if let Some(stop) = watched.stop.upgrade() {
                stop.stop();
            }
        }
    }

    fn close(&self) {
        self.shut(|_| true);
    }

    fn start_stream(&self, handover: Handover, descriptors: Vec<OwnedFd>) -> Option<JoinHandle<()>> {
        let number = handover.stream;
        let refuse = |error: String| {
            self.engine.counters.failed(&error);
            self.engine.link.say(&FromWorker::Ended { stream: number, error: Some(error) }, &[]);
        };
        let Some(model) = self.find(handover.model) else {
            refuse(format!("model {} is not loaded", handover.model));
            return None;
        };
        if lock(&self.streams).len() >= usize::try_from(self.engine.config.max_streams).unwrap_or(0) {
            refuse(format!("more than {} streams are open", self.engine.config.max_streams));
            return None;
        }
        let stream = match self.open_stream(&handover, model, descriptors) {
            Ok(stream) => stream,
            Err(error) => {
                refuse(with_causes(&error));
                return None;
            }
        };
        let (socket, stop) = (Arc::downgrade(&stream.socket.socket), Arc::downgrade(&stream.stop));
        let watched = Watched { model: handover.model, socket, stop };
        lock(&self.streams).insert(number, watched);
        let (engine, streams) = (Arc::clone(&self.engine), Arc::clone(&self.streams));
        engine.counters.streams_open.fetch_add(1, Relaxed);
        engine.counters.streams_total.fetch_add(1, Relaxed);
        match start(&format!("stream-{number}"), move || serve(&engine, &streams, stream, &handover)) {
            Ok(thread) => Some(thread),
            Err(error) => {
                lock(&self.streams).remove(&number);
                self.engine.counters.streams_open.fetch_sub(1, Relaxed);
                refuse(with_causes(&error));
                None
            }
        }
    }

    fn open_stream(
        &self,
        handover: &Handover,
        model: Arc<LoadedModel>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Stream, StreamError> {
        let mut descriptors = descriptors.into_iter();
        let socket = descriptors.next().ok_or(StreamError::NoMemory)?;
        let ring = if handover.ring { Some(descriptors.next().ok_or(StreamError::NoMemory)?) } else { None };
        let limit = stream::ring_limit(self.engine.config.max_run_bytes);
        let ring = ring.map(|file| {
            let bytes = rustix::fs::fstat(&file).map_or(0, |found| found.st_size);
            Ring::new(file.into(), u64::try_from(bytes).unwrap_or(0), limit)
        });
        let mut pending = handover.pending.clone().unwrap_or_default().0;
        if let Some(data) = descriptors.next() {
            let bytes = rustix::fs::fstat(&data).map_or(0, |found| found.st_size);
            let start = pending.len();
            let end = start.saturating_add(usize::try_from(bytes).unwrap_or(0));
            pending.resize(end, 0);
            let rest = pending.get_mut(start..).unwrap_or_default();
            parcel::read_at(&data, rest, 0).map_err(socket::SocketError::Broken)?;
        }
        Ok(Stream {
            engine: Arc::clone(&self.engine),
            model,
            number: handover.stream,
            socket: Socket::new(Arc::new(socket), pending),
            ring: ring.transpose()?,
            buffer: memory::Buffer::default(),
            stop: Arc::new(Stop::new(&self.engine.ort)?),
        })
    }
}

/// The life of one stream's thread.
fn serve(engine: &Engine, streams: &Streams, stream: Stream, handover: &Handover) {
    let number = handover.stream;
    let socket = Arc::clone(&stream.socket.socket);
    // To the end of this function: the model is forgotten after its streams have ended.
    let _model = Arc::clone(&stream.model);
    let served = catch_unwind(AssertUnwindSafe(|| stream.serve()));
    lock(streams).remove(&number);
    engine.counters.streams_open.fetch_sub(1, Relaxed);
    let error = match served {
        Ok(Ok(End::Back { wants, pending, ring, data })) => {
            let pending = pending.map(Bytes);
            let stream = Handover { ring: ring.is_some(), pending, ..handover.clone() };
            let mut descriptors = vec![socket.as_fd()];
            descriptors.extend(ring.iter().map(AsFd::as_fd));
            descriptors.extend(data.iter().map(AsFd::as_fd));
            engine.link.say(&FromWorker::HandBack { stream, wants }, &descriptors);
            return;
        }
        Ok(Ok(End::Closed)) => None,
        Ok(Err(error)) => Some(with_causes(&error)),
        Err(_) => Some("internal error, see the log".to_owned()),
    };
    if let Some(error) = &error {
        tracing::warn!(stream = number, reason = error, "stream ended");
        engine.counters.failed(error);
    }
    // The socket goes first: who hears of the end may count on it.
    drop(socket);
    engine.link.say(&FromWorker::Ended { stream: number, error }, &[]);
}
