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
mod messages;
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
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::{EngineState, GrantId, Kind, ServiceReport, StreamOffer};

use super::config::AneConfig;
use super::probe::as_probe;
use super::readings::Readings;
use crate::service::crashes::Crashes;
use crate::service::limiter::Limiter;
use crate::service::wardens::{Accounts, Handle, Wardens, mailbox};
use crate::service::{ReportAnswer, RevokeAnswer, Service, SpawnError, WorkerProgram, sandbox, serve};

use self::models::Models;
use self::setup::Setups;
use self::shared::Shared;
use self::trial::Trials;
use self::warden::{Own, Warden};

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
    service.wardens.end();
    Ok(ended?)
}

/// The service.
#[derive(Debug)]
struct AneService {
    shared: Arc<Shared>,
    wardens: Wardens<Own, Readings>,
}

impl AneService {
    fn new(config: AneConfig, program: WorkerProgram) -> Self {
        tracing::info!(
            sandbox = if config.sandbox { sandbox::describe() } else { "off".to_owned() },
            units = %config.units,
            "ane service starts"
        );
        Self { shared: Arc::new(Shared::new(config, program)), wardens: Wardens::default() }
    }

    fn warden(shared: &Arc<Shared>, offer: &StreamOffer) -> std::io::Result<Handle<Own, Readings>> {
        let config = &shared.config;
        let (mailbox, inbox) = mailbox()?;
        let ending = Arc::new(AtomicBool::new(false));
        let readings = Arc::new(Mutex::new(Readings::new(&offer.container)));
        let setups = Setups {
            shared: Arc::clone(shared),
            models: Arc::new(Models::new(shared.max_model_bytes, config.max_models_per_container)),
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
            shared: Arc::clone(shared),
            container: offer.container.clone(),
            owner: offer.owner.clone(),
            device: offer.device.clone(),
            inbox,
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
}

impl Service for AneService {
    fn stream(&mut self, offer: StreamOffer, socket: OwnedFd) {
        self.wardens.stream(offer, socket, |offer| Self::warden(&self.shared, offer));
    }

    fn revoke(&mut self, grant: GrantId, answer: RevokeAnswer) {
        self.wardens.revoke(&grant, answer);
    }

    fn report(&mut self, answer: ReportAnswer) {
        let (probing, shared) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        self.wardens.report(
            answer,
            move || engine_state(&probing),
            move |engine, accounts| compose(&shared, engine, accounts),
        );
    }
}

fn engine_state(shared: &Shared) -> EngineState {
    let found = shared.engines.get(&shared.program, &shared.config).map(|host| host.engines.clone());
    as_probe(&found, &shared.config.units).state()
}

fn compose(shared: &Shared, engine: EngineState, accounts: &Accounts<Readings>) -> ServiceReport {
    // Before the containers' accounts, which are written first.
    let troubles = shared.troubles();
    let mut containers = BTreeMap::new();
    let mut totals = BTreeMap::from([("workers".to_owned(), shared.workers.load(Ordering::Relaxed))]);
    for (grant, readings) in accounts {
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
