// SPDX-License-Identifier: MIT OR Apache-2.0
//! A daemon that starts takes over the grants that an earlier one left: those whose container's init still lives. Their
//! endpoints are opened again by entering each network namespace for a moment; no container notices.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, RwLock};
use std::time::SystemTime;

use crate::agent::Shared;
use crate::endpoints::Space;
use crate::grants::{Changing, Grant, RecordState};
use crate::ns::{self, NsId};
use crate::open::{OpenError, open_here};
use crate::poller::Target;
use crate::state::{SavedGrant, SavedRecord, StateError};
use crate::{lock, peer};

/// Takes over all grants of the state directory.
pub(crate) fn take_over(shared: &Arc<Shared>) -> Result<(), StateError> {
    for saved in shared.state.load()? {
        let (id, container) = (saved.grant.clone(), saved.container.clone());
        match restore(shared, saved) {
            Ok(Some(())) => tracing::info!(grant = %id, %container, "grant taken over"),
            Ok(None) => {
                shared.state.remove(&id)?;
                tracing::info!(grant = %id, %container, "grant ended while no agent ran");
            }
            Err(error) => {
                // The container lives, but nothing can be granted without its descriptors; its file stays for the next start.
                tracing::error!(grant = %id, %container, %error, "grant cannot be taken over");
            }
        }
    }
    Ok(())
}

fn restore(shared: &Arc<Shared>, saved: SavedGrant) -> io::Result<Option<()>> {
    let Some(endpoints) = shared.endpoints_of(saved.device.kind()) else { return Ok(None) };
    let Some(pidfd) = saved.init.reopen()? else { return Ok(None) };
    let namespace = match File::open(format!("/proc/{}/ns/net", saved.init.pid)) {
        Ok(namespace) => namespace,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if NsId::of(&namespace)? != saved.init.net_ns {
        return Ok(None);
    }
    let space = shared.spaces.get(namespace.into())?;
    let record = match saved.record {
        SavedRecord::Open => RecordState::Open,
        SavedRecord::Confirmed { project } => RecordState::Confirmed { project },
        SavedRecord::Trusted => RecordState::Trusted,
    };
    let grant = Arc::new(Grant {
        id: saved.grant,
        container: saved.container,
        device: saved.device,
        caller_uid: saved.caller_uid,
        endpoints,
        init: saved.init,
        pidfd,
        space,
        since: SystemTime::now(),
        changing: Mutex::new(Changing { record, waiting: None }),
        token: Mutex::new(None),
        ended: RwLock::new(false),
    });
    if let Err(error) = open(shared, &grant) {
        tracing::error!(grant = %grant.id, container = %grant.container, %error, "endpoint cannot be opened again; trying on");
        lock(&shared.unopened).push(grant.id.clone());
    }
    shared.grants.insert(Arc::clone(&grant));
    watch(shared, &grant)?;
    Ok(Some(()))
}

/// Lets the end of the grant's init end the grant.
pub(crate) fn watch(shared: &Shared, grant: &Grant) -> io::Result<()> {
    // Locked over the call: the event may come before it returns.
    let mut token = lock(&grant.token);
    *token = Some(shared.poller.add(&grant.pidfd, Target::Init(grant.id.clone()))?);
    Ok(())
}

fn open(shared: &Shared, grant: &Grant) -> io::Result<()> {
    let _opening = grant.space.begin_opening();
    let missing = grant.space.reserve(&grant.endpoints, &grant.id);
    open_missing(shared, &grant.space, grant, &missing)
}

fn open_missing(shared: &Shared, space: &Arc<Space>, grant: &Grant, missing: &[u16]) -> io::Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let opened = open_inside(space, missing)?;
    space.install(&shared.poller, opened.sock_diag, missing.iter().copied().zip(opened.listeners), &grant.id)
}

/// Opens ports in a namespace from here; a port that is taken is an error that names its holder.
pub(crate) fn open_inside(space: &Space, ports: &[u16]) -> io::Result<crate::open::Opened> {
    let opened = ns::within_network(space.namespace.as_fd(), || Ok(open_here(ports)))?;
    opened.map_err(|error| match error {
        OpenError::SockDiag(source) => source,
        OpenError::Port { port, errno, sock_diag } => {
            io::Error::other(peer::why_not_opened(port, errno, sock_diag))
        }
    })
}

/// Tries again to open the endpoints that were taken when the grants were taken over.
pub(crate) fn retry_unopened(shared: &Arc<Shared>) {
    let again = std::mem::take(&mut *lock(&shared.unopened));
    let mut still = Vec::new();
    for grant in again.iter().filter_map(|id| shared.grants.get(id)) {
        match open(shared, &grant) {
            Ok(()) => tracing::info!(grant = %grant.id, "endpoint opened again"),
            Err(_) => still.push(grant.id.clone()),
        }
    }
    lock(&shared.unopened).extend(still);
}
