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
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::{GrantId, Kind, ServiceReport, StreamOffer};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::MetalConfig;
use super::readings::Readings;
use crate::service::crashes::Crashes;
use crate::service::limiter::Limiter;
use crate::service::troubles::Troubles;
use crate::service::{ReportAnswer, RevokeAnswer, Service, sandbox, serve};

pub use crate::service::{SpawnError, WorkerProgram};
pub use peer::major_of_files;

use self::backing::Backing;
use self::cache::Cache;
use self::engines::Engines;
use self::peer::Peers;
use self::warden::{Ask, Warden};
use self::weights::{Limits, WeightStore};

/// How long a report waits for the workers' counters; then their last ones are used.
const COUNTERS_LIMIT: Duration = Duration::from_millis(500);

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
    service.end();
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

/// The service's side of one warden.
#[derive(Debug)]
struct Handle {
    asks: Sender<Ask>,
    wake: Arc<OwnedFd>,
    ending: Arc<AtomicBool>,
    readings: Arc<Mutex<Readings>>,
    thread: JoinHandle<()>,
}

impl Handle {
    fn ask(&self, ask: Ask) {
        // Fails only when the warden has panicked, which is told when it is joined.
        let _ = self.asks.send(ask);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Has the warden end; a copy that it is in the middle of is cut short.
    fn end(&self, answer: Option<RevokeAnswer>) {
        self.ending.store(true, Ordering::Relaxed);
        self.ask(Ask::End(answer));
    }
}

/// The service.
#[derive(Debug)]
struct MetalService {
    shared: Arc<Shared>,
    wardens: BTreeMap<GrantId, Handle>,
}

impl MetalService {
    fn new(config: MetalConfig, program: WorkerProgram) -> Self {
        let backing = Backing::open(config.sandbox && sandbox::can_change_users());
        let cache = (config.cache_max_bytes > 0)
            .then(|| Cache::new(config.cache_dir.clone(), config.cache_max_bytes));
        let limits = Limits {
            bytes: config.max_shared_bytes.unwrap_or_else(|| crate::system::memory_bytes() / 4 * 3),
            // The other half is for streams, workers and the log.
            count: raise_descriptor_limit() / 2,
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
        Self { shared: Arc::new(shared), wardens: BTreeMap::new() }
    }

    fn warden(&self, offer: &StreamOffer) -> std::io::Result<Handle> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (asks, receiver) = channel();
        let ending = Arc::new(AtomicBool::new(false));
        let readings = Arc::new(Mutex::new(Readings::new(&offer.container)));
        let warden = Warden {
            shared: Arc::clone(&self.shared),
            container: offer.container.clone(),
            owner: offer.owner.clone(),
            device: offer.device.clone(),
            asks: receiver,
            wake: Arc::clone(&wake),
            ending: Arc::clone(&ending),
            readings: Arc::clone(&readings),
            live: None,
            crashes: {
                let config = &self.shared.config;
                let (window_s, pause_s) = (config.crash_window_s, config.crash_pause_s);
                Crashes::new(config.crash_limit, Duration::from_secs(window_s), Duration::from_secs(pause_s))
            },
            limiter: Limiter::new(Instant::now()),
            chatter: Limiter::new(Instant::now()),
            report_seq: 0,
            reporters: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("warden".to_owned()).spawn(move || warden.run())?;
        Ok(Handle { asks, wake, ending, readings, thread })
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

impl Service for MetalService {
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
            handle.ask(Ask::Stream(offer, socket));
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
            handle.ask(Ask::Report(done.clone()));
            readings.insert(grant.to_string(), Arc::clone(&handle.readings));
        }
        drop(done);
        let shared = Arc::clone(&self.shared);
        // Workers and the probe of the engine take their time; streams do not wait for that.
        let thread = std::thread::Builder::new().name("report".to_owned()).spawn(move || {
            let engine = shared.engines.get(&shared.program, &shared.config).probe.state();
            // Nobody sends anything: the channel closes when the last warden has let go of its end.
            let closed = all_done.recv_timeout(COUNTERS_LIMIT);
            if closed == Err(RecvTimeoutError::Timeout) {
                tracing::debug!("a worker did not say its counters in time");
            }
            answer.send(compose(&shared, engine, &readings));
        });
        if let Err(error) = thread {
            tracing::error!(%error, "no thread for a report");
        }
    }
}

fn compose(
    shared: &Shared,
    engine: lighter_wire::EngineState,
    readings: &BTreeMap<String, Arc<Mutex<Readings>>>,
) -> ServiceReport {
    let weights = shared.weights.totals();
    // Before the containers' accounts, which are written first.
    let troubles = shared.troubles.lock().unwrap_or_else(PoisonError::into_inner).list();
    let mut graphs = 0u64;
    let mut containers = BTreeMap::new();
    for (grant, readings) in readings {
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

/// Lets this process, and workers after it, have as many descriptors as it may; returns how many that are.
fn raise_descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let got = if setrlimit(Resource::Nofile, most).is_ok() { limit.maximum } else { limit.current };
    got.and_then(|got| usize::try_from(got).ok()).unwrap_or(usize::MAX)
}
