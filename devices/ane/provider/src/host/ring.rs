// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a connection shares with the host. Where things lie in it, `lighter_frames::ring` says.
//!
//! The host may write into it at any time. Nothing in it is looked at before it is copied out, and no reference to its
//! bytes is made.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use lighter_frames::ring::{self, ANSWER, DATA, HEAD, REQUEST};
use lighter_frames::{HEADER_BYTES, Header, MAX_FRAME_BYTES};

use super::trouble::Trouble;
use crate::sys::memory::{Mapping, Seals, file_in_memory, seal, set_length};
use crate::sys::{Descriptor, Errno};

const NAME: &CStr = c"lighter-ane-ring";
/// A ring is made this much larger than is asked for, so that it does not grow with every other run.
const SPARE: u64 = 64 << 10;

/// The shared memory.
#[derive(Debug)]
pub(super) struct Ring {
    mapping: Mapping,
    data_bytes: u64,
}

impl Ring {
    /// Makes one with room for so much data, in which these runs are the last that were asked for and answered.
    pub(super) fn new(data_bytes: u64, request: u32, answer: u32) -> Result<(Self, Descriptor), Errno> {
        let bytes = ring::bytes_for(data_bytes.saturating_add(SPARE)).ok_or(Errno::NO_MEMORY)?;
        let length = usize::try_from(bytes).map_err(|_| Errno::NO_MEMORY)?;
        let file = file_in_memory(NAME)?;
        set_length(&file, length)?;
        seal(&file, Seals::Size)?;
        let ring = Self { mapping: Mapping::shared(&file, length)?, data_bytes: ring::data_bytes(bytes) };
        ring.word(REQUEST).store(request, Ordering::SeqCst);
        ring.word(ANSWER).store(answer, Ordering::SeqCst);
        Ok((ring, file))
    }

    /// Its length.
    pub(super) fn bytes(&self) -> u64 {
        u64::try_from(self.mapping.bytes()).unwrap_or(0)
    }

    /// Length of its data area.
    pub(super) const fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// One of the control words.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset < HEAD && offset.is_multiple_of(4), "a control word");
        // SAFETY: within the mapping's first page and aligned; all sides use these words atomically.
        unsafe { AtomicU32::from_ptr(self.mapping.start().as_ptr().add(offset.min(HEAD - 4)).cast()) }
    }

    /// Puts bytes at an offset, if they fit.
    fn put(&self, offset: usize, bytes: &[u8]) -> Result<(), Errno> {
        self.check(offset, bytes.len())?;
        // SAFETY: within the mapping; the other side knows that it changes.
        unsafe {
            self.mapping.start().as_ptr().add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
        Ok(())
    }

    /// Copies bytes out.
    fn get(&self, offset: usize, into: &mut [u8]) -> Result<(), Errno> {
        self.check(offset, into.len())?;
        // SAFETY: within the mapping; what the other side writes meanwhile is its own loss.
        unsafe {
            into.as_mut_ptr().copy_from_nonoverlapping(self.mapping.start().as_ptr().add(offset), into.len())
        };
        Ok(())
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), Errno> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.mapping.bytes());
        end.map(drop).ok_or(Errno::INVALID)
    }

    /// Puts a frame into the head area.
    pub(super) fn put_head(&self, frame: &[u8]) -> Result<(), Errno> {
        if frame.len() > MAX_FRAME_BYTES {
            return Err(Errno::INVALID);
        }
        self.put(HEAD, frame)
    }

    /// Copies the frame in the head area out.
    pub(super) fn head(&self) -> Result<(Header, Vec<u8>), Trouble> {
        let mut header = [0; HEADER_BYTES];
        self.get(HEAD, &mut header)?;
        let header = Header::decode(&header)?;
        let mut body = alloc::vec![0; usize::try_from(header.body_bytes).map_err(|_| Errno::INVALID)?];
        self.get(HEAD + HEADER_BYTES, &mut body)?;
        Ok((header, body))
    }

    /// Puts a tensor's data into the data area.
    pub(super) fn put_data(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.put(data_offset(offset)?, bytes)
    }

    /// Copies a tensor's data out.
    pub(super) fn get_data(&self, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.get(data_offset(offset)?, into)
    }
}

fn data_offset(offset: u64) -> Result<usize, Errno> {
    usize::try_from(offset).ok().and_then(|offset| offset.checked_add(DATA)).ok_or(Errno::INVALID)
}

#[cfg(test)]
mod tests {
    use lighter_frames::Message;

    use super::*;

    #[test]
    fn both_sides_see_words_head_and_data() {
        let (here, file) = Ring::new(1000, 7, 6).unwrap();
        let there = Ring {
            mapping: Mapping::shared(&file, here.mapping.bytes()).unwrap(),
            data_bytes: here.data_bytes(),
        };
        assert!(ring::is_size(here.bytes()) && here.data_bytes() >= 1000);
        assert_eq!(there.word(REQUEST).load(Ordering::SeqCst), 7);
        here.put_head(&Message::Bell.encode().unwrap()).unwrap();
        let (header, body) = there.head().unwrap();
        assert_eq!(Message::decode(header, &body), Ok(Message::Bell));
        there.put_data(128, b"data").unwrap();
        let mut data = [0; 4];
        here.get_data(128, &mut data).unwrap();
        assert_eq!(&data, b"data");
    }

    #[test]
    fn nothing_is_read_or_written_beyond_the_end() {
        let (ring, _file) = Ring::new(0, 0, 0).unwrap();
        let end = ring.data_bytes();
        assert!(ring.put_data(end - 4, b"four").is_ok());
        assert!(ring.put_data(end - 3, b"four").is_err());
        assert!(ring.get_data(u64::MAX, &mut [0]).is_err());
        assert!(ring.put_head(&vec![0; MAX_FRAME_BYTES + 1]).is_err());
        assert!(Ring::new(u64::MAX, 0, 0).is_err());
    }
}
