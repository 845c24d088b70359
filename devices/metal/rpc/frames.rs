// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bodies of the commands other than graphs.
//!
//! A body arrives here with a length that [`Command::body`] has admitted; a shorter one gives `None` all the
//! same.

use super::command::Command;
use super::graph::GraphFrame;
use super::tensor::{MAX_SOURCES, WireTensor};
use super::version::Major;

/// Bytes of the transport's abilities in a hello and its answer.
const ABILITY_BYTES: usize = 24;

fn take<const N: usize>(body: &[u8]) -> Option<([u8; N], &[u8])> {
    body.split_first_chunk().map(|(head, rest)| (*head, rest))
}

fn u64_of(body: &[u8]) -> Option<(u64, &[u8])> {
    take(body).map(|(word, rest)| (u64::from_le_bytes(word), rest))
}

fn device_and_rest(body: &[u8], major: Major) -> Option<(u32, &[u8])> {
    if major.device_bytes() == 0 {
        return Some((0, body));
    }
    take(body).map(|(word, rest)| (u32::from_le_bytes(word), rest))
}

/// The answer to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloAnswer {
    bytes: [u8; 4 + ABILITY_BYTES],
    used: usize,
}

impl HelloAnswer {
    /// Says `MAJOR.0.0` and no ability, so that the transport stays as it is.
    #[must_use]
    pub fn new(major: Major) -> Self {
        let mut bytes = [0; 4 + ABILITY_BYTES];
        if let Some(first) = bytes.first_mut() {
            *first = major.number();
        }
        Self { bytes, used: if major.hello_has_abilities() { 4 + ABILITY_BYTES } else { 3 } }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.used).unwrap_or_default()
    }
}

/// The device of a request that says nothing else.
#[must_use]
pub fn device_of(body: &[u8], major: Major) -> Option<u32> {
    device_and_rest(body, major).map(|(device, _)| device)
}

/// Device and bytes of a buffer to allocate.
#[must_use]
pub fn alloc_buffer(body: &[u8], major: Major) -> Option<(u32, u64)> {
    let (device, rest) = device_and_rest(body, major)?;
    Some((device, u64_of(rest)?.0))
}

/// The buffer's handle of a request that says nothing else.
#[must_use]
pub fn handle_of(body: &[u8]) -> Option<u64> {
    u64_of(body).map(|(handle, _)| handle)
}

/// Handle and value of a buffer to fill.
#[must_use]
pub fn clear_buffer(body: &[u8]) -> Option<(u64, u8)> {
    let (handle, rest) = u64_of(body)?;
    Some((handle, *rest.first()?))
}

/// Device and name of a graph to compute again.
#[must_use]
pub fn recompute(body: &[u8], major: Major) -> Option<(u32, u64)> {
    let (device, rest) = device_and_rest(body, major)?;
    let uid = if major.names_graphs() { u64_of(rest)?.0 } else { 0 };
    Some((device, uid))
}

/// What precedes the bytes of an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteRegion {
    /// The tensor.
    pub tensor: WireTensor,
    /// Where in it the bytes go.
    pub offset: u64,
    /// What the client says about whether they are worth keeping; older majors do not say.
    pub keep: Option<bool>,
}

impl WriteRegion {
    /// Bytes of this head.
    #[must_use]
    pub fn head_bytes(major: Major) -> usize {
        super::tensor::TENSOR_BYTES + major.keep_flag_bytes() + 8
    }

    /// Reads the head.
    #[must_use]
    pub fn parse(head: &[u8], major: Major) -> Option<Self> {
        let (tensor, rest) = WireTensor::split(head)?;
        let (keep, rest) = if major.keep_flag_bytes() > 0 {
            let ([flag], rest) = take(rest)?;
            (Some(flag != 0), rest)
        } else {
            (None, rest)
        };
        Some(Self { tensor, offset: u64_of(rest)?.0, keep })
    }
}

