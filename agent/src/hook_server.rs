// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers hooks: makes grants. One thread of a pool per hook, for a few milliseconds; no hook ever waits for an engine.
//!
//! Refuses callers that may not ask, containers whose bundle does not call the hook, ports that are taken, devices that are
//! off, each with a cause and a remedy that the user reads in the runtime's own output.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, SystemTime};

use lighter_wire::{Endpoint, GrantId, PacketError, recv_up_to, send};
use rustix::net::sockopt;

use crate::agent::Shared;
use crate::bundle;
use crate::cgroup::Cgroups;
use crate::credentials::{self, Credentials};
use crate::device::DeviceName;
use crate::endpoints::Space;
use crate::grants::{self, Changing, Grant, Init, RecordState};
use crate::hook_protocol::{FromAgent, HOOK_VERSION, MAX_MESSAGE_BYTES, ToAgent, id_is_plain};
use crate::ns::{self, NsId};
use crate::{ends, peer, proc, reconcile};

/// Why a container does not get its grant.
struct Refused {
    cause: String,
    remedy: String,
}

fn refused(cause: impl Into<String>, remedy: impl Into<String>) -> Refused {
    Refused { cause: cause.into(), remedy: remedy.into() }
}

/// How long a caller who may not ask is waited for.
const STRANGERS_TIME: Duration = Duration::from_secs(1);
const LOOK_AT_LOG: &str = "see the log of the lighter daemon";

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        refused(error.to_string(), LOOK_AT_LOG)
    }
}

impl From<PacketError> for Refused {
    fn from(error: PacketError) -> Self {
        refused(format!("the hook's message cannot be used: {error}"), "use the hook of this installation")
    }
}

/// A connection to the hook's socket: tells at once who may not ask, and leaves the rest to the pool.
pub(crate) fn take(shared: &Arc<Shared>, connection: OwnedFd) {
    let caller = match credentials::of(&connection) {
        Ok(caller) => caller,
        Err(errno) => {
            tracing::error!(error = %io::Error::from(errno), "a hook's caller cannot be told");
            return;
        }
    };
    let uid = caller.uid;
    if uid != 0 && uid != shared.own_uid && !shared.hook_uids.contains(&uid) {
        // On threads of their own, and few: whoever may not ask cannot hold up those who may.
        let _ = shared.strangers.run(move || turn_away(&connection, uid));
        return;
    }
    let inner = Arc::clone(shared);
    if shared.hooks.run(move || serve(&inner, &connection, caller)).is_err() {
        // The connection went with the job; the hook tells its user that it was closed.
        tracing::error!("too many hooks wait; one was turned away");
    }
}

fn turn_away(connection: &OwnedFd, uid: u32) {
    if sockopt::set_socket_timeout(connection, sockopt::Timeout::Recv, Some(STRANGERS_TIME)).is_err() {
        return;
    }
    // Read and thrown away: a connection that is closed over an unread request is reset, and the answer lost.
    let _ = recv_up_to::<ToAgent>(connection, MAX_MESSAGE_BYTES);
    let remedy = format!("the administrator can add {uid} to engines.hook_uids in lighter's configuration");
    refused(format!("uid {uid} may not ask for grants"), remedy).send_to(connection, None, uid);
}

impl Refused {
    fn send_to(self, connection: &OwnedFd, asked: Option<(&str, &DeviceName)>, uid: u32) {
        let (container, device) =
            asked.map_or((None, None), |(id, device)| (Some(id), Some(device.to_string())));
        tracing::warn!(container, device, uid, cause = self.cause, remedy = self.remedy, "grant refused");
        let _ = send(connection, &FromAgent::Refused { cause: self.cause, remedy: self.remedy }, &[]);
    }
}

fn serve(shared: &Arc<Shared>, connection: &OwnedFd, caller: Credentials) {
    let uid = caller.uid;
    for which in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        if sockopt::set_socket_timeout(connection, which, Some(shared.limits.hook_timeout)).is_err() {
            return;
        }
    }
    let (message, descriptors) = match recv_up_to::<ToAgent>(connection, MAX_MESSAGE_BYTES) {
        Ok(Some(received)) => received,
        Ok(None) => return,
        Err(error) => return Refused::from(error).send_to(connection, None, uid),
    };
    match message {
        ToAgent::Grant { version, id, bundle, device } => {
            let request = Request { version, id, bundle: &bundle, device, caller };
            match request.grant(shared, connection, descriptors) {
                // A hook that has gone meanwhile makes its runtime end the container, and that the grant.
                Ok(grant) => drop(send(connection, &FromAgent::Granted { grant }, &[])),
                Err(answer) => answer.send_to(connection, Some((&request.id, &request.device)), uid),
            }
        }
        ToAgent::Release { id, device, .. } => {
            tracing::debug!(container = id, %device, "runtime says that the container stopped; its init decides");
        }
        ToAgent::Opened | ToAgent::OpenFailed { .. } => {
            refused("the hook answered before it was asked", "use the hook of this installation")
                .send_to(connection, None, uid);
        }
    }
}

