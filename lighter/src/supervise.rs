// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps one service process per device alive, and is the agent's way to it.
//!
//! A service is this program with a hidden subcommand; its control socket is its standard input, so that the
//! end of the daemon, however it comes, is the end of the service.
//!
//! ```text
//! start ──► running ──exit──► restarting (pause doubles, 0.2 s … 10 s) ──► running
//!                                └── CRASH_LIMIT exits within CRASH_WINDOW ──► given up
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_agent::{ServiceUnavailable, Services};
use lighter_devices::service::ServiceLink;
use lighter_wire::{ContainerReport, GrantId, Kind, ServiceReport, StreamOffer};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::status::ServiceState;

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A service that ends this often within [`CRASH_WINDOW`] is not started again.
const CRASH_LIMIT: usize = 8;
const CRASH_WINDOW: Duration = Duration::from_secs(60);
/// Longest wait for a new service to say that it is ready.
const READY_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for a service to free what an ended grant held.
const REVOKE_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for a service's account of itself; its own probe of the engine is shorter.
const REPORT_LIMIT: Duration = Duration::from_secs(75);
/// Longest wait for what containers have used; who asks for the status wants an answer at once.
const USAGE_LIMIT: Duration = Duration::from_secs(2);
/// How long a service may take to end by itself when its control socket is closed.
const END_LIMIT: Duration = Duration::from_secs(5);

/// How to start one service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServicePlan {
    /// Program, normally this one.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) args: Vec<String>,
}

/// All services of the daemon.
#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    services: Mutex<BTreeMap<Kind, Supervised>>,
}

#[derive(Debug)]
struct Supervised {
    plan: ServicePlan,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Readable once the service is to stop: wakes the thread that waits for the process.
    stop: OwnedFd,
}

#[derive(Debug)]
struct Inner {
    state: ServiceState,
    link: Option<Arc<ServiceLink>>,
    stopping: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Supervisor {
    /// Makes the running services match `plans`: stops those that are no longer wanted or are planned
    /// otherwise, starts the missing ones.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn apply(&self, plans: &BTreeMap<Kind, ServicePlan>) -> io::Result<()> {
        let mut services = lock(&self.services);
        let obsolete: Vec<Kind> = services
            .iter()
            .filter(|(kind, service)| plans.get(kind) != Some(&service.plan))
            .map(|(kind, _)| *kind)
            .collect();
        for kind in obsolete {
            if let Some(service) = services.remove(&kind) {
                service.stop(kind);
            }
        }
        for (kind, plan) in plans {
            if !services.contains_key(kind) {
                services.insert(*kind, Supervised::start(*kind, plan.clone())?);
            }
        }
        Ok(())
    }

    /// Ends every service.
    pub(crate) fn stop(&self) {
        for (kind, service) in std::mem::take(&mut *lock(&self.services)) {
            service.stop(kind);
        }
    }

    /// The state of each service.
    pub(crate) fn states(&self) -> BTreeMap<String, ServiceState> {
        lock(&self.services)
            .iter()
            .map(|(kind, service)| (kind.to_string(), lock(&service.shared.inner).state.clone()))
            .collect()
    }

    /// Asks a service how it is.
    ///
    /// # Errors
    /// When it is not running or does not answer in time, in words for a person.
    pub(crate) fn report(&self, kind: Kind) -> Result<ServiceReport, String> {
        let link = self.link(kind)?;
        link.report(REPORT_LIMIT).map_err(|error| format!("service {kind}: {error}"))
    }

    /// What containers have used, by grant; `None` when the service is down or does not answer at once.
    pub(crate) fn usage(&self, kind: Kind) -> Option<BTreeMap<String, ContainerReport>> {
        let shared = lock(&self.services).get(&kind).map(|service| Arc::clone(&service.shared))?;
        let link = lock(&shared.inner).link.clone()?;
        link.report(USAGE_LIMIT).ok().map(|report| report.containers)
    }