/// A region to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRegion {
    /// The tensor.
    pub tensor: WireTensor,
    /// Where in it the region begins.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl ReadRegion {
    /// Reads the body.
    #[must_use]
    pub fn parse(body: &[u8]) -> Option<Self> {
        let (tensor, rest) = WireTensor::split(body)?;
        let (offset, rest) = u64_of(rest)?;
        Some(Self { tensor, offset, bytes: u64_of(rest)?.0 })
    }
}

/// A question whether content with this hash is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash {
    /// The tensor.
    pub tensor: WireTensor,
    /// Where in it the content would go.
    pub offset: u64,
    /// FNV-1a-64 of the content.
    pub fnv: u64,
}

impl Hash {
    /// Reads the body.
    #[must_use]
    pub fn parse(body: &[u8]) -> Option<Self> {
        let ReadRegion { tensor, offset, bytes } = ReadRegion::parse(body)?;
        Some(Self { tensor, offset, fnv: bytes })
    }
}

/// A region to fill with one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memset {
    /// The region.
    pub region: ReadRegion,
    /// The value.
    pub value: u8,
}

impl Memset {
    /// Reads the body.
    #[must_use]
    pub fn parse(body: &[u8]) -> Option<Self> {
        let (value, front) = body.split_last()?;
        Some(Self { region: ReadRegion::parse(front)?, value: *value })
    }
}

/// A tensor to copy onto another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPair {
    /// From.
    pub from: WireTensor,
    /// To.
    pub to: WireTensor,
}

impl CopyPair {
    /// Reads the body.
    #[must_use]
    pub fn parse(body: &[u8]) -> Option<Self> {
        let (from, rest) = WireTensor::split(body)?;
        Some(Self { from, to: WireTensor::split(rest)?.0 })
    }
}

/// Equal rows at equal distances: the front of a strided upload, or all of a strided read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Where in the tensor the first row begins.
    pub offset: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// How many rows.
    pub rows: u64,
    /// Distance of rows in the tensor.
    pub stride: u64,
}

impl Rows {
    fn parse(body: &[u8]) -> Option<Self> {
        let (offset, rest) = u64_of(body)?;
        let (row_bytes, rest) = u64_of(rest)?;
        let (rows, rest) = u64_of(rest)?;
        Some(Self { offset, row_bytes, rows, stride: u64_of(rest)?.0 })
    }

    /// Bytes of all rows together.
    #[must_use]
    pub fn total_bytes(&self) -> Option<u64> {
        self.row_bytes.checked_mul(self.rows)
    }

    /// The end of the last row in the tensor.
    #[must_use]
    pub fn end(&self) -> Option<u64> {
        let last = self.rows.checked_sub(1)?.checked_mul(self.stride)?;
        self.offset.checked_add(last)?.checked_add(self.row_bytes)
    }
}

/// The head of a strided upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteRows {
    /// The tensor.
    pub tensor: WireTensor,
    /// Its rows.
    pub rows: Rows,
}

/// A strided read.
pub type ReadRows = WriteRows;

impl WriteRows {
    /// Bytes of this head.
    pub const HEAD_BYTES: usize = super::tensor::TENSOR_BYTES + 32;

    /// Reads the head.
    #[must_use]
    pub fn parse(head: &[u8]) -> Option<Self> {
        let (tensor, rest) = WireTensor::split(head)?;
        Some(Self { tensor, rows: Rows::parse(rest)? })
    }
}

/// A question how many bytes a tensor takes on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocSize {
    /// Device.
    pub device: u32,
    /// The tensor.
    pub tensor: WireTensor,
    /// Its operation's inputs, by place; clients before 3.6 send none.
    pub sources: [Option<WireTensor>; MAX_SOURCES],
}

impl AllocSize {
    /// Reads the body.
    #[must_use]
    pub fn parse(body: &[u8], major: Major) -> Option<Self> {
        let (device, rest) = device_and_rest(body, major)?;
        let (tensor, mut rest) = WireTensor::split(rest)?;
        let mut sources = [None; MAX_SOURCES];
        for source in &mut sources {
            let Some((record, behind)) = WireTensor::split(rest) else { break };
            *source = Some(record).filter(|record| record.id != 0);
            rest = behind;
        }
        rest.is_empty().then_some(Self { device, tensor, sources })
    }
}

