// SPDX-License-Identifier: MIT OR Apache-2.0
//! The values in the messages between the ane service and its workers: names, shapes, places of tensors.

use std::fmt;
use std::str::FromStr;

use lighter_frames::{Dim, Element, Port};
use serde::{Deserialize, Serialize};

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

#[cfg(test)]
mod tests {
    use super::*;

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
