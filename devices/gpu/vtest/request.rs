// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests of the vtest protocol, as Mesa's Venus driver sends them: words of the socket in, strict types out. Pure.
//!
//! ```text
//! request = length, command, payload       little-endian words; the length is that of the payload, in words
//!                                          (in bytes for the one command of which the payload is text)
//! ```
//! A request that Mesa never sends is refused, whatever a vtest server for OpenGL would make of it.

use std::fmt;

/// Bytes before a payload.
pub const HEADER_BYTES: usize = 8;
/// Rings of a context, and with that the largest number of timelines.
pub const MAX_RINGS: u32 = 64;
/// Bytes of the longest name of a program that is kept.
pub const MAX_NAME_BYTES: usize = 255;

/// Words that say where a batch's commands and points are.
const BATCH_WORDS: usize = 8;
/// Words of a point: a timeline and a value.
const POINT_WORDS: usize = 3;
/// A batch with this flag signals its points when its ring has come so far; others do so at once.
const BATCH_ON_RING: u32 = 1;
/// A wait with this flag ends with the first of its points.
const WAIT_ANY: u32 = 1;

/// Commands by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Command {
    /// The resource is of no use any more.
    ResourceUnref = 3,
    /// Whether a resource is in use; Venus sends it only behind a ping.
    ResourceBusyWait = 7,
    /// The client's name.
    CreateRenderer = 8,
    /// Whether the server answers pings.
    Ping = 10,
    /// The newest version that the client speaks.
    ProtocolVersion = 11,
    /// One of the server's numbers.
    GetParam = 15,
    /// What the renderer can do.
    GetCapset = 16,
    /// Begins a context.
    ContextInit = 17,
    /// Memory to map.
    CreateBlob = 18,
    /// A timeline.
    SyncCreate = 19,
    /// It is of no use any more.
    SyncUnref = 20,
    /// Its value.
    SyncRead = 21,
    /// Moves it.
    SyncWrite = 22,
    /// A descriptor that becomes readable at points of timelines.
    SyncWait = 23,
    /// Commands for the renderer.
    Submit = 24,
}

impl Command {
    const ALL: [Self; 15] = [
        Self::ResourceUnref,
        Self::ResourceBusyWait,
        Self::CreateRenderer,
        Self::Ping,
        Self::ProtocolVersion,
        Self::GetParam,
        Self::GetCapset,
        Self::ContextInit,
        Self::CreateBlob,
        Self::SyncCreate,
        Self::SyncUnref,
        Self::SyncRead,
        Self::SyncWrite,
        Self::SyncWait,
        Self::Submit,
    ];

    /// Whether the client waits for an answer.
    #[must_use]
    pub fn is_answered(self) -> bool {
        !matches!(
            self,
            Self::ResourceUnref
                | Self::CreateRenderer
                | Self::ContextInit
                | Self::SyncUnref
                | Self::SyncWrite
                | Self::Submit
        )
    }

    /// Words of its payload, where they are always the same.
    fn payload_words(self) -> Option<usize> {
        match self {
            Self::Ping => Some(0),
            Self::ResourceUnref
            | Self::ProtocolVersion
            | Self::GetParam
            | Self::ContextInit
            | Self::SyncUnref
            | Self::SyncRead => Some(1),
            Self::ResourceBusyWait | Self::GetCapset | Self::SyncCreate => Some(2),
            Self::SyncWrite => Some(3),
            Self::CreateBlob => Some(6),
            Self::CreateRenderer | Self::SyncWait | Self::Submit => None,
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} ({})", *self as u32)
    }
}

/// Why a request is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The command is not one of Venus's.
    #[error("command {number} is none that Mesa's Venus driver sends")]
    Unknown {
        /// Its number.
        number: u32,
    },
    /// More than is taken in at once.
    #[error("{command} has {bytes} bytes, more than {limit_bytes}")]
    TooLong {
        /// The command.
        command: Command,
        /// Bytes of its payload.
        bytes: u64,
        /// Most that are taken.
        limit_bytes: u64,
    },
    /// The payload has not the command's length.
    #[error("{command} has {words} words, which does not fit what it says")]
    Length {
        /// The command.
        command: Command,
        /// Words of its payload.
        words: usize,
    },
    /// A batch lies outside of its request.
    #[error("batch {batch} of a submission lies outside of it")]
    Batch {
        /// Its index.
        batch: u32,
    },
    /// Batches share words, so that a short submission would be a long one.
    #[error("the batches of a submission have more words between them than it has")]
    Shared,
    /// A batch names a ring that no context has.
    #[error("batch {batch} of a submission is for ring {ring}; a context has {MAX_RINGS}")]
    Ring {
        /// Its index.
        batch: u32,
        /// The ring.
        ring: u32,
    },
}

