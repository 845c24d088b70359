// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why bytes are no message, or a message cannot become bytes. By hand: this crate has no standard library.

use core::fmt;

use crate::{Kind, MAX_BODY_BYTES, VERSION};

/// Names the field and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameError {
    /// The first four bytes are not ours.
    Magic {
        /// What they are.
        got: u32,
    },
    /// The peer speaks another version.
    Version {
        /// Its version.
        got: u16,
    },
    /// A kind of message that this version does not know.
    Kind {
        /// Its number.
        got: u16,
    },
    /// A body over the cap.
    Body {
        /// Of this kind.
        kind: Kind,
        /// This long.
        bytes: u64,
    },
    /// The body ends within a field.
    Short {
        /// The field.
        field: &'static str,
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The body goes on after its last field.
    Trailing {
        /// Of this kind.
        kind: Kind,
        /// By so many bytes.
        bytes: u64,
    },
    /// A value that its field cannot have.
    Value {
        /// The field.
        field: &'static str,
        /// The value.
        value: u64,
        /// What it may be.
        allowed: &'static str,
    },
    /// A text that is no UTF-8, or has a zero byte in it.
    Text {
        /// The field.
        field: &'static str,
    },
    /// Sizes that together go over a cap or overflow.
    Size {
        /// The field.
        field: &'static str,
        /// Its cap in bytes.
        cap_bytes: u64,
    },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic { got } => write!(f, "no frame of lighter's: it starts with {got:#010x}"),
            Self::Version { got } => write!(f, "version {got} of the frames, this side speaks {VERSION}"),
            Self::Kind { got } => write!(f, "unknown kind of message {got}"),
            Self::Body { kind, bytes } => {
                write!(f, "{kind:?} of {bytes} bytes is over the limit of {MAX_BODY_BYTES}")
            }
            Self::Short { field, needed, left } => {
                write!(f, "{field} needs {needed} bytes, the message has {left} left")
            }
            Self::Trailing { kind, bytes } => write!(f, "{kind:?} has {bytes} bytes after its end"),
            Self::Value { field, value, allowed } => write!(f, "{field} is {value}, allowed is {allowed}"),
            Self::Text { field } => write!(f, "{field} is no text: not UTF-8, or a zero byte in it"),
            Self::Size { field, cap_bytes } => {
                write!(f, "{field} is over the limit of {cap_bytes} bytes or overflows")
            }
        }
    }
}

impl core::error::Error for FrameError {}
