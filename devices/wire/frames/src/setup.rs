// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages that set a stream up, until its model is loaded and its ring is there.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::read::Reader;
use crate::tensor::{read_ports, write_ports};
use crate::write::Writer;
use crate::{FrameError, MAX_NAME_BYTES, MAX_TEXT_BYTES, Port};

/// Longest ModelProto: protobuf's own limit.
pub const MAX_PROTO_BYTES: u64 = (1 << 31) - 1;
/// Most weights.
pub const MAX_WEIGHTS_BYTES: u64 = 1 << 38;
/// Where the weights start: at the next multiple of this after the ModelProto.
pub const MODEL_ALIGNMENT: u64 = 4096;
/// `location` of external data in a model: its weights, never a file.
pub const WEIGHTS_LOCATION: &str = "w";
/// Longest [`Hello::units`].
pub const MAX_UNITS_BYTES: usize = 64;

/// Version of an ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrtVersion {
    /// As in **1**.26.0.
    pub major: u16,
    /// As in 1.**26**.0.
    pub minor: u16,
    /// As in 1.26.**0**.
    pub patch: u16,
}

impl fmt::Display for OrtVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl OrtVersion {
    /// Reads `1.26.0`, `1.26` and what may follow after a `-`, `+` or another dot; `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let numbers = text.split(['-', '+']).next()?;
        let mut numbers = numbers.split('.').map(|number| number.parse().ok());
        let (major, minor) = (numbers.next()??, numbers.next()??);
        Some(Self { major, minor, patch: numbers.next().flatten().unwrap_or(0) })
    }

    fn write(self, to: &mut Writer) {
        to.u16(self.major);
        to.u16(self.minor);
        to.u16(self.patch);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self { major: from.u16("ort")?, minor: from.u16("ort")?, patch: from.u16("ort")? })
    }
}

/// How data travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// In memory that both sides map; needs descriptors beside the stream.
    SharedMemory,
    /// In the stream itself.
    Stream,
}

impl Transport {
    fn write(self, to: &mut Writer) {
        to.u8(match self {
            Self::SharedMemory => 1,
            Self::Stream => 2,
        });
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        match from.u8("transport")? {
            1 => Ok(Self::SharedMemory),
            2 => Ok(Self::Stream),
            value => Err(FrameError::Value { field: "transport", value: value.into(), allowed: "1 or 2" }),
        }
    }
}

/// First message of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The container's ONNX Runtime.
    pub ort: OrtVersion,
    /// What the container would like.
    pub transport: Transport,
    /// Which units the user pins the model to, as the user wrote it; empty leaves the choice to the host.
    pub units: String,
}

impl Hello {
    pub(crate) fn write(&self, to: &mut Writer) -> Result<(), FrameError> {
        self.ort.write(to);
        self.transport.write(to);
        to.text("units", &self.units, MAX_UNITS_BYTES, "0 to 64 bytes")
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self {
            ort: OrtVersion::read(from)?,
            transport: Transport::read(from)?,
            units: from.text("units", MAX_UNITS_BYTES, "0 to 64 bytes")?,
        })
    }
}

/// Answer to [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloOk {
    /// The host's ONNX Runtime; `None` while the host does not know it.
    pub ort: Option<OrtVersion>,
    /// What this stream uses.
    pub transport: Transport,
    /// Largest model that the host takes, ModelProto and weights together.
    pub max_model_bytes: u64,
    /// Most data of one run, in one direction.
    pub max_run_bytes: u64,
}

impl HelloOk {
    pub(crate) fn write(self, to: &mut Writer) {
        // No release is 0.0.0.
        self.ort.unwrap_or(OrtVersion { major: 0, minor: 0, patch: 0 }).write(to);
        self.transport.write(to);
        to.u64(self.max_model_bytes);
        to.u64(self.max_run_bytes);
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let ort = OrtVersion::read(from)?;
        Ok(Self {
            ort: Some(ort).filter(|ort| (ort.major, ort.minor, ort.patch) != (0, 0, 0)),
            transport: Transport::read(from)?,
            max_model_bytes: from.u64("max_model_bytes")?,
            max_run_bytes: from.u64("max_run_bytes")?,
        })
    }
}

/// Which model this stream is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// BLAKE3 of the model's bytes ([`Self::file_bytes`] of them), as the container computed it.
    pub hash: [u8; 32],
    /// Length of the ModelProto.
    pub proto_bytes: u64,
    /// Length of the weights behind it.
    pub weights_bytes: u64,
    /// The inputs, in the order in which runs have them.
    pub inputs: Vec<Port>,
    /// The outputs, in the order in which answers have them.
    pub outputs: Vec<Port>,
    /// A name for people; not unique, may be empty.
    pub label: String,
}

impl Model {
    /// Where the weights start.
    #[must_use]
    pub const fn weights_offset(&self) -> u64 {
        // Cannot overflow below the caps; a hand-made value over them saturates to a size that nobody takes.
        match self.proto_bytes.checked_next_multiple_of(MODEL_ALIGNMENT) {
            Some(offset) => offset,
            None => u64::MAX,
        }
    }

