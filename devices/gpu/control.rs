// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the gpu service and one of its sessions say to each other.
//!
//! One `SOCK_SEQPACKET` pair a session ([`lighter_wire::send`] and [`lighter_wire::recv`]); the session finds its end as
//! descriptor 0 and ends when it closes. The service trusts nothing that a session says: a container's bytes are in it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::session::Limits;

/// Service to session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToSession {
    /// First message; one descriptor: the socket of a render server. Answered by [`FromSession::Ready`] or
    /// [`FromSession::Failed`].
    Configure(SessionConfig),
    /// A client's socket; one descriptor. A session serves one stream and ends with it.
    Stream {
        /// Number of the stream, for its end.
        stream: u64,
    },
    /// Say how things are; answered by [`FromSession::Counters`] with the same number.
    Report {
        /// Chosen by the service.
        seq: u64,
    },
}

/// What a session needs to know before it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionConfig {
    /// virglrenderer.
    pub library: PathBuf,
    /// How much the client may have.
    pub limits: Limits,
}

/// Session to service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromSession {
    /// The renderer has been started and can do what Mesa's driver needs.
    Ready {
        /// Version of Venus's capabilities.
        capset_version: u32,
    },
    /// That could not be done; the session ends.
    Failed {
        /// Why, for a person.
        reason: String,
    },
    /// The client has a context: the render server has a process for it from now on.
    Context {
        /// What the program calls itself.
        name: String,
    },
    /// The stream ended; the session ends.
    Ended {
        /// Its number.
        stream: u64,
        /// Why, when not by the client's own orderly end.
        reason: Option<String>,
    },
    /// How things are.
    Counters(Counters),
}

/// Counters of one session, since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// Number of the question.
    pub seq: u64,
    /// Requests on the socket; commands of Vulkan go past it.
    pub requests: u64,
    /// Bytes from the client on the socket.
    pub bytes_in: u64,
    /// Bytes to the client on the socket.
    pub bytes_out: u64,
    /// Bytes of memory that the client can map.
    pub mapped_bytes: u64,
    /// In how many pieces.
    pub blobs: u64,
}
