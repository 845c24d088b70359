// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gate: who may use what, as one pure function over gathered facts.
//!
//! `streams.rs` gathers the facts of one accepted connection and calls [`decide`]; nothing else in lighter lets a
//! stream in. To change the rule, change this file and its table of cases.
//!
//! ```text
//! peer's socket not found, held by nobody, or not to be told  ─► refuse
//! a holder in no granted container                            ─► refuse
//! holders in different containers                             ─► refuse
//! the container has no grant for this device                  ─► refuse
//! the engine's record is not known yet                        ─► ask the engine, then decide again
//! the engine's record says otherwise                          ─► refuse
//! else                                                        ─► allow, under that grant
//! ```

use std::fmt;

use lighter_wire::{GrantId, Kind};

use crate::cgroup::{CgroupId, Cgroups};
use crate::ns::NsId;

/// What is known about the other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// The kernel knows no such socket or one that no process holds any more; or who connected it has ended.
    Gone,
    /// The socket is there, but no process was found that holds it.
    NoHolder {
        /// How many processes could not be looked into.
        unreadable: usize,
    },
    /// The look-up failed.
    Unknown {
        /// Why.
        reason: String,
    },
    /// Every process that holds it, or the one that connected a unix socket; never empty.
    Held(Vec<Holder>),
}

/// A process that holds the peer's socket, or connected it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// In the agent's pid namespace.
    pub pid: u32,
    /// For the log.
    pub command: String,
    /// Where it lives.
    pub cgroups: Cgroups,
    /// What it sees.
    pub mount_ns: NsId,
}

/// A container with at least one grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// The engine's id; a label.
    pub id: String,
    /// Its own control group, when it has one.
    pub cgroup: Option<CgroupId>,
    /// Its own mount namespace, when it has one.
    pub mount_ns: Option<NsId>,
    /// What it may use.
    pub grants: Vec<Grant>,
}

/// One grant of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Its name.
    pub id: GrantId,
    /// For which device.
    pub kind: Kind,
    /// What the engine said.
    pub record: Record,
}

/// What is known of the engine's record of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The engine recorded the request, or the administrator wants no record for this container.
    Confirmed,
    /// Nobody asked the engine yet, or the last answer is too old.
    Unasked,
    /// The engine gave another answer or none.
    Denied {
        /// Which.
        reason: String,
    },
}

/// What happens to the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It goes to the service.
    Allow {
        /// Under this grant.
        grant: GrantId,
        /// The process that opened it.
        pid: u32,
    },
    /// The engine has to be asked about this grant first.
    AskRecord {
        /// Which.
        grant: GrantId,
    },
    /// It is closed.
    Refuse(Reason),
}

/// Why a connection was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The peer ended or closed before it could be looked up.
    PeerGone,
    /// Nobody holds the peer's socket.
    NoHolder {
        /// How many processes could not be looked into.
        unreadable: usize,
    },
    /// The peer could not be looked up.
    LookupFailed {
        /// Why.
        reason: String,
    },
    /// A process that holds the socket is in no container with a grant.
    Stranger {
        /// Which.
        pid: u32,
        /// Its command.
        command: String,
    },
    /// Processes of two containers hold the socket.
    Shared {
        /// One container.
        one: String,
        /// The other.
        other: String,
    },
    /// The container asked for other devices only.
    OtherDevice {
        /// Which container.
        container: String,
        /// What it connected to.
        kind: Kind,
        /// What it has.
        has: Vec<Kind>,
    },
    /// The engine's record does not confirm the request.
    NotRecorded {
        /// Which container.
        container: String,
        /// What the engine said.
        reason: String,
    },
}

