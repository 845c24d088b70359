// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grants: this container may use this device. What is recorded of a container's init when its grant is made, how it is
//! found again, and the table of all grants.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime};

use lighter_wire::{Endpoint, GrantId, Kind, Owner};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::cgroup::{self, CgroupId, CgroupMounts, Cgroups};
use crate::device::DeviceName;
use crate::endpoints::Space;
use crate::gate;
use crate::lock;
use crate::ns::NsId;
use crate::poller::Token;
use crate::proc;
use crate::state::{SavedRecord, State, StateError};
use crate::streams::Waiting;

/// A container's init process, and by what its container's processes are known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Init {
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    pub(crate) net_ns: NsId,
    pub(crate) pid_ns: NsId,
    pub(crate) mount_ns: NsId,
    /// Whether the mount namespace is the container's own; one that it shares with its runtime identifies nobody.
    pub(crate) own_mounts: bool,
    pub(crate) cgroup: Option<CgroupId>,
    /// Folders of its groups for memory and processor time.
    #[serde(default)]
    pub(crate) groups: Vec<PathBuf>,
}

impl Init {
    /// Records the init behind a pidfd. `strangers` are processes outside of the container: the agent, the hook.
    pub(crate) fn record(pidfd: impl AsFd, mounts: &CgroupMounts, strangers: &[u32]) -> io::Result<Self> {
        let pid = proc::pid_of_pidfd(&pidfd)?.ok_or_else(|| {
            io::Error::other("the container's init has ended or lives out of the agent's sight")
        })?;
        let strange: Vec<Cgroups> = strangers.iter().filter_map(|&pid| Cgroups::of(pid).ok()).collect();
        let mount_ns = proc::ns_id(pid, "mnt")?;
        let own = Cgroups::of(pid)?;
        let init = Self {
            pid,
            start_time: proc::start_time(pid)?,
            net_ns: proc::ns_id(pid, "net")?,
            pid_ns: proc::ns_id(pid, "pid")?,
            mount_ns,
            own_mounts: strangers.iter().all(|&pid| proc::ns_id(pid, "mnt").is_ok_and(|ns| ns != mount_ns)),
            cgroup: cgroup::choose(mounts, pid, &own, &strange.iter().collect::<Vec<_>>()),
            groups: mounts.accounts(&own),
        };
        // Alive after all was read: the number meant this process all the while.
        if proc::has_ended(&pidfd)? {
            return Err(io::Error::other("the container's init has ended"));
        }
        Ok(init)
    }

    /// Whether the processes of the container can be told from others.
    pub(crate) const fn identifies(&self) -> bool {
        self.own_mounts || self.cgroup.is_some()
    }

    /// Opens the init again after a restart of the agent; `None` when it has ended or is another process.
    pub(crate) fn reopen(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let same = || -> io::Result<bool> {
            Ok(proc::start_time(self.pid)? == self.start_time
                && proc::ns_id(self.pid, "net")? == self.net_ns
                && proc::ns_id(self.pid, "pid")? == self.pid_ns
                && proc::ns_id(self.pid, "mnt")? == self.mount_ns)
        };
        // Asked of a process that is ending, `/proc` answers in several ways; none of them is the living init.
        let same = same().unwrap_or(false) && !proc::has_ended(&pidfd)?;
        Ok(same.then_some(pidfd))
    }
}

/// What is known of the engine's record of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecordState {
    /// Nobody asked yet.
    Open,
    /// The engine confirmed it.
    Confirmed { project: Option<String> },
    /// The administrator wants none.
    Trusted,
    /// The engine denied it, or did not answer, at that time.
    Denied { reason: String, at: Instant },
}

/// The part of a grant that changes.
#[derive(Debug)]
pub(crate) struct Changing {
    pub(crate) record: RecordState,
    /// Streams that wait for the engine's answer; `Some` while it is being asked.
    pub(crate) waiting: Option<Vec<Waiting>>,
}

/// One grant.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) id: GrantId,
    pub(crate) container: String,
    pub(crate) device: DeviceName,
    pub(crate) caller_uid: u32,
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) init: Init,
    pub(crate) pidfd: OwnedFd,
    pub(crate) space: Arc<Space>,
    pub(crate) since: SystemTime,
    pub(crate) changing: Mutex<Changing>,
    /// Entry of the pidfd in the poller.
    pub(crate) token: Mutex<Option<Token>>,
    /// Read-held while a stream is handed over, so that none reaches a service after the revoke.
    pub(crate) ended: RwLock<bool>,
}

/// One grant, as it is shown to a user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GrantView {
    /// Its name.
    pub grant: GrantId,
    /// The engine's id of the container.
    pub container: String,
    /// Full name of the device.
    pub device: String,
    /// Where the container reaches it.
    pub endpoints: Vec<String>,
    /// The container's init, in the agent's pid namespace.
    pub init_pid: u32,
    /// The container's own control group, when it has one.
    pub cgroup: Option<String>,
    /// Seconds since 1970 at which it was made, or taken over by this daemon.
    pub since_unix_s: u64,
    /// Whose data its uploads are; `None` while the engine's record is not known.
    pub owner: Option<Owner>,
    /// `confirmed`, `trusted`, `open`, or why the engine's record denies it.
    pub record: String,
}

