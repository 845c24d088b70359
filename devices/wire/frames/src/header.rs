// SPDX-License-Identifier: MIT OR Apache-2.0
//! The header before every message, the same in every version.

use crate::FrameError;

/// First four bytes of a frame, as a little-endian number: `LtAn`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"LtAn");
/// Version of all messages. Raised with any change of a body; [`crate::Refused`] and the header never change.
pub const VERSION: u16 = 1;
/// Length of a header.
pub const HEADER_BYTES: usize = 16;
/// Longest frame: one fits the head area of a ring.
pub const MAX_FRAME_BYTES: usize = 256 << 10;
/// Longest body.
pub const MAX_BODY_BYTES: usize = MAX_FRAME_BYTES - HEADER_BYTES;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// What a message is.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($(#[$doc])* $name,)*
        }

        impl Kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its number on the wire.
            #[must_use]
            pub const fn number(self) -> u16 {
                match self {
                    $(Self::$name => $number,)*
                }
            }

            fn from_number(number: u16) -> Result<Self, FrameError> {
                match number {
                    $($number => Ok(Self::$name),)*
                    got => Err(FrameError::Kind { got }),
                }
            }
        }
    };
}

kinds! {
    /// [`crate::Hello`], to the host.
    Hello = 1,
    /// [`crate::HelloOk`], to the container.
    HelloOk = 2,
    /// [`crate::Model`], to the host.
    Model = 3,
    /// To the container: the host has the model's bytes. Empty.
    Have = 4,
    /// To the container: send the model's bytes. Empty.
    Want = 5,
    /// To the host: the model's bytes come with or after this frame. Empty.
    Sending = 6,
    /// [`crate::Loaded`], to the container.
    Loaded = 7,
    /// [`crate::Refused`], to the container.
    Refused = 8,
    /// [`crate::Ring`], to the host.
    Ring = 9,
    /// [`crate::Run`], to the host.
    Run = 10,
    /// [`crate::Answer`], to the container.
    Answer = 11,
    /// [`crate::Failed`], to the container.
    Failed = 12,
    /// [`crate::Grow`], to the container.
    Grow = 13,
    /// Either way, shared memory only: look at the ring, your word there said that you sleep. Empty.
    Bell = 14,
}

/// The header of a frame of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: Kind,
    /// Length of the body, at most [`MAX_BODY_BYTES`].
    pub body_bytes: u32,
}

impl Header {
    /// Its bytes: magic, version, kind, length of the body, four zeros.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let [m0, m1, m2, m3] = MAGIC.to_le_bytes();
        let [v0, v1] = VERSION.to_le_bytes();
        let [k0, k1] = self.kind.number().to_le_bytes();
        let [b0, b1, b2, b3] = self.body_bytes.to_le_bytes();
        [m0, m1, m2, m3, v0, v1, k0, k1, b0, b1, b2, b3, 0, 0, 0, 0]
    }

    /// Reads a header.
    ///
    /// # Errors
    /// When it is not ours, of another version, of an unknown kind, or announces a body over the cap. A
    /// [`Kind::Refused`] is read whatever its version is.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, v0, v1, k0, k1, b0, b1, b2, b3, rest @ ..] = *bytes;
        let magic = u32::from_le_bytes([m0, m1, m2, m3]);
        if magic != MAGIC {
            return Err(FrameError::Magic { got: magic });
        }
        let version = u16::from_le_bytes([v0, v1]);
        let number = u16::from_le_bytes([k0, k1]);
        if version != VERSION && number != Kind::Refused.number() {
            return Err(FrameError::Version { got: version });
        }
        let kind = Kind::from_number(number)?;
        let body_bytes = u32::from_le_bytes([b0, b1, b2, b3]);
        if usize::try_from(body_bytes).is_ok_and(|bytes| bytes <= MAX_BODY_BYTES) {
            let reserved = u32::from_le_bytes(rest);
            if reserved != 0 {
                return Err(FrameError::Value { field: "reserved", value: reserved.into(), allowed: "0" });
            }
            return Ok(Self { kind, body_bytes });
        }
        Err(FrameError::Body { kind, bytes: body_bytes.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(at: usize, to: u8) -> Result<Header, FrameError> {
        let mut bytes = Header { kind: Kind::Run, body_bytes: 7 }.encode();
        bytes[at] = to;
        Header::decode(&bytes)
    }

    #[test]
    fn every_kind_comes_back() {
        for kind in Kind::ALL {
            let header = Header { kind: *kind, body_bytes: 9 };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn each_field_is_checked() {
        assert!(matches!(changed(0, 0), Err(FrameError::Magic { .. })));
        assert_eq!(changed(4, 9), Err(FrameError::Version { got: 9 }));
        assert_eq!(changed(6, 99), Err(FrameError::Kind { got: 99 }));
        assert_eq!(changed(6, 0), Err(FrameError::Kind { got: 0 }));
        assert!(matches!(changed(11, 0xff), Err(FrameError::Body { kind: Kind::Run, .. })));
        assert!(matches!(changed(10, 0x04), Err(FrameError::Body { .. })));
        assert!(matches!(changed(15, 1), Err(FrameError::Value { field: "reserved", .. })));
    }

    #[test]
    fn a_refusal_is_read_in_any_version() {
        let mut bytes = Header { kind: Kind::Refused, body_bytes: 7 }.encode();
        bytes[4] = 77;
        assert_eq!(Header::decode(&bytes), Ok(Header { kind: Kind::Refused, body_bytes: 7 }));
    }
}
