// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages between the daemon and one service.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{GrantId, Owner, ServiceReport};

/// A connection that passed the gate. The accepted socket travels beside it as the only descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOffer {
    /// Number of the stream, unique for the life of the daemon; for logs.
    pub stream: u64,
    /// The grant under which it was let in.
    pub grant: GrantId,
    /// The engine's id of the container; a label, never a key.
    pub container: String,
    /// Whose uploads the container may learn about.
    pub owner: Owner,
    /// Device name as asked for (`all`, or one engine's).
    pub device: String,
    /// Process that opened the connection, in the daemon's pid namespace; `None` where it could not be told.
    pub peer_pid: Option<u32>,
    /// Folders of the container's control groups for memory and processor time, for processes that work for it alone; none
    /// where it has no groups of its own.
    pub groups: Vec<PathBuf>,
}

/// Daemon to service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToService {
    /// First message of all: [`crate::CONTROL_VERSION`] of the sender.
    Hello {
        /// The sender's version.
        version: u32,
    },
    /// A new stream; one descriptor.
    Stream(StreamOffer),
    /// End every stream of this grant and free its memory; answered by [`FromService::Revoked`] when done.
    Revoke {
        /// The grant that ended.
        grant: GrantId,
    },
    /// Say how things are; answered by [`FromService::Report`] with the same number.
    Report {
        /// Chosen by the sender.
        seq: u64,
    },
}

/// Service to daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromService {
    /// Answer to [`ToService::Hello`]: ready for streams.
    Ready {
        /// The service's version.
        version: u32,
    },
    /// No stream of the grant is left and its memory is free.
    Revoked {
        /// The grant.
        grant: GrantId,
    },
    /// How things are.
    Report {
        /// Number of the question.
        seq: u64,
        /// The answer.
        report: Box<ServiceReport>,
    },
}
