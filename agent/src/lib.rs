// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grants, endpoints and the gate: who may use which device.
//!
//! The `lighter` daemon starts one [`Agent`]. Hooks of container runtimes ask it for grants (`hook_server`), it opens
//! the devices' endpoints (`endpoints`: ports in the containers' network namespaces; `sockets`: unix sockets of the host),
//! decides about every connection there ([`gate`]), hands the accepted sockets to the services ([`Services`]), and ends a grant when its container's init
//! ends. `docs/gate.md` tells what this defends against and what not.
//!
//! ```text
//! hook ──► hook_server ──► grants ◄── ends ◄── the init's pidfd
//!               │             │
//!               ▼             ▼
//!  sockets, endpoints ──► streams ──► peer, unix_peer (who is it?) ──► gate (may it?) ──► record (did it ask?) ──► Services
//! ```
#![cfg(target_os = "linux")]

mod agent;
mod bundle;
mod cgroup;
mod config;
mod credentials;
mod device;
mod endpoints;
mod ends;
mod event_loop;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod gate;
mod grants;
pub mod hook_protocol;
mod hook_server;
mod ns;
mod open;
mod peer;
mod poller;
mod pool;
mod proc;
mod reconcile;
mod record;
mod refusals;
mod services;
mod sockdiag;
mod sockets;
mod state;
mod streams;
mod unix;
mod unix_peer;

pub use agent::{Agent, AgentError};
pub use cgroup::{CgroupError, CgroupId, Cgroups};
pub use config::{AgentConfig, Devices, Limits, SharedEndpoint, Trust};
pub use device::{BadDeviceName, DeviceName, VENDOR};
pub use grants::GrantView;
pub use ns::{NsId, enter_network};
pub use open::{OpenError, Opened, open_here};
pub use record::{Docker, EngineRecord, Record};
pub use services::{ServiceUnavailable, Services};
pub use state::StateError;
pub use unix::SocketError;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; what a panicking thread left is whole, since every change under a lock is one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
