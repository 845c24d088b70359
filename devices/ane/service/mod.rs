// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ane service: a process of its own, started by the daemon, with no ONNX Runtime in it.
//!
//! For each grant it keeps a warden (a thread), and the warden keeps a worker (a process) for each engine that is in
//! use. Nothing is loaded before the first stream.
//!
//! ```text
//! daemon ──streams──► [AneService] ──► warden A ──► worker of the processor, worker of the chosen engine
//!                           └────────► warden B ──► …                     journal, cache: one for all
//! ```

mod cache;
mod choice;
mod compare;
mod engines;
mod forget;
mod frames_io;
mod judge;
mod live;
mod models;
mod route;
mod setup;
mod shared;
mod start;
mod trial;
mod warden;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::{EngineState, GrantId, Kind, ServiceReport, StreamOffer};
use rustix::event::{EventfdFlags, eventfd};

use super::config::AneConfig;
use super::probe::as_probe;
use super::readings::Readings;
use crate::service::crashes::Crashes;
use crate::service::limiter::Limiter;
use crate::service::{ReportAnswer, RevokeAnswer, Service, SpawnError, WorkerProgram, sandbox, serve};

use self::models::Models;
use self::setup::Setups;
use self::shared::Shared;
use self::trial::Trials;
use self::warden::{Ask, Warden};

/// How long a report waits for the workers' counters; then their last ones are used.
const COUNTERS_LIMIT: Duration = Duration::from_millis(500);

