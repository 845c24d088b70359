// SPDX-License-Identifier: MIT OR Apache-2.0
//! The agent as the daemon sees it: start, look, switch devices, stop. What its threads share.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_wire::{Endpoint, GrantId, Kind};
use rustix::net::{Shutdown, SocketType, shutdown};

use crate::cgroup::CgroupMounts;
use crate::config::{self, AgentConfig, Devices, Limits, SharedEndpoint, Trust};
use crate::endpoints::Spaces;
use crate::grants::{GrantView, Grants};
use crate::ns::NsId;
use crate::poller::{Poller, Target, Token};
use crate::pool::Pool;
use crate::record::EngineRecord;
use crate::refusals::Refusals;
use crate::services::Services;
use crate::sockets::Sockets;
use crate::state::{State, StateError};
use crate::unix::{SocketError, listen_at};
use crate::{ends, event_loop, proc, reconcile};

/// Hooks that may wait to be accepted.
const HOOK_BACKLOG: i32 = 1024;
/// How long running jobs may take to end when the agent stops.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Why the agent did not start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Devices(#[from] SharedEndpoint),
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The hook's socket or a device's cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The kernel refused something without which no agent works.
    #[error("cannot {what}")]
    Kernel {
        /// What was tried.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// What all threads of the agent share.
pub(crate) struct Shared {
    pub(crate) hook_path: PathBuf,
    pub(crate) records: Vec<Box<dyn EngineRecord>>,
    pub(crate) trust: Trust,
    pub(crate) hook_uids: std::collections::BTreeSet<u32>,
    pub(crate) limits: Limits,
    pub(crate) own_pid_ns: NsId,
    pub(crate) own_uid: u32,
    pub(crate) cgroup_mounts: CgroupMounts,
    devices: RwLock<Devices>,
    pub(crate) services: Arc<dyn Services>,
    pub(crate) state: State,
    pub(crate) grants: Grants,
    pub(crate) spaces: Spaces,
    pub(crate) sockets: Sockets,
    pub(crate) poller: Poller,
    pub(crate) refusals: Refusals,
    pub(crate) hooks: Pool,
    pub(crate) strangers: Pool,
    pub(crate) gate: Pool,
    pub(crate) engines: Pool,
    pub(crate) ends: Pool,
    /// Listeners whose accept failed for want of something; armed again by the loop at that time.
    pub(crate) resting: Mutex<Vec<(Instant, Token, Arc<OwnedFd>)>>,
    /// Grants whose endpoints could not be opened again after a restart; the loop tries once more.
    pub(crate) unopened: Mutex<Vec<GrantId>>,
    pub(crate) streams: AtomicU64,
    pub(crate) stopping: AtomicBool,
}

impl Shared {
    fn devices(&self) -> Devices {
        self.devices.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The endpoints of a device that is on.
    pub(crate) fn endpoints_of(&self, kind: Kind) -> Option<Vec<Endpoint>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner).get(&kind).cloned()
    }

    /// The device behind an endpoint.
    pub(crate) fn kind_at(&self, endpoint: Endpoint) -> Option<Kind> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.iter().find(|(_, endpoints)| endpoints.contains(&endpoint)).map(|(&kind, _)| kind)
    }

    /// Lets a listener rest before it fires again.
    pub(crate) fn rest(&self, token: Token, listener: Arc<OwnedFd>, time: Duration) {
        crate::lock(&self.resting).push((Instant::now() + time, token, listener));
        self.poller.wake();
    }
}

/// A running agent. Dropping it stops it, as [`Agent::stop`] does.
pub struct Agent {
    shared: Arc<Shared>,
    event_loop: Option<JoinHandle<()>>,
    hooks: Arc<OwnedFd>,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("grants", &self.grants()).finish_non_exhaustive()
    }
}