/// Reads a body whatever it is, and says whether it is one; for the fuzzer.
pub(super) fn parse_any(command: Command, major: Major, body: &[u8]) -> bool {
    match command {
        Command::AllocBuffer => alloc_buffer(body, major).is_some(),
        Command::GetAlignment | Command::GetMaxSize | Command::GetDeviceMemory => {
            device_of(body, major).is_some()
        }
        Command::BufferGetBase | Command::FreeBuffer => handle_of(body).is_some(),
        Command::BufferClear => clear_buffer(body).is_some(),
        Command::SetTensor => WriteRegion::parse(body, major).is_some(),
        Command::SetTensorHash => Hash::parse(body).is_some(),
        Command::GetTensor => ReadRegion::parse(body).is_some(),
        Command::CopyTensor => CopyPair::parse(body).is_some(),
        Command::GraphCompute => GraphFrame::parse(body, major).is_ok_and(|frame| {
            frame.nodes().count() + frame.tensors().map(|t| t.name_text().len()).sum::<usize>() > 0
        }),
        Command::InitTensor => WireTensor::split(body).is_some(),
        Command::GetAllocSize => AllocSize::parse(body, major).is_some(),
        Command::GraphRecompute => recompute(body, major).is_some(),
        Command::MemsetTensor => Memset::parse(body).is_some(),
        Command::SetTensor2d | Command::GetTensor2d => WriteRows::parse(body)
            .is_some_and(|head| head.rows.total_bytes().is_some() && head.rows.end().is_some()),
        Command::Hello
        | Command::DeviceCount
        | Command::CommInit
        | Command::CommAllReduce
        | Command::CommFree => true,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metal::rpc::{TENSOR_BYTES, fuzz_entry};

    #[test]
    fn a_hello_is_answered_in_its_majors_form() {
        assert_eq!(HelloAnswer::new(Major::new(3).unwrap()).bytes(), [3, 0, 0]);
        let answer = HelloAnswer::new(Major::new(8).unwrap());
        assert_eq!((answer.bytes().len(), answer.bytes()[0]), (28, 8));
    }

    #[test]
    fn heads_of_uploads_differ_by_major() {
        for (major, flag) in [(6, None), (7, Some(true))] {
            let major = Major::new(major).unwrap();
            let mut head = vec![0; TENSOR_BYTES];
            head.extend(flag.map(u8::from));
            head.extend(9_u64.to_le_bytes());
            assert_eq!(head.len(), WriteRegion::head_bytes(major));
            let parsed = WriteRegion::parse(&head, major).unwrap();
            assert_eq!((parsed.offset, parsed.keep), (9, flag));
        }
    }

    #[test]
    fn alloc_size_takes_both_forms() {
        let major = Major::new(3).unwrap();
        let mut short = vec![0; 4];
        short.extend(vec![1; TENSOR_BYTES]);
        assert!(AllocSize::parse(&short, major).unwrap().sources.iter().all(Option::is_none));
        let mut long = short.clone();
        long.extend(vec![1; TENSOR_BYTES]);
        long.extend(vec![0; 9 * TENSOR_BYTES]);
        let parsed = AllocSize::parse(&long, major).unwrap();
        assert_eq!(parsed.sources.iter().flatten().count(), 1);
        assert!(AllocSize::parse(&long[..long.len() - 1], major).is_none());
    }

    #[test]
    fn rows_are_measured_without_overflow() {
        let rows = Rows { offset: 8, row_bytes: 4, rows: 3, stride: 16 };
        assert_eq!((rows.total_bytes(), rows.end()), (Some(12), Some(44)));
        assert_eq!(Rows { rows: 0, ..rows }.end(), None);
        assert_eq!(Rows { rows: u64::MAX, ..rows }.end(), None);
        assert_eq!(Rows { rows: u64::MAX, ..rows }.total_bytes(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn nothing_panics_on_rubbish(input in proptest::collection::vec(any::<u8>(), 0..2000)) {
            fuzz_entry(&input);
        }
    }
}