/// One hook's request.
struct Request<'a> {
    version: u32,
    id: String,
    bundle: &'a Path,
    device: DeviceName,
    caller: Credentials,
}

impl Request<'_> {
    fn grant(
        &self,
        shared: &Arc<Shared>,
        hook: &OwnedFd,
        descriptors: Vec<OwnedFd>,
    ) -> Result<GrantId, Refused> {
        let endpoints = self.check_words(shared)?;
        let [pidfd, namespace] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|got| {
            refused(
                format!("the hook sent {} descriptors instead of 2", got.len()),
                "use the hook of this installation",
            )
        })?;
        let caller_pid = self.check_caller(shared)?;
        let init = Init::record(&pidfd, &shared.cgroup_mounts, &[std::process::id(), caller_pid])?;
        if NsId::of(&namespace)? != init.net_ns {
            return Err(refused(
                "the network namespace that the hook sent is not the container's",
                LOOK_AT_LOG,
            ));
        }
        self.check_owner(&init)?;
        bundle::check(self.bundle, &shared.hook_path, &self.device).map_err(|error| {
            refused(
                error.to_string(),
                "ask for the device with --device, so that its CDI specification is applied",
            )
        })?;
        if !init.identifies() {
            return Err(refused(
                "the container has neither a control group nor a mount namespace of its own",
                "start it without sharing both with the host",
            ));
        }
        let space = shared.spaces.get(namespace)?;
        let _opening = space.begin_opening();
        if let Some(grant) = shared.grants.of(&init, &self.device) {
            return Ok(grant.id.clone());
        }
        let id = grants::new_id(self.device.kind())?;
        let record = if self.is_trusted(shared, &init)? { RecordState::Trusted } else { RecordState::Open };
        let grant = Arc::new(Grant {
            id: id.clone(),
            container: self.id.clone(),
            device: self.device.clone(),
            caller_uid: self.caller.uid,
            endpoints,
            init,
            pidfd,
            space: Arc::clone(&space),
            since: SystemTime::now(),
            changing: Mutex::new(Changing { record, waiting: None }),
            token: Mutex::new(None),
            ended: RwLock::new(false),
        });
        let made = self.open(shared, hook, &grant).and_then(|()| enter(shared, &grant));
        if made.is_err() {
            space.release(&shared.poller, &id);
        }
        made.map(|()| id)
    }

    /// Checks what can be checked without looking at any process; gives the device's endpoints.
    fn check_words(&self, shared: &Shared) -> Result<Vec<Endpoint>, Refused> {
        if self.version != HOOK_VERSION {
            return Err(refused(
                format!("the hook speaks version {} and the agent version {HOOK_VERSION}", self.version),
                "run `lighter cdi generate` so that the specification names the hook of this installation",
            ));
        }
        if !id_is_plain(&self.id) {
            return Err(refused(format!("{:?} is no container id", self.id), "name the container plainly"));
        }
        let kind = self.device.kind();
        shared.endpoints_of(kind).ok_or_else(|| {
            refused(
                format!("the device {kind} is off on this host"),
                format!("switch it on with `lighter config --{kind} on`, or see `lighter doctor`"),
            )
        })
    }

    /// Hooks run where their runtime runs. A process of a container that found the hook's socket, by a mount of its
    /// directory, may be uid 0 as well, but it lives in other namespaces or in a granted container.
    fn check_caller(&self, shared: &Shared) -> Result<u32, Refused> {
        let outside = || {
            refused(
                "the caller of the hook's socket is no container runtime of this host",
                "containers are granted devices by their runtime only",
            )
        };
        let pid = self
            .caller
            .pid
            .and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok())
            .ok_or_else(outside)?;
        if proc::ns_id(pid, "pid")? != shared.own_pid_ns {
            return Err(outside());
        }
        let (groups, mount_ns) = (Cgroups::of(pid)?, proc::ns_id(pid, "mnt")?);
        let inside = shared.grants.containers(shared.limits.record_retry).iter().any(|container| {
            container.mount_ns == Some(mount_ns)
                || container.cgroup.as_ref().is_some_and(|cgroup| cgroup.holds(&groups))
        });
        if inside { Err(outside()) } else { Ok(pid) }
    }

    /// A user's hook may ask for containers in that user's own user namespaces only.
    fn check_owner(&self, init: &Init) -> Result<(), Refused> {
        let uid = self.caller.uid;
        if uid == 0 {
            return Ok(());
        }
        let owner = ns::user_ns_owner(&File::open(format!("/proc/{}/ns/user", init.pid))?)?;
        if owner == uid {
            return Ok(());
        }
        Err(refused(
            format!("the container's user namespace belongs to uid {owner}, not to uid {uid} who asks"),
            "start the container as its owner",
        ))
    }

    fn is_trusted(&self, shared: &Shared, init: &Init) -> io::Result<bool> {
        if shared.trust.uids.contains(&self.caller.uid) {
            return Ok(true);
        }
        if shared.trust.cgroups.is_empty() {
            return Ok(false);
        }
        let groups = Cgroups::of(init.pid)?;
        Ok(shared.trust.cgroups.iter().any(|path| groups.any_below(path)))
    }

    /// Opens what is not open yet in the container's network namespace.
    ///
    /// The hook does it where it is as trusted as the agent. A user's hook does not: in a namespace that is not that
    /// user's own, whoever made a listener could keep a copy and accept other containers' connections.
    fn open(&self, shared: &Arc<Shared>, hook: &OwnedFd, grant: &Grant) -> Result<(), Refused> {
        let space = &grant.space;
        let missing = space.reserve(&grant.endpoints, &grant.id);
        if missing.is_empty() {
            return Ok(());
        }
        let uid = self.caller.uid;
        let (sock_diag, listeners) = if uid == 0 || uid == shared.own_uid {
            by_hook(space, hook, &missing)?
        } else {
            let opened = reconcile::open_inside(space, &missing)
                .map_err(|error| refused(error.to_string(), PORT_REMEDY))?;
            (opened.sock_diag, opened.listeners)
        };
        space.install(&shared.poller, sock_diag, missing.into_iter().zip(listeners), &grant.id)?;
        Ok(())
    }
}

