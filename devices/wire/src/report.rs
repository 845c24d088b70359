// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a service says of itself when it is asked.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A service's answer about its engine and its containers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceReport {
    /// The engine, or why there is none.
    pub engine: EngineState,
    /// One entry per container with a live grant, by grant.
    pub containers: BTreeMap<String, ContainerReport>,
    /// Device-specific totals, by name with the unit in it (`weights_bytes`, `workers`).
    pub totals: BTreeMap<String, u64>,
    /// The latest things that went wrong, oldest first; bounded.
    pub troubles: Vec<String>,
}

/// What computes, as far as the service knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state", deny_unknown_fields)]
pub enum EngineState {
    /// Found and able to run.
    Available {
        /// What a user calls it: `CPU`, `Vulkan0 (llvmpipe …)`.
        name: String,
        /// Version of the library that drives it.
        version: String,
    },
    /// Not there, or not usable.
    Missing {
        /// Why.
        reason: String,
        /// What the user can do about it.
        remedy: String,
    },
}

/// Counters of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerReport {
    /// The engine's id of the container.
    pub container: String,
    /// Streams open now.
    pub streams_open: u64,
    /// Streams since the grant.
    pub streams_total: u64,
    /// Requests served.
    pub calls: u64,
    /// Bytes from the container.
    pub in_bytes: u64,
    /// Bytes to the container.
    pub out_bytes: u64,
    /// Memory held for it in the engine, shared weights counted in full.
    pub held_bytes: u64,
    /// Time the engine worked for it.
    pub engine_us: u64,
    /// Requests that failed.
    pub errors: u64,
    /// The last failure, in words; `None` when nothing failed.
    pub last_error: Option<String>,
}
