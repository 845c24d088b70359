// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mps service: a process of its own, started by the daemon, with no torch in it.
//!
//! For each grant it keeps a warden (a thread), and the warden a worker (a process) for each stream. All workers are
//! started by the nursery (a thread), which also keeps one ready for whoever comes next. Nothing is loaded before the
//! first stream.
//!
//! ```text
//! daemon ──streams──► [MpsService] ──► warden A ──► a worker a stream (Python, torch) ◄──┐
//!                           └────────► warden B ──► …                                    └── nursery, one spare
//! ```

mod engines;
mod live;
mod nursery;
mod refuse;
mod warden;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::{EngineState, GrantId, ServiceReport, StreamOffer};

use super::config::MpsConfig;
use super::readings::Readings;
use crate::service::crashes::Crashes;
use crate::service::limiter::Limiter;
use crate::service::reports::Reports;
use crate::service::troubles::Troubles;
use crate::service::wardens::{Accounts, Handle, Wardens, mailbox};
use crate::service::{ReportAnswer, RevokeAnswer, Service, sandbox, serve};

use self::engines::Engines;
use self::nursery::Nursery;
use self::refuse::Refused;
use self::warden::Warden;

/// Why the service cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum MpsServiceError {
    /// The loop with the daemon failed.
    #[error("mps service lost its daemon")]
    Serve(#[from] crate::service::ServeError),
    /// No thread to start workers.
    #[error("mps service cannot start its threads")]
    Thread(#[source] std::io::Error),
}

/// Serves the daemon at the other end of `control` until it closes.
///
/// # Errors
/// When the control socket fails or a thread cannot be started.
pub fn run(control: OwnedFd, config: MpsConfig) -> Result<(), MpsServiceError> {
    tracing::info!(
        sandbox = if config.sandbox { sandbox::describe() } else { "off".to_owned() },
        engine = config.engine,
        spare = config.spare,
        "mps service starts"
    );
    // Each stream takes some.
    crate::system::raise_descriptor_limit();
    let shared = Arc::new(Shared {
        config,
        engines: Engines::default(),
        troubles: Mutex::default(),
        workers: AtomicU64::new(0),
        spares: AtomicU64::new(0),
    });
    let nursery = Nursery::start(Arc::clone(&shared)).map_err(MpsServiceError::Thread)?;
    let mut service = MpsService { shared, nursery, wardens: Wardens::default() };
    let ended = serve(control, &mut service);
    service.wardens.end();
    // After the wardens: it has started their workers, which end with its thread.
    service.nursery.end();
    Ok(ended?)
}

/// What the wardens and the nursery share.
#[derive(Debug)]
struct Shared {
    config: MpsConfig,
    engines: Engines,
    troubles: Mutex<Troubles>,
    /// Workers with a stream.
    workers: AtomicU64,
    /// Workers that wait for one.
    spares: AtomicU64,
}

impl Shared {
    fn trouble(&self, text: String) {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).add(text);
    }
}

/// The service.
#[derive(Debug)]
struct MpsService {
    shared: Arc<Shared>,
    nursery: Nursery,
    wardens: Wardens<Infallible, Readings>,
}

impl MpsService {
    fn warden(
        shared: &Arc<Shared>,
        nursery: &Nursery,
        offer: &StreamOffer,
    ) -> std::io::Result<Handle<Infallible, Readings>> {
        let config = &shared.config;
        let (mailbox, inbox) = mailbox()?;
        let readings = Arc::new(Mutex::new(Readings::new(&offer.container)));
        let warden = Warden {
            shared: Arc::clone(shared),
            nursery: nursery.door(),
            container: offer.container.clone(),
            device: offer.device.clone(),
            inbox,
            readings: Arc::clone(&readings),
            streams: BTreeMap::new(),
            refused: Refused::default(),
            crashes: Crashes::new(
                config.crash_limit,
                Duration::from_secs(config.crash_window_s),
                Duration::from_secs(config.crash_pause_s),
            ),
            limiter: Limiter::new(Instant::now()),
            chatter: Limiter::new(Instant::now()),
            reports: Reports::default(),
        };
        let thread = std::thread::Builder::new().name("warden".to_owned()).spawn(move || warden.run())?;
        // A warden of this device is never in the middle of anything long.
        Ok(Handle { mailbox, ending: Arc::new(AtomicBool::new(false)), readings, thread })
    }
}

impl Service for MpsService {
    fn stream(&mut self, offer: StreamOffer, socket: OwnedFd) {
        let (shared, nursery) = (&self.shared, &self.nursery);
        self.wardens.stream(offer, socket, |offer| Self::warden(shared, nursery, offer));
    }

    fn revoke(&mut self, grant: GrantId, answer: RevokeAnswer) {
        self.wardens.revoke(&grant, answer);
    }

    fn report(&mut self, answer: ReportAnswer) {
        let (probing, shared) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        self.wardens.report(
            answer,
            move || probing.engines.get(&probing.config).probe.state(),
            move |engine, accounts| compose(&shared, engine, accounts),
        );
    }
}

fn compose(shared: &Shared, engine: EngineState, accounts: &Accounts<Readings>) -> ServiceReport {
    // Before the containers' accounts, which are written first.
    let troubles = shared.troubles.lock().unwrap_or_else(PoisonError::into_inner).list();
    let mut containers = BTreeMap::new();
    let mut totals = BTreeMap::from([
        ("workers".to_owned(), shared.workers.load(Ordering::Relaxed)),
        ("spare_workers".to_owned(), shared.spares.load(Ordering::Relaxed)),
        ("storages".to_owned(), 0),
    ]);
    for (grant, readings) in accounts {
        let readings = readings.lock().unwrap_or_else(PoisonError::into_inner);
        let storages = totals.entry("storages".to_owned()).or_default();
        *storages = storages.saturating_add(readings.storages());
        containers.insert(grant.clone(), readings.report());
    }
    ServiceReport { engine, containers, totals, troubles }
}