impl Reason {
    /// A word for each, to count and to limit by.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::PeerGone => "peer_gone",
            Self::NoHolder { .. } => "no_holder",
            Self::LookupFailed { .. } => "lookup_failed",
            Self::Stranger { .. } => "stranger",
            Self::Shared { .. } => "shared_socket",
            Self::OtherDevice { .. } => "other_device",
            Self::NotRecorded { .. } => "not_recorded",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerGone => f.write_str("the peer ended or closed its socket before it could be looked up"),
            Self::NoHolder { unreadable: 0 } => f.write_str("no process holds the peer's socket"),
            Self::NoHolder { unreadable } => write!(
                f,
                "no process was found that holds the peer's socket; {unreadable} processes could not be looked \
                 into, which the daemon may do as root"
            ),
            Self::LookupFailed { reason } => write!(f, "the peer could not be looked up: {reason}"),
            Self::Stranger { pid, command } => write!(
                f,
                "process {pid} ({command}) is in no container that was started with the device; start its \
                 container with --device"
            ),
            Self::Shared { one, other } => {
                write!(f, "processes of two containers hold the socket: {one} and {other}")
            }
            Self::OtherDevice { container, kind, has } => {
                let has: Vec<_> = has.iter().map(|kind| kind.as_str()).collect();
                write!(
                    f,
                    "container {container} was started with {}, not with {kind}; start it with --device \
                     lighter.sh/{kind}=all",
                    has.join(", ")
                )
            }
            Self::NotRecorded { container, reason } => {
                write!(f, "the engine does not confirm that container {container} asked for it: {reason}")
            }
        }
    }
}

/// Decides about one connection to the endpoint of `kind`.
#[must_use]
pub fn decide(kind: Kind, peer: &Peer, containers: &[Container]) -> Decision {
    let holders = match peer {
        Peer::Gone => return Decision::Refuse(Reason::PeerGone),
        Peer::NoHolder { unreadable } => {
            return Decision::Refuse(Reason::NoHolder { unreadable: *unreadable });
        }
        Peer::Unknown { reason } => {
            return Decision::Refuse(Reason::LookupFailed { reason: reason.clone() });
        }
        Peer::Held(holders) => holders,
    };
    let mut container: Option<(usize, &Container)> = None;
    for holder in holders {
        let Some(own) = container_of(holder, containers) else {
            return Decision::Refuse(Reason::Stranger { pid: holder.pid, command: holder.command.clone() });
        };
        match container {
            Some((number, first)) if number != own.0 => {
                return Decision::Refuse(Reason::Shared { one: first.id.clone(), other: own.1.id.clone() });
            }
            _ => container = Some(own),
        }
    }
    let (Some((_, container)), Some(holder)) = (container, holders.first()) else {
        return Decision::Refuse(Reason::NoHolder { unreadable: 0 });
    };
    by_grant(kind, container, holder.pid)
}

/// The container of a process: by control group, the outermost where one lies in another; else by mount namespace.
fn container_of<'a>(holder: &Holder, containers: &'a [Container]) -> Option<(usize, &'a Container)> {
    let by_cgroup = containers
        .iter()
        .enumerate()
        .filter_map(|(number, container)| Some((number, container, container.cgroup.as_ref()?)))
        .filter(|(_, _, cgroup)| cgroup.holds(&holder.cgroups))
        .min_by_key(|(_, _, cgroup)| cgroup.depth())
        .map(|(number, container, _)| (number, container));
    by_cgroup.or_else(|| {
        containers.iter().enumerate().find(|(_, container)| container.mount_ns == Some(holder.mount_ns))
    })
}

/// A container may have asked for a device by several names: a grant that the engine confirmed is taken first, one
/// to ask about next.
fn by_grant(kind: Kind, container: &Container, pid: u32) -> Decision {
    let mut ask = None;
    let mut denied = None;
    for grant in container.grants.iter().filter(|grant| grant.kind == kind) {
        match &grant.record {
            Record::Confirmed => return Decision::Allow { grant: grant.id.clone(), pid },
            Record::Unasked => ask = ask.or(Some(&grant.id)),
            Record::Denied { reason } => denied = denied.or(Some(reason)),
        }
    }
    match (ask, denied) {
        (Some(grant), _) => Decision::AskRecord { grant: grant.clone() },
        (None, Some(reason)) => {
            Decision::Refuse(Reason::NotRecorded { container: container.id.clone(), reason: reason.clone() })
        }
        (None, None) => {
            let mut has: Vec<Kind> = container.grants.iter().map(|grant| grant.kind).collect();
            has.sort_unstable();
            has.dedup();
            Decision::Refuse(Reason::OtherDevice { container: container.id.clone(), kind, has })
        }
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