const PORT_REMEDY: &str = "stop that process or let it use another port, then start the container again";

/// Lets the hook open ports, and looks at what it brings.
fn by_hook(space: &Space, hook: &OwnedFd, missing: &[u16]) -> Result<(OwnedFd, Vec<OwnedFd>), Refused> {
    send(hook, &FromAgent::Open { ports: missing.to_vec() }, &[])?;
    let not_as_asked =
        |error: crate::endpoints::NotAsAsked| refused(error.to_string(), "use the hook of this installation");
    match recv_up_to::<ToAgent>(hook, MAX_MESSAGE_BYTES)? {
        Some((ToAgent::Opened, sockets)) => space.check(missing, sockets).map_err(not_as_asked),
        Some((ToAgent::OpenFailed { port, errno }, mut sockets)) => {
            let Some(sock_diag) = sockets.pop() else {
                return Err(refused(
                    format!("the hook could not open {}", Endpoint::Loopback(port)),
                    LOOK_AT_LOG,
                ));
            };
            space.check_sock_diag(&sock_diag).map_err(not_as_asked)?;
            let errno = rustix::io::Errno::from_raw_os_error(errno);
            Err(refused(peer::why_not_opened(port, errno, sock_diag), PORT_REMEDY))
        }
        Some(_) => Err(refused(
            "the hook gave another answer than was asked for",
            "use the hook of this installation",
        )),
        None => {
            Err(refused("the hook ended before it had opened the endpoints", "start the container again"))
        }
    }
}

/// Puts a grant into force: on disk, in the table, with its end watched.
fn enter(shared: &Arc<Shared>, grant: &Arc<Grant>) -> Result<(), Refused> {
    grant.save(&shared.state).map_err(|error| {
        let source =
            std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
        refused(format!("{error}{source}"), "make room there, then start the container again")
    })?;
    shared.grants.insert(Arc::clone(grant));
    let kind = grant.device.kind();
    let on = shared.endpoints_of(kind).as_ref() == Some(&grant.endpoints);
    let watched = reconcile::watch(shared, grant);
    if on && watched.is_ok() {
        tracing::info!(grant = %grant.id, container = %grant.container, device = %grant.device,
            init_pid = grant.init.pid, cgroup = grant.init.cgroup.as_ref().map(|cgroup| cgroup.path()), "granted");
        return Ok(());
    }
    if let Some(grant) = ends::detach(shared, &grant.id) {
        ends::finish(shared, &grant, "it could not be put into force");
    }
    watched?;
    Err(refused(format!("the device {kind} was switched off just now"), "start the container without it"))
}