/// Why the service cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum AneServiceError {
    /// The loop with the daemon failed.
    #[error("ane service lost its daemon")]
    Serve(#[from] crate::service::ServeError),
    /// There is no program for workers.
    #[error("ane service cannot start workers")]
    Program(#[from] SpawnError),
}

/// Serves the daemon at the other end of `control` until it closes; workers are this program itself.
///
/// # Errors
/// When the control socket fails or this program cannot be opened.
pub fn run(control: OwnedFd, config: AneConfig) -> Result<(), AneServiceError> {
    run_with(control, config, WorkerProgram::own(Kind::Ane)?)
}

/// The same with another program for workers.
///
/// # Errors
/// When the control socket fails.
pub fn run_with(control: OwnedFd, config: AneConfig, program: WorkerProgram) -> Result<(), AneServiceError> {
    let mut service = AneService::new(config, program);
    let ended = serve(control, &mut service);
    service.end();
    Ok(ended?)
}

/// Where a warden is reached.
#[derive(Debug, Clone)]
struct Mailbox {
    asks: Sender<Ask>,
    wake: Arc<OwnedFd>,
}

impl Mailbox {
    fn send(&self, ask: Ask) {
        // Fails only when the warden has ended or panicked, which is told when it is joined.
        let _ = self.asks.send(ask);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The service's side of one warden.
#[derive(Debug)]
struct Handle {
    mailbox: Mailbox,
    ending: Arc<AtomicBool>,
    readings: Arc<Mutex<Readings>>,
    thread: JoinHandle<()>,
}

impl Handle {
    /// Has the warden end; what it is in the middle of is cut short.
    fn end(&self, answer: Option<RevokeAnswer>) {
        self.ending.store(true, Ordering::Relaxed);
        self.mailbox.send(Ask::End(answer));
    }
}

/// The service.
#[derive(Debug)]
struct AneService {
    shared: Arc<Shared>,
    wardens: BTreeMap<GrantId, Handle>,
}

impl AneService {
    fn new(config: AneConfig, program: WorkerProgram) -> Self {
        tracing::info!(
            sandbox = if config.sandbox { sandbox::describe() } else { "off".to_owned() },
            units = %config.units,
            "ane service starts"
        );
        Self { shared: Arc::new(Shared::new(config, program)), wardens: BTreeMap::new() }
    }

    fn warden(&self, offer: &StreamOffer) -> std::io::Result<Handle> {
        let config = &self.shared.config;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (asks, receiver) = channel();
        let mailbox = Mailbox { asks, wake };
        let ending = Arc::new(AtomicBool::new(false));
        let readings = Arc::new(Mutex::new(Readings::new(&offer.container)));
        let setups = Setups {
            shared: Arc::clone(&self.shared),
            models: Arc::new(Models::new(self.shared.max_model_bytes, config.max_models_per_container)),
            ending: Arc::clone(&ending),
            busy: Arc::new(AtomicUsize::new(0)),
            mailbox: mailbox.clone(),
        };
        let crashes = Crashes::new(
            config.crash_limit,
            Duration::from_secs(config.crash_window_s),
            Duration::from_secs(config.crash_pause_s),
        );
        let warden = Warden {
            shared: Arc::clone(&self.shared),
            container: offer.container.clone(),
            owner: offer.owner.clone(),
            device: offer.device.clone(),
            asks: receiver,
            mailbox: mailbox.clone(),
            readings: Arc::clone(&readings),
            setups,
            host: None,
            workers: BTreeMap::new(),
            models: BTreeMap::new(),
            trials: Trials::default(),
            crashes,
            limiter: Limiter::new(Instant::now()),
            chatter: Limiter::new(Instant::now()),
            report_seq: 0,
            reports_due: 0,
            reporters: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("warden".to_owned()).spawn(move || warden.run())?;
        Ok(Handle { mailbox, ending, readings, thread })
    }

    /// Ends all workers and waits for their ends.
    fn end(self) {
        for handle in self.wardens.values() {
            handle.end(None);
        }
        for (grant, handle) in self.wardens {
            if handle.thread.join().is_err() {
                tracing::error!(%grant, "the thread of a container has panicked");
            }
        }
    }
}

impl Service for AneService {
    fn stream(&mut self, offer: StreamOffer, socket: OwnedFd) {
        if !self.wardens.contains_key(&offer.grant) {
            match self.warden(&offer) {
                Ok(handle) => drop(self.wardens.insert(offer.grant.clone(), handle)),
                Err(error) => {
                    tracing::error!(container = offer.container, %error, "no thread for a container");
                    return;
                }
            }
        }
        if let Some(handle) = self.wardens.get(&offer.grant) {
            handle.mailbox.send(Ask::Stream(offer, socket));
        }
    }

    fn revoke(&mut self, grant: GrantId, answer: RevokeAnswer) {
        match self.wardens.remove(&grant) {
            Some(handle) => handle.end(Some(answer)),
            // A container that never opened a stream.
            None => answer.done(),
        }
    }

    fn report(&mut self, answer: ReportAnswer) {
        let (done, all_done) = channel();
        let mut readings = BTreeMap::new();
        for (grant, handle) in &self.wardens {
            handle.mailbox.send(Ask::Report(done.clone()));
            readings.insert(grant.to_string(), Arc::clone(&handle.readings));
        }
        drop(done);
        let shared = Arc::clone(&self.shared);
        // Workers and the probe of the engines take their time; streams do not wait for that.
        let thread = std::thread::Builder::new().name("report".to_owned()).spawn(move || {
            let engine = engine_state(&shared);
            // Nobody sends anything: the channel closes when the last warden has let go of its end.
            if all_done.recv_timeout(COUNTERS_LIMIT) == Err(RecvTimeoutError::Timeout) {
                tracing::debug!("a worker did not say its counters in time");
            }
            answer.send(compose(&shared, engine, &readings));
        });
        if let Err(error) = thread {
            tracing::error!(%error, "no thread for a report");
        }
    }
}

fn engine_state(shared: &Shared) -> EngineState {
    let found = shared.engines.get(&shared.program, &shared.config).map(|host| host.engines.clone());
    as_probe(&found, &shared.config.units).state()
}

fn compose(
    shared: &Shared,
    engine: EngineState,
    readings: &BTreeMap<String, Arc<Mutex<Readings>>>,
) -> ServiceReport {
    // Before the containers' accounts, which are written first.
    let troubles = shared.troubles();
    let mut containers = BTreeMap::new();
    let mut totals = BTreeMap::from([("workers".to_owned(), shared.workers.load(Ordering::Relaxed))]);
    for (grant, readings) in readings {
        let readings = readings.lock().unwrap_or_else(PoisonError::into_inner);
        let report = readings.report();
        for (engine, runs) in readings.runs() {
            *totals.entry(format!("runs_{engine}")).or_default() += runs;
        }
        *totals.entry("model_bytes".to_owned()).or_default() += report.held_bytes;
        containers.insert(grant.clone(), report);
    }
    ServiceReport { engine, containers, totals, troubles }
}