    fn link(&self, kind: Kind) -> Result<Arc<ServiceLink>, String> {
        let shared = lock(&self.services).get(&kind).map(|service| Arc::clone(&service.shared));
        let Some(shared) = shared else { return Err(format!("service {kind} is not started")) };
        // A service that has just been started, or is being started again, is worth a moment.
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut inner = lock(&shared.inner);
        loop {
            if let Some(link) = &inner.link {
                return Ok(Arc::clone(link));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || matches!(inner.state, ServiceState::GivenUp { .. }) {
                return Err(match &inner.state {
                    ServiceState::GivenUp { reason } => {
                        format!("service {kind} ended too often and was given up: {reason}")
                    }
                    ServiceState::Restarting { reason } => {
                        format!("service {kind} is being restarted: {reason}")
                    }
                    ServiceState::Running { .. } => format!("service {kind} is not ready"),
                });
            }
            inner = shared.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Services for Supervisor {
    fn hand_over(&self, kind: Kind, offer: StreamOffer, stream: OwnedFd) -> Result<(), ServiceUnavailable> {
        let unavailable = |reason| ServiceUnavailable { kind, reason };
        let link = self.link(kind).map_err(unavailable)?;
        link.hand_over(&offer, stream).map_err(|error| unavailable(error.to_string()))
    }

    fn revoke(&self, kind: Kind, grant: &GrantId) {
        // A service that is down holds nothing: its end freed all.
        let link =
            lock(&self.services).get(&kind).and_then(|service| lock(&service.shared.inner).link.clone());
        if let Some(link) = link
            && let Err(error) = link.revoke(grant, REVOKE_LIMIT)
        {
            tracing::warn!(device = %kind, %grant, %error, "service did not confirm the end of a grant");
        }
    }
}

impl Supervised {
    fn start(kind: Kind, plan: ServicePlan) -> io::Result<Self> {
        let state = ServiceState::Restarting { reason: "first start".to_owned() };
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner { state, link: None, stopping: false }),
            changed: Condvar::new(),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let (thread_plan, thread_shared) = (plan.clone(), Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name(format!("service-{kind}"))
            .spawn(move || keep_alive(kind, &thread_plan, &thread_shared))?;
        Ok(Self { plan, shared, thread })
    }

    fn stop(self, kind: Kind) {
        let link = {
            let mut inner = lock(&self.shared.inner);
            inner.stopping = true;
            self.shared.changed.notify_all();
            inner.link.take()
        };
        if let Some(link) = link {
            link.close();
        }
        if let Err(error) = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(device = %kind, %error, "the thread that keeps a service alive cannot be woken");
        }
        if self.thread.join().is_err() {
            tracing::error!(device = %kind, "the thread that kept a service alive has panicked");
        }
    }
}

/// Starts the service again whenever it ends, until it is stopped or has ended too often.
fn keep_alive(kind: Kind, plan: &ServicePlan, shared: &Shared) {
    let mut ends: VecDeque<Instant> = VecDeque::new();
    let mut pause = FIRST_PAUSE;
    let mut restarts = 0;
    loop {
        let started = Instant::now();
        let reason = match run_once(plan, shared, restarts) {
            Ok(reason) => reason,
            Err(error) => format!("cannot be started: {error}"),
        };
        let mut inner = lock(&shared.inner);
        inner.link = None;
        if inner.stopping {
            return;
        }
        let now = Instant::now();
        ends.push_back(now);
        while ends.front().is_some_and(|end| now.duration_since(*end) > CRASH_WINDOW) {
            ends.pop_front();
        }
        if ends.len() >= CRASH_LIMIT {
            tracing::error!(device = %kind, %reason, ends = ends.len(), "service ended too often and is given up");
            inner.state = ServiceState::GivenUp { reason };
            shared.changed.notify_all();
            return;
        }
        pause = if started.elapsed() > CRASH_WINDOW { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        if ends.len() == 1 {
            pause = FIRST_PAUSE;
        }
        tracing::warn!(device = %kind, %reason, pause_ms = pause.as_millis(), "service ended and is started again");
        inner.state = ServiceState::Restarting { reason };
        restarts += 1;
        let (inner, _) = shared
            .changed
            .wait_timeout_while(inner, pause, |inner| !inner.stopping)
            .unwrap_or_else(PoisonError::into_inner);
        if inner.stopping {
            return;
        }
    }
}

/// One life of the service: start, greet, wait for its end; returns why it ended.
fn run_once(plan: &ServicePlan, shared: &Shared, restarts: u64) -> io::Result<String> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut child = Command::new(&plan.program)
        .args(&plan.args)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", plan.program.display())))?;
    let link = match ServiceLink::connect(ours, READY_LIMIT) {
        Ok(link) => Arc::new(link),
        Err(error) => {
            let _ = child.kill();
            let status = child.wait()?;
            return Ok(format!("did not become ready ({error}; {status})"));
        }
    };
    {
        let mut inner = lock(&shared.inner);
        if inner.stopping {
            link.close();
        } else {
            inner.link = Some(link);
            inner.state = ServiceState::Running { pid: child.id(), restarts };
        }
        shared.changed.notify_all();
    }
    let status = wait_for_end(&mut child, shared)?;
    Ok(format!("ended with {status}"))
}

/// Waits for the child; once the service is being stopped it has [`END_LIMIT`] left.
fn wait_for_end(child: &mut Child, shared: &Shared) -> io::Result<ExitStatus> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    poll_until_ready(&[&pidfd, &shared.stop], None)?;
    if !poll_until_ready(&[&pidfd], Some(END_LIMIT))? {
        child.kill()?;
    }
    child.wait()
}

/// Waits until one of the descriptors is readable; says whether one was before the limit.
fn poll_until_ready(descriptors: &[&OwnedFd], limit: Option<Duration>) -> io::Result<bool> {
    let deadline = limit.map(|limit| Instant::now() + limit);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        let mut polled: Vec<PollFd<'_>> =
            descriptors.iter().map(|descriptor| PollFd::new(*descriptor, PollFlags::IN)).collect();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
