// SPDX-License-Identifier: MIT OR Apache-2.0
//! The commands and how long their bodies may be.
//!
//! A length is checked before memory is taken for it. Bodies that hold a tensor's content have no cap here:
//! their content is read only once it is known to fit the tensor it is for.

use super::tensor::TENSOR_BYTES;
use super::version::Major;

/// Bytes before a body: the command and the body's length.
pub const FRAME_HEAD_BYTES: usize = 9;
/// Longest graph: room for a chain of 200 000 tensors.
pub const MAX_GRAPH_BYTES: u64 = 128 << 20;
/// Longest hello; today's is 24 bytes.
const MAX_HELLO_BYTES: u64 = 4096;
/// Longest request to join servers; it is skipped and answered with no.
const MAX_COMM_BYTES: u64 = 64 << 10;
const TENSOR: u64 = TENSOR_BYTES as u64;

/// What a client asks for; the number on the wire is the position here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the protocol's own")]
pub enum Command {
    AllocBuffer,
    GetAlignment,
    GetMaxSize,
    BufferGetBase,
    FreeBuffer,
    BufferClear,
    SetTensor,
    SetTensorHash,
    GetTensor,
    CopyTensor,
    GraphCompute,
    GetDeviceMemory,
    InitTensor,
    GetAllocSize,
    Hello,
    DeviceCount,
    GraphRecompute,
    MemsetTensor,
    SetTensor2d,
    GetTensor2d,
    CommInit,
    CommAllReduce,
    CommFree,
}

/// Why a frame is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// No command of this protocol.
    #[error("command {number} does not exist in protocol {major}")]
    UnknownCommand {
        /// Its number.
        number: u8,
        /// The protocol's major.
        major: u8,
    },
    /// The body's length is not one that the command has.
    #[error("body of {bytes} bytes where {expected} belongs")]
    BodyLength {
        /// The length it says.
        bytes: u64,
        /// What the command has.
        expected: BodySize,
    },
}

/// How long a command's body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodySize {
    /// Exactly so many bytes.
    Exactly(u64),
    /// Within these bounds.
    Between(u64, u64),
}

impl std::fmt::Display for BodySize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exactly(bytes) => write!(f, "{bytes}"),
            Self::Between(least, most) => write!(f, "{least} to {most}"),
        }
    }
}

impl BodySize {
    /// Gives the length back if it is allowed.
    ///
    /// # Errors
    /// When it is not.
    pub fn admit(self, bytes: u64) -> Result<u64, FrameError> {
        let fits = match self {
            Self::Exactly(exactly) => bytes == exactly,
            Self::Between(least, most) => (least..=most).contains(&bytes),
        };
        if fits { Ok(bytes) } else { Err(FrameError::BodyLength { bytes, expected: self }) }
    }
}

impl Command {
    const ALL: [Self; 23] = [
        Self::AllocBuffer,
        Self::GetAlignment,
        Self::GetMaxSize,
        Self::BufferGetBase,
        Self::FreeBuffer,
        Self::BufferClear,
        Self::SetTensor,
        Self::SetTensorHash,
        Self::GetTensor,
        Self::CopyTensor,
        Self::GraphCompute,
        Self::GetDeviceMemory,
        Self::InitTensor,
        Self::GetAllocSize,
        Self::Hello,
        Self::DeviceCount,
        Self::GraphRecompute,
        Self::MemsetTensor,
        Self::SetTensor2d,
        Self::GetTensor2d,
        Self::CommInit,
        Self::CommAllReduce,
        Self::CommFree,
    ];

    /// The command of a number. A client may use one that its major got in a minor release, so all up to the
    /// newest are known in every major but those that a later major brought.
    ///
    /// # Errors
    /// When the major has no such command.
    pub fn new(number: u8, major: Major) -> Result<Self, FrameError> {
        let unknown = FrameError::UnknownCommand { number, major: major.number() };
        let command = *Self::ALL.get(usize::from(number)).ok_or(unknown.clone())?;
        let since = match command {
            Self::DeviceCount | Self::GraphRecompute => 3,
            Self::MemsetTensor => 5,
            Self::SetTensor2d | Self::GetTensor2d | Self::CommInit | Self::CommAllReduce | Self::CommFree => {
                8
            }
            _ => Major::OLDEST,
        };
        if major.number() < since { Err(unknown) } else { Ok(command) }
    }

    /// Its number on the wire.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// How long its body is.
    #[must_use]
    pub fn body(self, major: Major) -> BodySize {
        let device = major.device_bytes() as u64;
        match self {
            Self::DeviceCount => BodySize::Exactly(0),
            Self::AllocBuffer => BodySize::Exactly(device + 8),
            Self::GetAlignment | Self::GetMaxSize | Self::GetDeviceMemory => BodySize::Exactly(device),
            Self::BufferGetBase | Self::FreeBuffer => BodySize::Exactly(8),
            Self::BufferClear => BodySize::Exactly(9),
            Self::SetTensor => BodySize::Between(TENSOR + 8 + major.keep_flag_bytes() as u64, u64::MAX >> 16),
            Self::SetTensor2d => BodySize::Between(TENSOR + 32, u64::MAX >> 16),
            Self::GetTensor2d => BodySize::Exactly(TENSOR + 32),
            Self::SetTensorHash | Self::GetTensor => BodySize::Exactly(TENSOR + 16),
            Self::CopyTensor => BodySize::Exactly(2 * TENSOR),
            Self::GraphCompute => BodySize::Between(device + 8, MAX_GRAPH_BYTES),
            Self::InitTensor => BodySize::Exactly(TENSOR),
            Self::GetAllocSize => BodySize::Between(device + TENSOR, device + 11 * TENSOR),
            Self::Hello => BodySize::Between(0, MAX_HELLO_BYTES),
            Self::GraphRecompute => BodySize::Exactly(if major.names_graphs() { 12 } else { 4 }),
            Self::MemsetTensor => BodySize::Exactly(TENSOR + 17),
            Self::CommInit | Self::CommAllReduce | Self::CommFree => BodySize::Between(0, MAX_COMM_BYTES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_protocols() {
        let newest = Major::new(8).unwrap();
        for (number, command) in Command::ALL.iter().enumerate() {
            assert_eq!(usize::from(command.number()), number);
            assert_eq!(Command::new(command.number(), newest).unwrap(), *command);
        }
        assert_eq!(Command::Hello.number(), 14);
        assert!(Command::new(23, newest).is_err());
        assert!(Command::new(Command::CommInit.number(), Major::new(7).unwrap()).is_err());
        assert!(Command::new(Command::GraphRecompute.number(), Major::new(2).unwrap()).is_err());
    }

    #[test]
    fn an_absurd_length_is_refused() {
        for major in Major::OLDEST..=Major::NEWEST {
            let major = Major::new(major).unwrap();
            for command in Command::ALL {
                assert!(command.body(major).admit(1 << 63).is_err(), "{command:?}");
            }
        }
        assert!(Command::FreeBuffer.body(Major::new(8).unwrap()).admit(8).is_ok());
        assert!(Command::FreeBuffer.body(Major::new(8).unwrap()).admit(9).is_err());
    }
}