/// The first words of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What is asked.
    pub command: Command,
    /// Bytes that follow.
    pub payload_bytes: usize,
}

impl Header {
    /// Reads it; `limit_bytes` is the longest payload.
    ///
    /// # Errors
    /// For an unknown command, and for one that is longer than it can be.
    pub fn parse(bytes: [u8; HEADER_BYTES], limit_bytes: u64) -> Result<Self, RequestError> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let (length, number) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let known = Command::ALL.into_iter().find(|command| *command as u32 == number);
        let command = known.ok_or(RequestError::Unknown { number })?;
        let bytes = u64::from(length) * if command == Command::CreateRenderer { 1 } else { 4 };
        let too_long = RequestError::TooLong { command, bytes, limit_bytes };
        let payload_bytes = usize::try_from(bytes).ok().filter(|_| bytes <= limit_bytes).ok_or(too_long)?;
        if command.payload_words().is_some_and(|words| payload_bytes != words * 4) {
            return Err(RequestError::Length { command, words: payload_bytes / 4 });
        }
        Ok(Self { command, payload_bytes })
    }
}

/// A point on a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// The timeline.
    pub sync: u32,
    /// Where on it.
    pub value: u64,
}

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The client's name, as far as it is text.
    CreateRenderer(String),
    /// A ping.
    Ping,
    /// Whether a resource is in use.
    ResourceBusyWait,
    /// The newest version that the client speaks.
    ProtocolVersion(u32),
    /// Which of the server's numbers.
    GetParam(u32),
    /// What the renderer can do.
    GetCapset {
        /// Which set.
        id: u32,
        /// Its version.
        version: u32,
    },
    /// Begins a context for a set.
    ContextInit {
        /// Which set.
        capset: u32,
    },
    /// Memory to map.
    CreateBlob(BlobRequest),
    /// The resource is of no use any more.
    ResourceUnref(u32),
    /// A timeline that begins there.
    SyncCreate(u64),
    /// It is of no use any more.
    SyncUnref(u32),
    /// Its value.
    SyncRead(u32),
    /// Moves it.
    SyncWrite(Point),
    /// A descriptor that becomes readable at these points.
    SyncWait {
        /// At the first of them rather than at all.
        any: bool,
        /// The points.
        points: Vec<Point>,
    },
    /// Commands for the renderer.
    Submit(Vec<Batch<'a>>),
}

/// Memory that a client wants to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobRequest {
    /// Where it lies, in virtio-gpu's numbers.
    pub memory: u32,
    /// What is done with it, in virtio-gpu's numbers.
    pub flags: u32,
    /// Its size.
    pub size_bytes: u64,
    /// Which memory of the renderer; 0 for new shared memory.
    pub blob: u64,
}

/// Part of a submission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch<'a> {
    /// Commands for the renderer; may be none.
    pub commands: &'a [u32],
    /// Points that are reached with it.
    pub points: Vec<Point>,
    /// The ring that it belongs to; `None` where its points are reached at once.
    pub ring: Option<u32>,
}

impl<'a> Request<'a> {
    /// Reads the payload of a text request.
    #[must_use]
    pub fn name(payload: &[u8]) -> Self {
        let text = payload.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = String::from_utf8_lossy(text.get(..MAX_NAME_BYTES).unwrap_or(text));
        // It is shown to people.
        Self::CreateRenderer(text.chars().filter(|c| !c.is_control()).collect())
    }

