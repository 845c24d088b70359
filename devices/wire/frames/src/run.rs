// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of a run: what goes in, what comes out, and what went wrong.

use alloc::string::String;
use alloc::vec::Vec;

use crate::read::Reader;
use crate::tensor::{read_tensors, total_bytes, write_tensors};
use crate::write::Writer;
use crate::{FrameError, MAX_TEXT_BYTES, Tensor, ring};

/// Most data of one run in one direction.
pub const MAX_RUN_BYTES: u64 = 1 << 35;

/// Run the stream's model. The data stand in the ring or follow in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Number of the run on this stream, for the answer.
    pub run: u32,
    /// Shared memory: where the first tensor starts in the ring's data area, a multiple of [`ring::ALIGNMENT`].
    /// Stream: 0.
    pub data_offset: u64,
    /// The inputs, in the order of the model's.
    pub inputs: Vec<Tensor>,
}

impl Run {
    /// Length of all inputs together.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        // Decoding and encoding refuse what is over the cap.
        total_bytes(&self.inputs).unwrap_or(u64::MAX)
    }

    pub(crate) fn write(&self, to: &mut Writer) -> Result<(), FrameError> {
        write_data(to, self.run, self.data_offset, &self.inputs)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        read_data(from).map(|(run, data_offset, inputs)| Self { run, data_offset, inputs })
    }
}

/// What came out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Number of the run.
    pub run: u32,
    /// As [`Run::data_offset`]; the host chooses it, and may write over the inputs.
    pub data_offset: u64,
    /// The outputs, in the order of the model's.
    pub outputs: Vec<Tensor>,
}

impl Answer {
    /// Length of all outputs together.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        total_bytes(&self.outputs).unwrap_or(u64::MAX)
    }

    pub(crate) fn write(&self, to: &mut Writer) -> Result<(), FrameError> {
        write_data(to, self.run, self.data_offset, &self.outputs)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        read_data(from).map(|(run, data_offset, outputs)| Self { run, data_offset, outputs })
    }
}

fn write_data(to: &mut Writer, run: u32, data_offset: u64, tensors: &[Tensor]) -> Result<(), FrameError> {
    check_offset(data_offset)?;
    to.u32(run);
    to.u64(data_offset);
    write_tensors(to, tensors)
}

fn read_data(from: &mut Reader<'_>) -> Result<(u32, u64, Vec<Tensor>), FrameError> {
    let run = from.u32("run")?;
    let data_offset = from.u64("data_offset")?;
    check_offset(data_offset)?;
    Ok((run, data_offset, read_tensors(from)?))
}

fn check_offset(data_offset: u64) -> Result<(), FrameError> {
    if data_offset.is_multiple_of(ring::ALIGNMENT) && data_offset <= ring::MAX_DATA_BYTES {
        return Ok(());
    }
    let allowed = "a multiple of 64 up to 2^36";
    Err(FrameError::Value { field: "data_offset", value: data_offset, allowed })
}

/// What a failure means for the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The model cannot run with these inputs: the engine said no. The stream stays.
    Run,
    /// The host cannot run this model any more: not to be asked again for it.
    Model,
    /// The host lost its engine in the middle: another stream may work at once.
    Again,
    /// The container broke the rules; the host closes the stream behind it.
    Protocol,
}

/// The run did not happen, or its answer is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// Number of the run.
    pub run: u32,
    /// What to do about it.
    pub failure: Failure,
    /// Why, for the user; cut to [`MAX_TEXT_BYTES`].
    pub text: String,
}

impl Failed {
    pub(crate) fn write(&self, to: &mut Writer) {
        to.u32(self.run);
        to.u8(match self.failure {
            Failure::Run => 1,
            Failure::Model => 2,
            Failure::Again => 3,
            Failure::Protocol => 4,
        });
        to.cut_text(&self.text, MAX_TEXT_BYTES);
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let run = from.u32("run")?;
        let failure = match from.u8("failure")? {
            1 => Failure::Run,
            2 => Failure::Model,
            3 => Failure::Again,
            4 => Failure::Protocol,
            value => {
                return Err(FrameError::Value { field: "failure", value: value.into(), allowed: "1 to 4" });
            }
        };
        Ok(Self { run, failure, text: from.text("text", MAX_TEXT_BYTES, "0 to 1024 bytes")? })
    }
}

/// The outputs wait in the host for a ring with at least this much data area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grow {
    /// Number of the run.
    pub run: u32,
    /// Data area that the outputs need, counted from its start.
    pub data_bytes: u64,
}

impl Grow {
    pub(crate) fn write(self, to: &mut Writer) -> Result<(), FrameError> {
        self.check()?;
        to.u32(self.run);
        to.u64(self.data_bytes);
        Ok(())
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let grow = Self { run: from.u32("run")?, data_bytes: from.u64("data_bytes")? };
        grow.check().map(|()| grow)
    }

    fn check(self) -> Result<(), FrameError> {
        if self.data_bytes <= ring::MAX_DATA_BYTES {
            return Ok(());
        }
        Err(FrameError::Value { field: "data_bytes", value: self.data_bytes, allowed: "0 to 2^36" })
    }
}
