// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the daemon tells the agent when it starts it, and what the agent refuses of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use lighter_wire::{Endpoint, Kind};

use crate::record::EngineRecord;

/// Which devices there are, and where a container reaches each.
pub type Devices = BTreeMap<Kind, Vec<Endpoint>>;

/// All that the agent is told at start.
pub struct AgentConfig {
    /// Keeps the grants over a restart: `/run/lighter` for the system's daemon. Only one agent may use it.
    pub state_dir: PathBuf,
    /// Where hooks find the agent; every user may connect, the agent decides who may ask.
    pub hook_socket: PathBuf,
    /// Folder below which devices' unix endpoints are, a directory each: `/run/lighter` for the system's daemon.
    pub socket_dir: PathBuf,
    /// The hook's program, as the CDI specifications name it.
    pub hook_path: PathBuf,
    /// The devices that are on.
    pub devices: Devices,
    /// The engines whose records confirm requests.
    pub records: Vec<Box<dyn EngineRecord>>,
    /// Containers that need no engine's record.
    pub trust: Trust,
    /// Users besides root whose hooks may ask for containers in their own user namespaces.
    pub hook_uids: BTreeSet<u32>,
    /// Time limits and caps.
    pub limits: Limits,
}

impl fmt::Debug for AgentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let records: Vec<String> = self.records.iter().map(|record| record.name()).collect();
        f.debug_struct("AgentConfig")
            .field("state_dir", &self.state_dir)
            .field("hook_socket", &self.hook_socket)
            .field("socket_dir", &self.socket_dir)
            .field("hook_path", &self.hook_path)
            .field("devices", &self.devices)
            .field("records", &records)
            .field("trust", &self.trust)
            .field("hook_uids", &self.hook_uids)
            .field("limits", &self.limits)
            .finish()
    }
}

/// For which containers the administrator wants no engine's record: those of engines that keep none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trust {
    /// Containers whose hook ran as one of these users.
    pub uids: BTreeSet<u32>,
    /// Containers in or below one of these control groups.
    pub cgroups: Vec<String>,
}

/// Time limits and caps; the defaults are meant for use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long the engine may take to answer about a container.
    pub record_timeout: Duration,
    /// How long an answer that denies, or no answer, stands before the engine is asked again.
    pub record_retry: Duration,
    /// How long one message of a hook may take.
    pub hook_timeout: Duration,
    /// Streams of one grant that may wait for the engine's answer.
    pub waiting_streams: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            record_timeout: Duration::from_secs(3),
            record_retry: Duration::from_secs(1),
            hook_timeout: Duration::from_secs(5),
            waiting_streams: 64,
        }
    }
}

/// Two devices at one endpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the devices {first} and {second} are both configured at {endpoint}; each needs an endpoint of its own"
)]
pub struct SharedEndpoint {
    endpoint: Endpoint,
    first: Kind,
    second: Kind,
}

/// Which device an endpoint belongs to.
///
/// # Errors
/// When two devices share one.
pub(crate) fn by_endpoint(devices: &Devices) -> Result<BTreeMap<Endpoint, Kind>, SharedEndpoint> {
    let mut kinds = BTreeMap::new();
    for (&kind, endpoints) in devices {
        for &endpoint in endpoints {
            match kinds.insert(endpoint, kind) {
                Some(first) if first != kind => {
                    return Err(SharedEndpoint { endpoint, first, second: kind });
                }
                _ => {}
            }
        }
    }
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_devices_at_one_endpoint_are_refused() {
        let at = |port| vec![Endpoint::Loopback(port)];
        assert!(by_endpoint(&Devices::from([(Kind::Metal, at(1)), (Kind::Mps, at(2))])).is_ok());
        let error = by_endpoint(&Devices::from([(Kind::Metal, at(1)), (Kind::Mps, at(1))])).unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:1"));
        let unix = || vec![Endpoint::Unix(Kind::Ane)];
        assert!(by_endpoint(&Devices::from([(Kind::Ane, unix())])).is_ok());
        let error = by_endpoint(&Devices::from([(Kind::Ane, unix()), (Kind::Mps, unix())])).unwrap_err();
        assert!(error.to_string().contains("/run/lighter/ane/socket"), "{error}");
    }
}
