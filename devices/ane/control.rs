// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ane service and one of its workers say to each other.
//!
//! One `SOCK_SEQPACKET` pair a worker ([`lighter_wire::send`] and [`lighter_wire::recv`]); the worker finds its
//! end as descriptor 0. A worker loads one ONNX Runtime with one provider and serves one grant. The service
//! trusts nothing that a worker says: a worker has an engine and a container's bytes in it.
//!
//! ```text
//!   configure ─► ready ─► load ─► loaded ─► approve ─► stream … run, run, run … hand back ─► stream …
//! ```
//!
//! A run of shapes that are not approved, and every frame that is not a run's, comes back to the service with
//! the stream and the bytes that were read of it.

mod values;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use values::{BadBytes, BadModelHash, Bytes, Model, ModelHash, ModelPort, Provider, Shapes, TensorPlace};

/// Version of these messages.
pub const WORKER_VERSION: u32 = 1;

/// Service to worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToWorker {
    /// First message: what to load and how far to go. Answered by [`FromWorker::Ready`] or [`FromWorker::Failed`].
    Configure(WorkerConfig),
    /// A model; one descriptor, a memfd that is sealed against everything. Answered by [`FromWorker::Loaded`] or
    /// [`FromWorker::LoadFailed`]. A model that is loaded already is answered again.
    Load(Model),
    /// Serve every shape of this model that is not recalled.
    ApproveAll {
        /// The model.
        model: ModelHash,
    },
    /// Serve these shapes, also when they were recalled before.
    Approve {
        /// The model.
        model: ModelHash,
        /// The shapes.
        shapes: Shapes,
    },
    /// Serve these shapes no longer: the next run of theirs comes back by [`FromWorker::HandBack`].
    Recall {
        /// The model.
        model: ModelHash,
        /// The shapes.
        shapes: Shapes,
    },
    /// A container's stream; the socket, then the ring's memfd when the stream has one, then, when there is one, a
    /// file of data that were read behind what is pending. As they came by [`FromWorker::HandBack`].
    Stream(Handover),
    /// Send inputs and outputs of the next run of these shapes, by [`FromWorker::Sampled`].
    Sample {
        /// The model.
        model: ModelHash,
        /// The shapes.
        shapes: Shapes,
    },
    /// Run these inputs, whether the shapes are approved or not; one descriptor that holds them. Answered by
    /// [`FromWorker::TrialDone`]. The compiled session is kept for a later [`ToWorker::Approve`].
    Trial(Trial),
    /// Drop the model and what was compiled of it; its streams end. Answered by [`FromWorker::Forgotten`].
    Forget {
        /// The model.
        model: ModelHash,
    },
    /// Say how things are; answered by [`FromWorker::Report`].
    Report {
        /// Chosen by the sender.
        seq: u64,
    },
}

/// Worker to service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromWorker {
    /// The library is loaded and has the provider.
    Ready {
        /// [`WORKER_VERSION`] of the worker.
        version: u32,
        /// The library's own version, such as `1.32.0`.
        ort_version: String,
        /// Providers that the library names as its own.
        providers: Vec<String>,
    },
    /// The library or the provider cannot be used; the worker ends.
    Failed {
        /// Why, for a person.
        reason: String,
    },
    /// The model is there. Where the worker does not bind shapes, it has also been compiled.
    Loaded {
        /// The model.
        model: ModelHash,
        /// How long it took.
        compile_us: u64,
    },
    /// The model cannot be used.
    LoadFailed {
        /// The model.
        model: ModelHash,
        /// Why, for a person.
        reason: String,
    },
    /// A stream comes back at the boundary of a run; descriptors as in [`ToWorker::Stream`]. The worker keeps none.
    HandBack {
        /// The stream as it is.
        stream: Handover,
        /// What it needs now.
        wants: Wants,
    },
    /// Inputs and outputs of one run; one descriptor, a sealed memfd that holds them.
    Sampled {
        /// The model.
        model: ModelHash,
        /// The shapes.
        shapes: Shapes,
        /// Where the inputs are, in the order of the model's.
        inputs: Vec<TensorPlace>,
        /// Where the outputs are, in the order of the model's.
        outputs: Vec<TensorPlace>,
    },
    /// A trial is done; one descriptor with the outputs where they were asked for and the outcome is
    /// [`Outcome::Ran`].
    TrialDone {
        /// Its number.
        trial: u64,
        /// What came of it.
        outcome: Outcome,
    },
    /// The compiled session of approved shapes made room for another: they are approved no longer.
    Evicted {
        /// The model.
        model: ModelHash,
        /// The shapes.
        shapes: Shapes,
    },
    /// No stream, session or mapping of the model is left.
    Forgotten {
        /// The model.
        model: ModelHash,
    },
    /// A stream ended.
    Ended {
        /// Its number.
        stream: u64,
        /// Why, when not by the client's own orderly end.
        error: Option<String>,
    },
    /// Counters since the worker started: sent now and then while there are runs, never while there are none.
    Counters(WorkerCounters),
    /// How things are.
    Report {
        /// Number of the question.
        seq: u64,
        /// The counters.
        counters: WorkerCounters,
        /// How long the oldest run that goes on has taken; `None` when there is none.
        oldest_run_us: Option<u64>,
    },
}