    /// Reads the payload of any other request.
    ///
    /// # Errors
    /// When it is not what the command says.
    pub fn parse(command: Command, words: &'a [u32]) -> Result<Self, RequestError> {
        let length = || RequestError::Length { command, words: words.len() };
        if command.payload_words().is_some_and(|wanted| wanted != words.len()) {
            return Err(length());
        }
        let parsed = match (command, words) {
            (Command::Ping, []) => Self::Ping,
            (Command::ResourceBusyWait, _) => Self::ResourceBusyWait,
            (Command::ProtocolVersion, [version]) => Self::ProtocolVersion(*version),
            (Command::GetParam, [param]) => Self::GetParam(*param),
            (Command::GetCapset, [id, version]) => Self::GetCapset { id: *id, version: *version },
            (Command::ContextInit, [capset]) => Self::ContextInit { capset: *capset },
            (Command::CreateBlob, [memory, flags, size_low, size_high, blob_low, blob_high]) => {
                Self::CreateBlob(BlobRequest {
                    memory: *memory,
                    flags: *flags,
                    size_bytes: wide(*size_low, *size_high),
                    blob: wide(*blob_low, *blob_high),
                })
            }
            (Command::ResourceUnref, [resource]) => Self::ResourceUnref(*resource),
            (Command::SyncCreate, [low, high]) => Self::SyncCreate(wide(*low, *high)),
            (Command::SyncUnref, [sync]) => Self::SyncUnref(*sync),
            (Command::SyncRead, [sync]) => Self::SyncRead(*sync),
            (Command::SyncWrite, [sync, low, high]) => {
                Self::SyncWrite(Point { sync: *sync, value: wide(*low, *high) })
            }
            (Command::SyncWait, [flags, _timeout_ms, points @ ..]) => Self::SyncWait {
                any: flags & WAIT_ANY != 0,
                points: self::points(points).ok_or_else(length)?,
            },
            (Command::Submit, [count, ..]) => Self::Submit(batches(*count, words)?),
            _ => return Err(length()),
        };
        Ok(parsed)
    }
}