    /// Length of all the model's bytes.
    #[must_use]
    pub const fn file_bytes(&self) -> u64 {
        self.weights_offset().saturating_add(self.weights_bytes)
    }

    pub(crate) fn write(&self, to: &mut Writer) -> Result<(), FrameError> {
        self.check()?;
        to.bytes(&self.hash);
        to.u64(self.proto_bytes);
        to.u64(self.weights_bytes);
        write_ports(to, "inputs", &self.inputs)?;
        write_ports(to, "outputs", &self.outputs)?;
        to.text("label", &self.label, MAX_NAME_BYTES, "0 to 1024 bytes")
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let model = Self {
            hash: from.hash("hash")?,
            proto_bytes: from.u64("proto_bytes")?,
            weights_bytes: from.u64("weights_bytes")?,
            inputs: read_ports(from, "inputs")?,
            outputs: read_ports(from, "outputs")?,
            label: from.text("label", MAX_NAME_BYTES, "0 to 1024 bytes")?,
        };
        model.check().map(|()| model)
    }

    fn check(&self) -> Result<(), FrameError> {
        if self.proto_bytes == 0 || self.proto_bytes > MAX_PROTO_BYTES {
            let allowed = "1 to 2^31 - 1";
            return Err(FrameError::Value { field: "proto_bytes", value: self.proto_bytes, allowed });
        }
        if self.weights_bytes > MAX_WEIGHTS_BYTES {
            let allowed = "0 to 2^38";
            return Err(FrameError::Value { field: "weights_bytes", value: self.weights_bytes, allowed });
        }
        Ok(())
    }
}

/// The model is ready to run, here or soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loaded {
    /// BLAKE3 of the model's bytes, as the host computed it.
    pub hash: [u8; 32],
}

/// What a refusal means for the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The host cannot run this model: not to be asked again for it.
    Model,
    /// Nobody's fault: a later attempt may be served.
    Busy,
    /// The peer broke the rules or speaks another version.
    Protocol,
}

/// Ends a set-up; the host closes the stream behind it. The same in every version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// What to do about it.
    pub refusal: Refusal,
    /// Why, for the user; cut to [`MAX_TEXT_BYTES`].
    pub text: String,
}

impl Refused {
    pub(crate) fn write(&self, to: &mut Writer) {
        to.u8(match self.refusal {
            Refusal::Model => 1,
            Refusal::Busy => 2,
            Refusal::Protocol => 3,
        });
        to.cut_text(&self.text, MAX_TEXT_BYTES);
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let refusal = match from.u8("refusal")? {
            1 => Refusal::Model,
            2 => Refusal::Busy,
            3 => Refusal::Protocol,
            value => {
                return Err(FrameError::Value { field: "refusal", value: value.into(), allowed: "1 to 3" });
            }
        };
        Ok(Self { refusal, text: from.text("text", MAX_TEXT_BYTES, "0 to 1024 bytes")? })
    }
}

/// A ring for this stream; its memfd, sealed against shrinking and growing, travels beside. Replaces an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Length of the memfd; [`crate::ring::is_size`] holds.
    pub bytes: u64,
}

impl Ring {
    pub(crate) fn write(self, to: &mut Writer) -> Result<(), FrameError> {
        self.check()?;
        to.u64(self.bytes);
        Ok(())
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let ring = Self { bytes: from.u64("bytes")? };
        ring.check().map(|()| ring)
    }

    fn check(self) -> Result<(), FrameError> {
        let allowed = "a multiple of 4096 that holds words, head and at most 2^36 bytes of data";
        if crate::ring::is_size(self.bytes) {
            return Ok(());
        }
        Err(FrameError::Value { field: "bytes", value: self.bytes, allowed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_onnx_runtime() {
        let version = |major, minor, patch| Some(OrtVersion { major, minor, patch });
        assert_eq!(OrtVersion::parse("1.26.0"), version(1, 26, 0));
        assert_eq!(OrtVersion::parse("1.24"), version(1, 24, 0));
        assert_eq!(OrtVersion::parse("1.23.2-dfsg"), version(1, 23, 2));
        assert_eq!(OrtVersion::parse("1.27.0.dev3"), version(1, 27, 0));
        for text in ["", "1", "x.1.2", "1.x"] {
            assert_eq!(OrtVersion::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_weights_start_at_the_next_page() {
        let model = |proto_bytes| Model {
            hash: [0; 32],
            proto_bytes,
            weights_bytes: 10,
            inputs: Vec::new(),
            outputs: Vec::new(),
            label: String::new(),
        };
        assert_eq!((model(1).weights_offset(), model(4096).weights_offset()), (4096, 4096));
        assert_eq!(model(4097).file_bytes(), 8202);
        assert_eq!(model(u64::MAX).file_bytes(), u64::MAX);
    }
}
