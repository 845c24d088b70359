// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the metal service and one of its workers say to each other.
//!
//! One `SOCK_SEQPACKET` pair a worker ([`lighter_wire::send`] and [`lighter_wire::recv`]); the worker finds its
//! end as descriptor 0. The service trusts nothing that a worker says: a worker has ggml and a container's
//! bytes in it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Service to worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToWorker {
    /// First message: what to load and how far to go. Answered by [`FromWorker::Ready`] or [`FromWorker::Failed`].
    Configure(WorkerConfig),
    /// A client's socket; one descriptor.
    Stream {
        /// Number of the stream, for logs.
        stream: u64,
        /// Protocol major of the client where it is known before the first byte.
        major: Option<u8>,
    },
    /// Answer to [`FromWorker::Find`] or [`FromWorker::Keep`]: with one descriptor (read-only, exactly the asked
    /// length) when `found`, else without.
    Weight {
        /// Number of the question.
        seq: u64,
        /// Whether a descriptor travels beside it.
        found: bool,
    },
    /// Say how things are; answered by [`FromWorker::Report`].
    Report {
        /// Chosen by the sender.
        seq: u64,
    },
}

/// What a worker needs to know before it starts. It ends when its control socket closes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Path or soname of libggml-base.
    pub base_library: PathBuf,
    /// Path or soname of libggml.
    pub registry_library: PathBuf,
    /// Folder of ggml's backend plug-ins; `None` leaves the search to ggml.
    pub backends_dir: Option<PathBuf>,
    /// ggml's name of the device that computes (`CPU`, `Vulkan0`); the host's CPU backend is the fallback for
    /// operations that it does not support.
    pub engine: String,
    /// Threads of the CPU backend; `None` leaves the number to ggml.
    pub threads: Option<u16>,
    /// Most bytes that all buffers of the container may hold.
    pub max_bytes: u64,
    /// Most streams at one time.
    pub max_streams: u32,
    /// Back big buffers with huge pages.
    pub huge_pages: bool,
    /// Ask the service for weights that others hold ([`FromWorker::Find`], [`FromWorker::Keep`]).
    pub share_weights: bool,
}

/// Names the content of one whole tensor upload.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightKey {
    /// Bytes.
    pub len: u64,
    /// BLAKE3 of the bytes, lower-case hexadecimal.
    pub blake3: String,
}

/// Worker to service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromWorker {
    /// ggml is loaded and the engine is open.
    Ready {
        /// ggml's description of the engine.
        engine: String,
        /// ggml's version.
        version: String,
    },
    /// The engine could not be opened; the worker ends.
    Failed {
        /// Why, for a person.
        reason: String,
    },
    /// A client asks by ggml's own 64-bit hash whether this owner has uploaded these bytes before.
    Find {
        /// Chosen by the worker.
        seq: u64,
        /// Bytes.
        len: u64,
        /// FNV-1a-64 as ggml computes it.
        fnv: u64,
    },
    /// A whole tensor was uploaded: keep it for others and give back a shared, read-only copy. One descriptor (a
    /// memfd that holds exactly the bytes). The service checks the hash itself.
    Keep {
        /// Chosen by the worker.
        seq: u64,
        /// What it is.
        key: WeightKey,
        /// FNV-1a-64 as ggml computes it, for later [`FromWorker::Find`]s of the same owner.
        fnv: u64,
    },
    /// Counters since the worker started.
    Report {
        /// Number of the question.
        seq: u64,
        /// The counters.
        counters: WorkerCounters,
    },
    /// A stream ended.
    Ended {
        /// Its number.
        stream: u64,
        /// Why, when not by the client's own orderly end.
        error: Option<String>,
    },
}

/// Counters of one worker, since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerCounters {
    /// Streams open now.
    pub streams_open: u64,
    /// Streams so far.
    pub streams_total: u64,
    /// Commands served.
    pub calls: u64,
    /// Graphs computed.
    pub graphs: u64,
    /// Bytes from clients.
    pub in_bytes: u64,
    /// Bytes to clients.
    pub out_bytes: u64,
    /// Bytes of buffers held, shared weights counted in full.
    pub held_bytes: u64,
    /// Bytes of those that are shared weights.
    pub shared_bytes: u64,
    /// Time in graph computation.
    pub engine_us: u64,
    /// Streams that ended by a refused or failed request.
    pub errors: u64,
}