fn wide(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Points, when the words are nothing but whole ones.
fn points(words: &[u32]) -> Option<Vec<Point>> {
    let (points, rest) = words.as_chunks::<POINT_WORDS>();
    rest.is_empty().then(|| {
        points.iter().map(|[sync, low, high]| Point { sync: *sync, value: wide(*low, *high) }).collect()
    })
}

/// The batches of a submission. Their places are counted in words from the beginning of the payload.
fn batches(count: u32, words: &[u32]) -> Result<Vec<Batch<'_>>, RequestError> {
    let descriptions = words.get(1..).unwrap_or_default().chunks_exact(BATCH_WORDS);
    if u64::from(count) > descriptions.len() as u64 {
        return Err(RequestError::Batch { batch: u32::try_from(descriptions.len()).unwrap_or(u32::MAX) });
    }
    let mut parsed = Vec::with_capacity(usize::try_from(count).unwrap_or_default());
    let mut left = words.len();
    for (batch, description) in (0..count).zip(descriptions) {
        let [flags, commands_at, commands_length, points_at, points_count, ring, _in_syncobjs, _out_syncobjs] =
            description
        else {
            return Err(RequestError::Batch { batch });
        };
        // An empty part may be said to lie anywhere.
        let part = |at: u32, count: u32, each: usize| -> Option<&[u32]> {
            let (at, count) = (usize::try_from(at).ok()?, usize::try_from(count).ok()?);
            if count == 0 {
                return Some(&[]);
            }
            words.get(at..at.checked_add(count.checked_mul(each)?)?)
        };
        let outside = || RequestError::Batch { batch };
        if *ring >= MAX_RINGS {
            return Err(RequestError::Ring { batch, ring: *ring });
        }
        let commands = part(*commands_at, *commands_length, 1).ok_or_else(outside)?;
        let points = part(*points_at, *points_count, POINT_WORDS).ok_or_else(outside)?;
        left = left.checked_sub(commands.len() + points.len()).ok_or(RequestError::Shared)?;
        parsed.push(Batch {
            commands,
            points: self::points(points).ok_or_else(outside)?,
            ring: (flags & BATCH_ON_RING != 0).then_some(*ring),
        });
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT_BYTES: u64 = 1 << 20;

    fn header(length: u32, command: u32) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..].copy_from_slice(&command.to_le_bytes());
        bytes
    }

    #[test]
    fn a_header_says_how_much_follows_in_words_and_in_bytes_for_the_name() {
        let parsed = Header::parse(header(6, 18), LIMIT_BYTES).unwrap();
        assert_eq!(parsed, Header { command: Command::CreateBlob, payload_bytes: 24 });
        let parsed = Header::parse(header(6, 8), LIMIT_BYTES).unwrap();
        assert_eq!(parsed, Header { command: Command::CreateRenderer, payload_bytes: 6 });
    }

    #[test]
    fn headers_of_other_protocols_and_of_wrong_lengths_are_refused() {
        for number in [0, 1, 2, 4, 5, 6, 9, 12, 13, 14, 25, u32::MAX] {
            let error = Header::parse(header(1, number), LIMIT_BYTES).unwrap_err();
            assert_eq!(error, RequestError::Unknown { number });
        }
        for (length, command) in [(1, 10), (0, 11), (5, 18), (7, 18), (2, 21)] {
            let error = Header::parse(header(length, command), LIMIT_BYTES).unwrap_err();
            assert!(matches!(error, RequestError::Length { .. }), "{error}");
        }
        for (length, command) in [(u32::MAX, 24), (1 << 18 | 1, 24), (u32::MAX, 8)] {
            let error = Header::parse(header(length, command), LIMIT_BYTES).unwrap_err();
            assert!(matches!(error, RequestError::TooLong { .. }), "{error}");
        }
    }

    #[test]
    fn every_request_of_the_driver_is_read() {
        let parse = |command, words: &'static [u32]| Request::parse(command, words).unwrap();
        assert_eq!(parse(Command::Ping, &[]), Request::Ping);
        assert_eq!(parse(Command::ProtocolVersion, &[4]), Request::ProtocolVersion(4));
        assert_eq!(parse(Command::GetCapset, &[4, 0]), Request::GetCapset { id: 4, version: 0 });
        let blob = BlobRequest { memory: 2, flags: 1, size_bytes: 1 << 32 | 4096, blob: 7 };
        assert_eq!(parse(Command::CreateBlob, &[2, 1, 4096, 1, 7, 0]), Request::CreateBlob(blob));
        assert_eq!(
            parse(Command::SyncWrite, &[3, 5, 1]),
            Request::SyncWrite(Point { sync: 3, value: 1 << 32 | 5 })
        );
        let points = vec![Point { sync: 1, value: 2 }, Point { sync: 3, value: 4 }];
        let wait = Request::SyncWait { any: true, points: points.clone() };
        assert_eq!(parse(Command::SyncWait, &[1, u32::MAX, 1, 2, 0, 3, 4, 0]), wait);
        // One batch: flags, commands at 9 (2 words), points at 11 (2 points), ring 5.
        let words: &[u32] = &[1, 1, 9, 2, 11, 2, 5, 0, 0, 70, 71, 1, 2, 0, 3, 4, 0];
        let batch = Batch { commands: &[70, 71], points, ring: Some(5) };
        assert_eq!(parse(Command::Submit, words), Request::Submit(vec![batch]));
        assert_eq!(Request::name(b"vulkaninfo\x1b\0rest"), Request::CreateRenderer("vulkaninfo".to_owned()));
    }

    #[test]
    fn batches_outside_of_their_submission_are_refused() {
        for (what, words) in [
            ("commands behind the end", [1, 0, 9, 1, 0, 0, 0, 0, 0].as_slice()),
            ("commands that wrap around", &[1, 0, u32::MAX, 2, 0, 0, 0, 0, 0]),
            ("points behind the end", &[1, 0, 0, 0, 9, 1, 0, 0, 0]),
            ("points that wrap around", &[1, 0, 0, 0, 0, 0x5555_5556, 0, 0, 0]),
            ("more batches than there are", &[2, 0, 0, 0, 0, 0, 0, 0, 0]),
            ("batches without words", &[u32::MAX]),
        ] {
            let error = Request::parse(Command::Submit, words).unwrap_err();
            assert!(matches!(error, RequestError::Batch { .. }), "{what}: {error}");
        }
        let twice = [2, 0, 0, 17, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0, 0];
        assert_eq!(Request::parse(Command::Submit, &twice).unwrap_err(), RequestError::Shared);
        let error = Request::parse(Command::Submit, &[1, 1, 0, 0, 0, 0, 64, 0, 0]).unwrap_err();
        assert_eq!(error, RequestError::Ring { batch: 0, ring: 64 });
        let error = Request::parse(Command::SyncWait, &[0, 0, 1, 2]).unwrap_err();
        assert!(matches!(error, RequestError::Length { .. }), "{error}");
    }

    proptest! {
        #[test]
        fn no_words_make_it_panic_and_no_batch_has_more_than_came(
            which in 0usize..15,
            words in proptest::collection::vec(prop_oneof![0u32..40, any::<u32>()], 0..40),
        ) {
            if let Ok(Request::Submit(batches)) = Request::parse(Command::ALL[which], &words) {
                let sum: usize = batches.iter().map(|one| one.commands.len() + one.points.len() * POINT_WORDS).sum();
                prop_assert!(sum <= words.len());
                for batch in batches {
                    prop_assert!(batch.ring.is_none_or(|ring| ring < MAX_RINGS));
                }
            }
        }
    }
}