/// What a worker needs to know before it starts. It ends when its control socket closes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// [`WORKER_VERSION`] of the service.
    pub version: u32,
    /// Path of libonnxruntime.
    pub library: PathBuf,
    /// What computes.
    pub provider: Provider,
    /// The provider's own options; never a container's.
    pub options: BTreeMap<String, String>,
    /// Compile a session for each shape of a run; else one session with the shapes that the model declares
    /// serves all of them.
    pub bind_shapes: bool,
    /// Most compiled sessions with bound shapes of one model.
    pub max_bound: u32,
    /// Threads of one session.
    pub threads: u16,
    /// Most bytes that the inputs of one run may have together, and its outputs.
    pub max_run_bytes: u64,
    /// Most streams at one time.
    pub max_streams: u32,
    /// Folder for what the provider compiles, where it can keep that.
    pub cache_dir: Option<PathBuf>,
}

/// A stream on its way between service and worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handover {
    /// Number of the stream, for logs.
    pub stream: u64,
    /// The model that its runs are of.
    pub model: ModelHash,
    /// Whether a ring's memfd travels behind the socket.
    pub ring: bool,
    /// Bytes that were read from the socket and not answered; they come before what the socket still holds.
    pub pending: Option<Bytes>,
}

/// Why a stream comes back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Wants {
    /// A run of shapes that this worker may not serve, or whose session made room for another.
    Shapes(Shapes),
    /// A run that this worker's provider failed at; the answer is still owed.
    Another {
        /// The shapes.
        shapes: Shapes,
        /// The provider's words.
        reason: String,
    },
    /// A frame that is for the service.
    Setup,
}

/// A run that no container waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trial {
    /// Chosen by the sender.
    pub trial: u64,
    /// The model.
    pub model: ModelHash,
    /// Where the inputs are, in the order of the model's. Their dimensions are the shapes.
    pub inputs: Vec<TensorPlace>,
    /// How often to run and take the time; compiling and one run before are not in it.
    pub runs: u32,
    /// Send the outputs of the first run.
    pub outputs: bool,
}

/// What came of a trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// It ran.
    Ran {
        /// How long compiling took; `None` when the session was there.
        compile_us: Option<u64>,
        /// The time of each run.
        run_us: Vec<u64>,
        /// Where the outputs are, in the order of the model's; empty when they were not asked for.
        outputs: Vec<TensorPlace>,
    },
    /// The model does not compile.
    NotCompiled {
        /// The provider's words.
        reason: String,
    },
    /// It compiles and does not run.
    NotRun {
        /// The provider's words.
        reason: String,
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
    /// Runs answered with outputs.
    pub runs: u64,
    /// Bytes of their inputs.
    pub in_bytes: u64,
    /// Bytes of their outputs.
    pub out_bytes: u64,
    /// Time within the engine.
    pub engine_us: u64,
    /// Bytes of models held, as files.
    pub model_bytes: u64,
    /// Compiled sessions held.
    pub sessions: u64,
    /// Runs that were answered with an error, and streams that were ended by one.
    pub errors: u64,
    /// The last of those, for a person.
    pub last_error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handover_reads_back_as_it_was_written() {
        let handover = Handover {
            stream: 7,
            model: ModelHash(std::array::from_fn(|at| u8::try_from(at * 8).unwrap())),
            ring: true,
            pending: Some(Bytes(vec![0, 255, 16, 1])),
        };
        let wants = Wants::Shapes(Shapes(vec![vec![1, 3, u64::MAX], vec![]]));
        let message = FromWorker::HandBack { stream: handover, wants };
        let text = serde_json::to_string(&message).unwrap();
        assert!(text.contains("\"00ff1001\"") && text.contains("\"000810"), "{text}");
        assert_eq!(serde_json::from_str::<FromWorker>(&text).unwrap(), message);
    }
}
