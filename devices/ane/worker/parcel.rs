// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors in a file, on their way between worker and service: samples, trials, results.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use lighter_frames::{Element, FrameError, Tensor, ring};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::memory::{Buffer, MemoryError};
use crate::ane::control::TensorPlace;

/// Why tensors could not be packed or taken out.
#[derive(Debug, thiserror::Error)]
pub(super) enum ParcelError {
    /// The file.
    #[error("file of tensors cannot be made or read")]
    File(#[from] io::Error),
    /// A place that is none.
    #[error("tensor {index} of a file is not as described")]
    Place {
        /// Which.
        index: usize,
    },
    /// A shape.
    #[error(transparent)]
    Shape(#[from] FrameError),
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Too much.
    #[error("tensors of {bytes} bytes are over the limit of {limit}")]
    Limit {
        /// How much.
        bytes: u64,
        /// The most.
        limit: u64,
    },
}

impl From<rustix::io::Errno> for ParcelError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::File(errno.into())
    }
}

/// Writes all bytes at an offset.
fn write_at(file: impl AsFd, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = rustix::io::retry_on_intr(|| rustix::io::pwrite(&file, bytes, offset))?;
        bytes = bytes.get(count..).unwrap_or_default();
        offset += u64::try_from(count).unwrap_or(0);
    }
    Ok(())
}

/// Fills `to` from an offset.
pub(super) fn read_at(file: impl AsFd, mut to: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !to.is_empty() {
        let count = rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut *to, offset))?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        to = to.get_mut(count..).unwrap_or_default();
        offset += u64::try_from(count).unwrap_or(0);
    }
    Ok(())
}

/// A sealed file that holds exactly these pieces, each at its offset.
pub(super) fn sealed_file(pieces: &[(u64, &[u8])], bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("ane", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes)?;
    for (offset, piece) in pieces {
        write_at(&file, piece, *offset)?;
    }
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Puts tensors into a sealed file.
pub(super) fn pack(tensors: &[(&Tensor, &[u8])]) -> Result<(OwnedFd, Vec<TensorPlace>), ParcelError> {
    let shapes: Vec<Tensor> = tensors.iter().map(|(tensor, _)| (*tensor).clone()).collect();
    let limit = u64::MAX;
    let placed = ring::place(0, &shapes, limit).ok_or(ParcelError::Limit { bytes: limit, limit })?;
    let pieces: Vec<(u64, &[u8])> =
        placed.offsets.iter().copied().zip(tensors.iter().map(|(_, data)| *data)).collect();
    // A file of no bytes could not be mapped by who gets it.
    let file = sealed_file(&pieces, placed.end.max(1))?;
    let places = shapes.iter().zip(&placed.offsets).map(|(tensor, offset)| TensorPlace {
        dtype: tensor.element().number(),
        dims: tensor.dims().to_vec(),
        offset: *offset,
        bytes: tensor.bytes(),
    });
    Ok((file, places.collect()))
}

/// Takes tensors out of a file into `buffer`; each begins there at the offset that comes with it.
pub(super) fn unpack(
    places: &[TensorPlace],
    file: &OwnedFd,
    limit: u64,
    buffer: &mut Buffer,
) -> Result<Vec<(Tensor, usize)>, ParcelError> {
    let mut tensors = Vec::with_capacity(places.len());
    for (index, place) in places.iter().enumerate() {
        let element = Element::from_number(place.dtype.into()).ok_or(ParcelError::Place { index })?;
        let tensor = Tensor::new(element, place.dims.clone())?;
        if tensor.bytes() != place.bytes {
            return Err(ParcelError::Place { index });
        }
        tensors.push(tensor);
    }
    let total = tensors.iter().fold(0_u64, |sum, tensor| sum.saturating_add(tensor.bytes()));
    let over = || ParcelError::Limit { bytes: total, limit };
    if total > limit {
        return Err(over());
    }
    let placed = ring::place(0, &tensors, u64::MAX).ok_or_else(over)?;
    let room = buffer.room(usize::try_from(placed.end).map_err(|_| over())?)?;
    let mut out = Vec::with_capacity(tensors.len());
    for ((tensor, place), offset) in tensors.into_iter().zip(places).zip(placed.offsets) {
        let start = usize::try_from(offset).map_err(|_| over())?;
        let length = usize::try_from(place.bytes).map_err(|_| over())?;
        let part = room.get_mut(start..).and_then(|rest| rest.get_mut(..length)).ok_or_else(over)?;
        read_at(file, part, place.offset)?;
        out.push((tensor, start));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(element: Element, dims: &[u64]) -> Tensor {
        Tensor::new(element, dims.to_vec()).unwrap()
    }

    #[test]
    fn tensors_come_out_as_they_went_in() {
        let (a, b, c) = (tensor(Element::U8, &[3]), tensor(Element::F32, &[0, 7]), tensor(Element::I64, &[]));
        let (file, places) = pack(&[(&a, &[1, 2, 3]), (&b, &[]), (&c, &[9; 8])]).unwrap();
        let mut buffer = Buffer::default();
        let out = unpack(&places, &file, 11, &mut buffer).unwrap();
        assert_eq!(out.iter().map(|(tensor, _)| tensor.clone()).collect::<Vec<_>>(), [a, b, c]);
        assert_eq!(buffer.bytes().get(..3).unwrap(), [1, 2, 3]);
        assert_eq!(buffer.bytes().get(out[2].1..out[2].1 + 8).unwrap(), [9; 8]);
        assert!(matches!(unpack(&places, &file, 10, &mut buffer), Err(ParcelError::Limit { bytes: 11, .. })));
    }

    #[test]
    fn what_does_not_fit_its_description_is_refused() {
        let a = tensor(Element::U8, &[3]);
        let (file, places) = pack(&[(&a, &[1, 2, 3])]).unwrap();
        let mut buffer = Buffer::default();
        let mut unpacked = |change: fn(&mut TensorPlace)| {
            let mut changed = places.clone();
            changed.iter_mut().for_each(change);
            unpack(&changed, &file, 1 << 20, &mut buffer).unwrap_err()
        };
        assert!(matches!(unpacked(|place| place.bytes = 4), ParcelError::Place { index: 0 }));
        assert!(matches!(unpacked(|place| place.dtype = 8), ParcelError::Place { index: 0 }));
        assert!(matches!(unpacked(|place| place.offset = 1 << 40), ParcelError::File(_)));
        assert!(matches!(unpacked(|place| place.dims = vec![1 << 63]), ParcelError::Shape(_)));
    }
}
