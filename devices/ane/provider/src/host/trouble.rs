// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can go wrong between this library and the host, and what it means for the next attempt.

use alloc::string::String;
use core::fmt;

use lighter_frames::{Failed, Failure, FrameError, Kind, Refusal, Refused};

use super::Placing;
use crate::ort::Status;
use crate::sys::Errno;

/// Something went wrong.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The stream or the memory failed.
    Kernel(Errno),
    /// The host said something that this library does not understand.
    Frame(FrameError),
    /// The host said something else than what was to come.
    Unexpected(Kind),
    /// An answer that fits neither the run nor the model.
    Answer(&'static str),
    /// The host refused.
    Refused(Refused),
    /// The host could not run.
    Failed(Failed),
    /// The container's own runtime failed.
    Ort(Status),
}

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Another connection.
    Retry,
    /// This run in the container; the connection is good.
    RunHere,
    /// This model in the container, for good.
    StayHere,
    /// Nothing: the program gets the error.
    GiveUp,
}

impl Trouble {
    pub(crate) const fn remedy(&self) -> Remedy {
        match self {
            Self::Kernel(_) => Remedy::Retry,
            Self::Refused(Refused { refusal, .. }) => match refusal {
                Refusal::Model | Refusal::Protocol => Remedy::StayHere,
                Refusal::Busy => Remedy::Retry,
            },
            Self::Failed(Failed { failure, .. }) => match failure {
                Failure::Run => Remedy::RunHere,
                Failure::Model | Failure::Protocol => Remedy::StayHere,
                Failure::Again => Remedy::Retry,
            },
            // Another time would bring the same.
            Self::Frame(_) | Self::Unexpected(_) | Self::Answer(_) => Remedy::StayHere,
            Self::Ort(_) => Remedy::GiveUp,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |f: &mut fmt::Formatter<'_>, text: &String| match text.as_str() {
            "" => f.write_str("the host does not say why"),
            text => f.write_str(text),
        };
        match self {
            Self::Kernel(errno) => errno.fmt(f),
            Self::Frame(FrameError::Version { got }) => {
                write!(
                    f,
                    "the host speaks version {got} of the frames, this library {}",
                    lighter_frames::VERSION
                )
            }
            Self::Frame(error) => error.fmt(f),
            Self::Unexpected(kind) => write!(f, "the host said {kind:?} out of turn"),
            Self::Answer(what) => write!(f, "the host's answer does not fit: {what}"),
            Self::Refused(refused) => text(f, &refused.text),
            Self::Failed(failed) => text(f, &failed.text),
            Self::Ort(status) => f.write_str(&status.message()),
        }
    }
}

impl From<Errno> for Trouble {
    fn from(errno: Errno) -> Self {
        Self::Kernel(errno)
    }
}

impl From<FrameError> for Trouble {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl From<Placing> for Trouble {
    fn from(placing: Placing) -> Self {
        match placing {
            Placing::Unexpected => Self::Answer("an output that the model does not have"),
            Placing::Ort(status) => Self::Ort(status),
        }
    }
}