impl Agent {
    /// Takes the state directory, takes over living grants of an earlier daemon, and listens for hooks.
    ///
    /// # Errors
    /// When another daemon has the state directory or answers at the hook's socket, or the system refuses either.
    pub fn start(config: AgentConfig, services: Arc<dyn Services>) -> Result<Self, AgentError> {
        let kernel = |what| move |source| AgentError::Kernel { what, source };
        config::by_endpoint(&config.devices)?;
        let state = State::open(&config.state_dir)?;
        let shared = Arc::new(Shared {
            hook_path: config.hook_path,
            records: config.records,
            trust: config.trust,
            hook_uids: config.hook_uids,
            limits: config.limits,
            own_pid_ns: proc::ns_id(std::process::id(), "pid")
                .map_err(kernel("tell the own pid namespace"))?,
            own_uid: rustix::process::geteuid().as_raw(),
            cgroup_mounts: CgroupMounts::read().map_err(kernel("read the mounts"))?,
            devices: RwLock::new(config.devices),
            services,
            state,
            grants: Grants::default(),
            spaces: Spaces::default(),
            sockets: Sockets::new(config.socket_dir),
            poller: Poller::new().map_err(kernel("make an epoll set"))?,
            refusals: Refusals::default(),
            hooks: Pool::new("lighter-hooks", 16, 2048),
            strangers: Pool::new("lighter-others", 2, 64),
            gate: Pool::new("lighter-gate", 8, 65536),
            engines: Pool::new("lighter-record", 8, 4096),
            ends: Pool::new("lighter-ends", 8, 65536),
            resting: Mutex::default(),
            unopened: Mutex::default(),
            streams: AtomicU64::new(1),
            stopping: AtomicBool::new(false),
        });
        reconcile::take_over(&shared)?;
        // After the grants: whoever connects next is judged by all of them.
        shared.sockets.open(&shared.poller, &shared.devices())?;
        let listener = Arc::new(hook_listener(&config.hook_socket)?);
        let token = shared.poller.add(&*listener, Target::Hook).map_err(kernel("watch the hook's socket"))?;
        let (inner, hooks) = (Arc::clone(&shared), Arc::clone(&listener));
        let event_loop = std::thread::Builder::new()
            .name("lighter-agent".into())
            .spawn(move || event_loop::run(&inner, token, &listener))
            .map_err(kernel("start a thread"))?;
        tracing::info!(hook_socket = %config.hook_socket.display(), grants = shared.grants.all().len(), "agent started");
        Ok(Self { shared, event_loop: Some(event_loop), hooks })
    }

    /// All grants.
    #[must_use]
    pub fn grants(&self) -> Vec<GrantView> {
        self.shared.grants.all().iter().map(|grant| grant.view()).collect()
    }

    /// Sets which devices are on. The grants of a device that goes off, or moves to another endpoint, end before this
    /// returns; their containers need a restart to get new ones.
    ///
    /// # Errors
    /// When two devices share an endpoint, or a unix socket cannot be made; nothing is changed then.
    pub fn set_devices(&self, devices: Devices) -> Result<(), AgentError> {
        config::by_endpoint(&devices)?;
        self.shared.sockets.open(&self.shared.poller, &devices)?;
        self.shared.sockets.close_others(&self.shared.poller, &devices);
        *self.shared.devices.write().unwrap_or_else(PoisonError::into_inner) = devices;
        let ended: Vec<_> = (self.shared.grants.all().into_iter())
            .filter(|grant| self.shared.endpoints_of(grant.device.kind()).as_ref() != Some(&grant.endpoints))
            // All are closed to new streams before the first service is waited for.
            .filter_map(|grant| ends::detach(&self.shared, &grant.id))
            .collect();
        for grant in ended {
            ends::finish(&self.shared, &grant, "the device was switched off");
        }
        Ok(())
    }

    /// Stops listening. Grants stay on disk for the next daemon; streams that were handed over are the services' business.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.poller.wake();
        if let Some(event_loop) = self.event_loop.take() {
            let _ = event_loop.join();
        }
        // At once, though a child that is just being started may hold a copy: the next daemon must find nobody here.
        let _ = shutdown(&*self.hooks, Shutdown::Both);
        let shared = &self.shared;
        shared.sockets.close_others(&shared.poller, &Devices::new());
        for pool in [&shared.hooks, &shared.strangers, &shared.gate, &shared.engines, &shared.ends] {
            pool.close(STOP_LIMIT);
        }
        for grant in self.shared.grants.all() {
            grant.space.close_all(&self.shared.poller);
        }
    }
}

/// Makes the socket that hooks connect to. A hook that finds the file of a daemon that has gone knows that an agent was
/// there and may be back in a moment.
fn hook_listener(path: &Path) -> Result<OwnedFd, AgentError> {
    if let Some(directory) = path.parent() {
        let what = "make the socket's directory";
        let failed = |source| SocketError::Make { path: directory.into(), what, source };
        std::fs::create_dir_all(directory).map_err(failed)?;
    }
    Ok(listen_at(path, SocketType::SEQPACKET, HOOK_BACKLOG)?)
}
