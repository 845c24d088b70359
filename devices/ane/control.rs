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

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use lighter_frames::{Dim, Element, Port};
use serde::{Deserialize, Serialize};

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

/// An execution provider of ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    /// ONNX Runtime's own kernels.
    Cpu,
    /// Intel's processors, GPUs and NPUs; option `device_type` says which.
    OpenVino,
    /// NVIDIA's GPUs.
    Cuda,
    /// NVIDIA's GPUs, by TensorRT.
    TensorRt,
    /// AMD's GPUs.
    MiGraphX,
    /// Apple's Neural Engine and GPU.
    CoreMl,
}

impl Provider {
    /// Its name in configuration, logs and journals.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::OpenVino => "openvino",
            Self::Cuda => "cuda",
            Self::TensorRt => "tensorrt",
            Self::MiGraphX => "migraphx",
            Self::CoreMl => "coreml",
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Names a model: BLAKE3 of its file and its ports, as the service computed it; lower-case hexadecimal in messages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelHash(pub [u8; 32]);

impl fmt::Display for ModelHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ModelHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<ModelHash> for String {
    fn from(hash: ModelHash) -> Self {
        hash.to_string()
    }
}

/// Text that is no hash of a model.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no model's hash, which is 64 hexadecimal digits")]
pub struct BadModelHash(String);

impl TryFrom<String> for ModelHash {
    type Error = BadModelHash;

    fn try_from(text: String) -> Result<Self, BadModelHash> {
        text.parse()
    }
}

impl FromStr for ModelHash {
    type Err = BadModelHash;

    fn from_str(text: &str) -> Result<Self, BadModelHash> {
        let bad = || BadModelHash(text.chars().take(80).collect());
        let bytes = from_hex(text).ok_or_else(bad)?;
        Ok(Self(bytes.try_into().map_err(|_| bad())?))
    }
}

/// Some bytes; lower-case hexadecimal in messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub Vec<u8>);

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> Self {
        bytes.0.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(digit).collect()
    }
}

/// Text that is no bytes.
#[derive(Debug, thiserror::Error)]
#[error("text of {0} characters is no bytes in hexadecimal")]
pub struct BadBytes(usize);

impl TryFrom<String> for Bytes {
    type Error = BadBytes;

    fn try_from(text: String) -> Result<Self, BadBytes> {
        from_hex(&text).map(Self).ok_or(BadBytes(text.len()))
    }
}

fn digit(value: u8) -> char {
    char::from_digit(value.into(), 16).unwrap_or('0')
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(value(*high)? << 4 | value(*low)?)).collect()
}

/// A model's file: `[ModelProto][pad to 4096][weights]`.
///
/// The proto's graph declares no inputs: they stand here, and are appended with the shapes of a run. Tensors
/// that are not in the proto are external data at the location `w`, which is the weights' part of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Its name.
    pub model: ModelHash,
    /// Bytes of the proto.
    pub proto_bytes: u64,
    /// Bytes of the weights; 0 when there are none.
    pub weights_bytes: u64,
    /// The inputs, in the order of a run's.
    pub inputs: Vec<ModelPort>,
    /// The outputs, in the order of an answer's.
    pub outputs: Vec<ModelPort>,
}

/// An input or an output of a model, as [`lighter_frames::Port`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelPort {
    /// Its name in the graph.
    pub name: String,
    /// Number of its type in ONNX (`TensorProto.DataType`).
    pub dtype: u8,
    /// The dimensions that the container's model declares, `None` for one that differs from run to run; `None`
    /// in place of the list when not even their number is known.
    pub dims: Option<Vec<Option<u64>>>,
}

impl ModelPort {
    /// From the container's message.
    #[must_use]
    pub fn new(port: &Port) -> Self {
        let dim = |dim: &Dim| match dim {
            Dim::Fixed(value) => Some(*value),
            Dim::Free => None,
        };
        let dims = port.dims.as_ref().map(|dims| dims.iter().map(dim).collect());
        Self { name: port.name.clone(), dtype: port.element.number(), dims }
    }

    /// As in the container's message; `None` when its type is none that travels.
    #[must_use]
    pub fn port(&self) -> Option<Port> {
        let dim = |dim: &Option<u64>| dim.map_or(Dim::Free, Dim::Fixed);
        let dims = self.dims.as_ref().map(|dims| dims.iter().map(dim).collect());
        Some(Port { name: self.name.clone(), element: Element::from_number(self.dtype.into())?, dims })
    }
}

/// Dimensions of every input of a run, in the order of the model's inputs.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shapes(pub Vec<Vec<u64>>);

impl fmt::Display for Shapes {
    /// `1x3x224x224,1`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, dims) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(",")?;
            }
            if dims.is_empty() {
                f.write_str("scalar")?;
            }
            for (at, dim) in dims.iter().enumerate() {
                write!(f, "{}{dim}", if at > 0 { "x" } else { "" })?;
            }
        }
        Ok(())
    }
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

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorPlace {
    /// Number of its type in ONNX.
    pub dtype: u8,
    /// Its dimensions.
    pub dims: Vec<u64>,
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
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

    #[test]
    fn what_is_no_hash_is_refused() {
        for text in ["", "00", &"0".repeat(63), &"G".repeat(64), &"A".repeat(64), &"é".repeat(32)] {
            assert!(text.parse::<ModelHash>().unwrap_err().to_string().contains("64 hexadecimal digits"));
        }
        assert!(serde_json::from_str::<Bytes>("\"0g\"").is_err());
        assert!(serde_json::from_str::<Bytes>("\"0\"").is_err());
    }

    #[test]
    fn a_port_goes_there_and_back() {
        let dims = Some(vec![Dim::Free, Dim::Fixed(3)]);
        let port = Port { name: "x".into(), element: Element::F16, dims };
        assert_eq!(ModelPort::new(&port).port(), Some(port.clone()));
        assert_eq!(ModelPort { dtype: 8, ..ModelPort::new(&port) }.port(), None, "texts do not travel");
    }

    #[test]
    fn shapes_read_well() {
        assert_eq!(Shapes(vec![vec![1, 3, 224, 224], vec![], vec![0]]).to_string(), "1x3x224x224,scalar,0");
    }
}
