// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gpu service: a process of its own, started by the daemon, with no virglrenderer and no driver in it.
//!
//! For each grant it keeps a warden (a thread), and the warden a session and a render server (two processes) for each
//! stream, which is a Vulkan instance. Nothing is loaded before the first stream.
//!
//! ```text
//! daemon ──streams──► [GpuService] ──► warden A ──► session ── render server ── a process with the GPU's driver
//!                           └────────► warden B ──► …
//! ```

mod engines;
mod groups;
mod live;
mod start;
mod warden;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lighter_wire::{EngineState, GrantId, ServiceReport, StreamOffer};

use super::config::GpuConfig;
use super::readings::Readings;
use crate::service::crashes::Crashes;
use crate::service::limiter::Limiter;
use crate::service::reports::Reports;
use crate::service::troubles::Troubles;
use crate::service::wardens::{Accounts, Handle, Wardens, mailbox};
use crate::service::{ReportAnswer, RevokeAnswer, Service, sandbox, serve};

use self::engines::Engines;
use self::warden::Warden;

/// Serves the daemon at the other end of `control` until it closes.
///
/// # Errors
/// When the control socket fails.
pub fn run(control: OwnedFd, config: GpuConfig) -> Result<(), crate::service::ServeError> {
    tracing::info!(
        sandbox = if config.sandbox { sandbox::describe() } else { "off".to_owned() },
        memory = ?config.memory,
        "gpu service starts"
    );
    // Each piece of a client's memory takes some.
    crate::system::raise_descriptor_limit();
    let shared = Arc::new(Shared {
        config,
        engines: Engines::default(),
        troubles: Mutex::default(),
        sessions: AtomicU64::new(0),
    });
    let mut service = GpuService { shared, wardens: Wardens::default() };
    let ended = serve(control, &mut service);
    service.wardens.end();
    ended
}

/// What the wardens share.
#[derive(Debug)]
struct Shared {
    config: GpuConfig,
    engines: Engines,
    troubles: Mutex<Troubles>,
    sessions: AtomicU64,
}

impl Shared {
    fn trouble(&self, text: String) {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).add(text);
    }
}

/// The service.
#[derive(Debug)]
struct GpuService {
    shared: Arc<Shared>,
    wardens: Wardens<Infallible, Readings>,
}

fn warden(shared: &Arc<Shared>, offer: &StreamOffer) -> std::io::Result<Handle<Infallible, Readings>> {
    let config = &shared.config;
    let (mailbox, inbox) = mailbox()?;
    let readings = Arc::new(Mutex::new(Readings::new(&offer.container)));
    let warden = Warden {
        shared: Arc::clone(shared),
        container: offer.container.clone(),
        device: offer.device.clone(),
        inbox,
        readings: Arc::clone(&readings),
        streams: BTreeMap::new(),
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

impl Service for GpuService {
    fn stream(&mut self, offer: StreamOffer, socket: OwnedFd) {
        let shared = &self.shared;
        self.wardens.stream(offer, socket, |offer| warden(shared, offer));
    }

    fn revoke(&mut self, grant: GrantId, answer: RevokeAnswer) {
        self.wardens.revoke(&grant, answer);
    }

    fn report(&mut self, answer: ReportAnswer) {
        let (probing, shared) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        self.wardens.report(
            answer,
            move || probing.engines.get(&probing.config).probe().state(),
            move |engine, accounts| compose(&shared, engine, accounts),
        );
    }
}

fn compose(shared: &Shared, engine: EngineState, accounts: &Accounts<Readings>) -> ServiceReport {
    // Before the containers' accounts, which are written first.
    let troubles = shared.troubles.lock().unwrap_or_else(PoisonError::into_inner).list();
    let totals = BTreeMap::from([("sessions".to_owned(), shared.sessions.load(Ordering::Relaxed))]);
    let mut containers = BTreeMap::new();
    for (grant, readings) in accounts {
        let readings = readings.lock().unwrap_or_else(PoisonError::into_inner);
        containers.insert(grant.clone(), readings.report());
    }
    ServiceReport { engine, containers, totals, troubles }
}
