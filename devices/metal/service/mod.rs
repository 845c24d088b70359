// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metal service: a process of its own, started by the daemon, with no ggml in it.
//!
//! For each grant it keeps a warden (a thread), and the warden keeps a worker (a process) while there are streams.
//! Nothing is loaded before the first stream.
//!
//! ```text
//! daemon ──streams──► [MetalService] ──► warden A ──► worker A (ggml)
//!                            └─────────► warden B ──► worker B (ggml)      weights: one store for all
//! ```

mod backing;
mod cache;
mod engines;
mod live;
#[cfg(test)]
mod mapping_for_tests;
mod peer;
mod warden;
mod weights;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::{GrantId, Kind, ServiceReport, StreamOffer};

use super::MetalConfig;
use super::readings::Readings;
use crate::service::crashes::Crashes;
use crate::service::limiter::Limiter;
use crate::service::troubles::Troubles;
use crate::service::wardens::{Accounts, Handle, Wardens, mailbox};
use crate::service::{ReportAnswer, RevokeAnswer, Service, sandbox, serve};

pub use crate::service::{SpawnError, WorkerProgram};
pub use peer::major_of_files;

use self::backing::Backing;
use self::cache::Cache;
use self::engines::Engines;
use self::peer::Peers;
use self::warden::Warden;
use self::weights::{Limits, WeightStore};

/// Why the service cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum MetalServiceError {
    /// The loop with the daemon failed.
    #[error("metal service lost its daemon")]
    Serve(#[from] crate::service::ServeError),
    /// There is no program for workers.
    #[error("metal service cannot start workers")]
    Program(#[from] SpawnError),
}

/// Serves the daemon at the other end of `control` until it closes; workers are this program itself.
///
/// # Errors
/// When the control socket fails or this program cannot be opened.
pub fn run(control: OwnedFd, config: MetalConfig) -> Result<(), MetalServiceError> {
    run_with(control, config, WorkerProgram::own(Kind::Metal)?)
}

/// The same with another program for workers.
///
/// # Errors
/// When the control socket fails.
pub fn run_with(
    control: OwnedFd,
    config: MetalConfig,
    program: WorkerProgram,
) -> Result<(), MetalServiceError> {
    let mut service = MetalService::new(config, program);
    let ended = serve(control, &mut service);
    service.wardens.end();
    Ok(ended?)
}

/// What the wardens share.
#[derive(Debug)]
struct Shared {
    config: MetalConfig,
    program: WorkerProgram,
    engines: Engines,
    weights: Arc<WeightStore>,
    peers: Peers,
    troubles: Mutex<Troubles>,
    workers: AtomicU64,
    worker_numbers: AtomicU64,
}

impl Shared {
    fn trouble(&self, text: String) {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).add(text);
    }

    fn next_worker(&self) -> u64 {
        self.worker_numbers.fetch_add(1, Ordering::Relaxed)
    }
}

/// The service.
#[derive(Debug)]
struct MetalService {
    shared: Arc<Shared>,
    wardens: Wardens<Infallible, Readings>,
}

impl MetalService {
    fn new(config: MetalConfig, program: WorkerProgram) -> Self {
        let backing = Backing::open(config.sandbox && sandbox::can_change_users());
        let cache = (config.cache_max_bytes > 0)
            .then(|| Cache::new(config.cache_dir.clone(), config.cache_max_bytes));
        let limits = Limits {
            bytes: config.max_shared_bytes.unwrap_or_else(|| crate::system::memory_bytes() / 4 * 3),
            // The other half is for streams, workers and the log.
            count: crate::system::raise_descriptor_limit() / 2,
        };
        tracing::info!(
            sandbox = if config.sandbox { sandbox::describe() } else { "off".to_owned() },
            weights = backing.describe(),
            disk_cache = cache.is_some(),
            "metal service starts"
        );
        let shared = Shared {
            weights: Arc::new(WeightStore::new(backing, limits, cache)),
            config,
            program,
            engines: Engines::default(),
            peers: Peers::default(),
            troubles: Mutex::default(),
            workers: AtomicU64::new(0),
            worker_numbers: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), wardens: Wardens::default() }
    }

    fn warden(shared: &Arc<Shared>, offer: &StreamOffer) -> std::io::Result<Handle<Infallible, Readings>> {
        let (mailbox, inbox) = mailbox()?;
        let ending = Arc::new(AtomicBool::new(false));
        let readings = Arc::new(Mutex::new(Readings::new(&offer.container)));
        let warden = Warden {
            shared: Arc::clone(shared),
            container: offer.container.clone(),
            owner: offer.owner.clone(),
            device: offer.device.clone(),
            inbox,
            ending: Arc::clone(&ending),
            readings: Arc::clone(&readings),
            live: None,
            crashes: {
                let config = &shared.config;
                let (window_s, pause_s) = (config.crash_window_s, config.crash_pause_s);
                Crashes::new(config.crash_limit, Duration::from_secs(window_s), Duration::from_secs(pause_s))
            },
            limiter: Limiter::new(Instant::now()),
            chatter: Limiter::new(Instant::now()),
            report_seq: 0,
            reporters: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("warden".to_owned()).spawn(move || warden.run())?;
        Ok(Handle { mailbox, ending, readings, thread })
    }
}

impl Service for MetalService {
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
            move || probing.engines.get(&probing.program, &probing.config).probe.state(),
            move |engine, accounts| compose(&shared, engine, accounts),
        );
    }
}

fn compose(
    shared: &Shared,
    engine: lighter_wire::EngineState,
    accounts: &Accounts<Readings>,
) -> ServiceReport {
    let weights = shared.weights.totals();
    // Before the containers' accounts, which are written first.
    let troubles = shared.troubles.lock().unwrap_or_else(PoisonError::into_inner).list();
    let mut graphs = 0u64;
    let mut containers = BTreeMap::new();
    for (grant, readings) in accounts {
        let readings = readings.lock().unwrap_or_else(PoisonError::into_inner);
        graphs = graphs.saturating_add(readings.graphs());
        containers.insert(grant.clone(), readings.report());
    }
    let mut totals = BTreeMap::from([
        ("workers".to_owned(), shared.workers.load(Ordering::Relaxed)),
        ("graphs".to_owned(), graphs),
        ("weights".to_owned(), weights.count),
        ("weights_bytes".to_owned(), weights.bytes),
        ("weights_saved_bytes".to_owned(), weights.saved_bytes),
    ]);
    if let Some(bytes) = shared.weights.cache_bytes() {
        totals.insert("cache_bytes".to_owned(), bytes);
    }
    ServiceReport { engine, containers, totals, troubles }
}