impl Grant {
    /// Which container: two grants of the same init are of one container.
    fn container_key(&self) -> (u32, u64) {
        (self.init.pid, self.init.start_time)
    }

    pub(crate) fn owner(&self) -> Option<Owner> {
        match &lock(&self.changing).record {
            RecordState::Confirmed { project: Some(project) } => {
                Some(Owner(format!("compose/{}/{project}", self.caller_uid)))
            }
            RecordState::Confirmed { project: None } | RecordState::Trusted => {
                Some(Owner(format!("container/{}/{}", self.caller_uid, self.container)))
            }
            RecordState::Open | RecordState::Denied { .. } => None,
        }
    }

    fn record_fact(&self, retry: Duration) -> gate::Record {
        match &lock(&self.changing).record {
            RecordState::Confirmed { .. } | RecordState::Trusted => gate::Record::Confirmed,
            RecordState::Denied { reason, at } if at.elapsed() < retry => {
                gate::Record::Denied { reason: reason.clone() }
            }
            RecordState::Open | RecordState::Denied { .. } => gate::Record::Unasked,
        }
    }

    /// Writes down how the grant stands, for the next daemon.
    pub(crate) fn save(&self, state: &State) -> Result<(), StateError> {
        state.save(&state.describe(
            &self.id,
            &self.container,
            &self.device,
            self.caller_uid,
            &self.init,
            self.saved_record(),
        ))
    }

    fn saved_record(&self) -> SavedRecord {
        match &lock(&self.changing).record {
            RecordState::Confirmed { project } => SavedRecord::Confirmed { project: project.clone() },
            RecordState::Trusted => SavedRecord::Trusted,
            RecordState::Open | RecordState::Denied { .. } => SavedRecord::Open,
        }
    }

    pub(crate) fn view(&self) -> GrantView {
        let record = match &lock(&self.changing).record {
            RecordState::Open => "open".to_owned(),
            RecordState::Confirmed { .. } => "confirmed".to_owned(),
            RecordState::Trusted => "trusted".to_owned(),
            RecordState::Denied { reason, .. } => reason.clone(),
        };
        GrantView {
            grant: self.id.clone(),
            container: self.container.clone(),
            device: self.device.to_string(),
            endpoints: self.endpoints.iter().map(ToString::to_string).collect(),
            init_pid: self.init.pid,
            cgroup: self.init.cgroup.as_ref().map(|cgroup| cgroup.path().to_owned()),
            since_unix_s: self
                .since
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            owner: self.owner(),
            record,
        }
    }
}

/// A name that no other grant ever has.
pub(crate) fn new_id(kind: Kind) -> io::Result<GrantId> {
    let uuid = proc::read_capped(Path::new("/proc/sys/kernel/random/uuid"), 100)?;
    let hex: String =
        uuid.iter().filter(|byte| byte.is_ascii_hexdigit()).take(16).map(|&byte| char::from(byte)).collect();
    if hex.len() < 16 {
        return Err(io::Error::other("/proc/sys/kernel/random/uuid gave no number"));
    }
    Ok(GrantId(format!("{kind}-{hex}")))
}

/// All grants.
#[derive(Debug, Default)]
pub(crate) struct Grants(Mutex<BTreeMap<GrantId, Arc<Grant>>>);

impl Grants {
    pub(crate) fn insert(&self, grant: Arc<Grant>) {
        lock(&self.0).insert(grant.id.clone(), grant);
    }

    pub(crate) fn remove(&self, id: &GrantId) -> Option<Arc<Grant>> {
        lock(&self.0).remove(id)
    }

    pub(crate) fn get(&self, id: &GrantId) -> Option<Arc<Grant>> {
        lock(&self.0).get(id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Grant>> {
        lock(&self.0).values().cloned().collect()
    }

    /// The grant of this init for this device, if it has one.
    pub(crate) fn of(&self, init: &Init, device: &DeviceName) -> Option<Arc<Grant>> {
        lock(&self.0)
            .values()
            .find(|grant| grant.container_key() == (init.pid, init.start_time) && grant.device == *device)
            .cloned()
    }

    /// The facts that the gate decides by.
    pub(crate) fn containers(&self, retry: Duration) -> Vec<gate::Container> {
        let mut containers: BTreeMap<(u32, u64), gate::Container> = BTreeMap::new();
        for grant in self.all() {
            let fact = gate::Grant {
                id: grant.id.clone(),
                kind: grant.device.kind(),
                record: grant.record_fact(retry),
            };
            containers
                .entry(grant.container_key())
                .or_insert_with(|| gate::Container {
                    id: grant.container.clone(),
                    cgroup: grant.init.cgroup.clone(),
                    mount_ns: grant.init.own_mounts.then_some(grant.init.mount_ns),
                    grants: Vec::new(),
                })
                .grants
                .push(fact);
        }
        containers.into_values().collect()
    }
}
