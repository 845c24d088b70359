// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of this process that buffers lie in: pages of its own, or a file of the service's.
//!
//! Pages come into being when they are touched, so a large buffer costs nothing until it is used. Mappings are
//! aligned to a huge page; malloc'ed weights in small pages make generation a quarter slower.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

/// Size of a huge page on the machines that have them at all.
const HUGE_BYTES: usize = 2 << 20;

/// Why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The size is zero or beyond the address space.
    #[error("a buffer of {bytes} bytes cannot be mapped")]
    Size {
        /// The size.
        bytes: u64,
    },
    /// The file is shorter than what is to be mapped of it.
    #[error("the shared file has {have} of {bytes} bytes")]
    Short {
        /// The file's size.
        have: u64,
        /// What was to be mapped.
        bytes: u64,
    },
    /// The system refused.
    #[error("cannot map {bytes} bytes")]
    System {
        /// The size.
        bytes: u64,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
}

/// A mapping, gone when dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<c_void>,
    len: usize,
    /// The file behind it while it may not be written.
    shared: Cell<bool>,
    file: Option<OwnedFd>,
    /// Whether private pages may be huge where they are filled in bulk.
    huge_pages: bool,
}

fn system(bytes: usize) -> impl Fn(rustix::io::Errno) -> MappingError {
    move |errno| MappingError::System { bytes: bytes as u64, source: errno.into() }
}

/// Regions of at least this size are filled in bulk: weights are, a token's inputs are not.
const BULK_BYTES: usize = 64 << 10;

/// Reserves addresses for `len` bytes, aligned to a huge page where that can help.
fn reserve(len: usize) -> Result<NonNull<c_void>, MappingError> {
    let spare = if len >= HUGE_BYTES { HUGE_BYTES } else { 0 };
    let total = len.checked_add(spare).ok_or(MappingError::Size { bytes: len as u64 })?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the system chooses the place, so nothing that exists is replaced.
    let start =
        unsafe { mmap_anonymous(null_mut(), total, ProtFlags::empty(), flags) }.map_err(system(len))?;
    let before = if spare > 0 { start.align_offset(HUGE_BYTES).min(spare) } else { 0 };
    // SAFETY: both ends lie within the reservation just made, which nothing points into yet, and the middle
    // of `len` bytes stays. Page-sized: `before` leads to an aligned address from one that is page-aligned.
    unsafe {
        let kept = start.byte_add(before);
        if before > 0 {
            let _ = munmap(start, before);
        }
        let behind = (spare - before) & !4095;
        if behind > 0 {
            let _ = munmap(kept.byte_add(total - before - behind), behind);
        }
        NonNull::new(kept).ok_or(MappingError::Size { bytes: len as u64 })
    }
}

fn page_sized(bytes: u64) -> Result<usize, MappingError> {
    let error = MappingError::Size { bytes };
    let len = usize::try_from(bytes).ok().filter(|len| *len > 0);
    len.and_then(|len| len.checked_next_multiple_of(4096))
        .filter(|len| isize::try_from(*len).is_ok())
        .ok_or(error)
}

impl Mapping {
    /// Zeroed pages of its own.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn private(bytes: u64, huge_pages: bool) -> Result<Self, MappingError> {
        let len = page_sized(bytes)?;
        let start = reserve(len)?;
        let mapping = Self { start, len, shared: Cell::new(false), file: None, huge_pages };
        // SAFETY: the range is this mapping's own.
        unsafe {
            mprotect(start.as_ptr(), len, rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE)
        }
        .map_err(system(len))?;
        Ok(mapping)
    }

    /// The first bytes of a file, shared with all who map it, not to be written.
    ///
    /// # Errors
    /// When the file is shorter, or the system refuses.
    pub fn shared(file: OwnedFd, bytes: u64, huge_pages: bool) -> Result<Self, MappingError> {
        let len = page_sized(bytes)?;
        let have = rustix::fs::fstat(&file).map_err(system(len))?.st_size;
        let have = u64::try_from(have).unwrap_or(0);
        if have < bytes {
            return Err(MappingError::Short { have, bytes });
        }
        let start = reserve(len)?;
        let mapping = Self { start, len, shared: Cell::new(true), file: Some(file), huge_pages: false };
        mapping.map_file(ProtFlags::READ, MapFlags::SHARED)?;
        if huge_pages && len >= HUGE_BYTES {
            mapping.advise(0, len, Advice::LinuxHugepage);
        }
        Ok(mapping)
    }

    /// The first bytes of a file that this process made and may write.
    ///
    /// # Errors
    /// When the file is shorter, or the system refuses.
    pub fn writable(file: OwnedFd, bytes: u64) -> Result<Self, MappingError> {
        let mapping = Self::shared(file, bytes, false)?;
        mapping.map_file(ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)?;
        mapping.shared.set(false);
        Ok(mapping)
    }

    fn map_file(&self, protection: ProtFlags, flags: MapFlags) -> Result<(), MappingError> {
        let Some(file) = &self.file else { return Ok(()) };
        // SAFETY: the fixed range is this mapping's own reservation; whoever points into it sees the same bytes
        // at the same addresses.
        unsafe { mmap(self.start.as_ptr(), self.len, protection, flags | MapFlags::FIXED, file.as_fd(), 0) }
            .map(|_| ())
            .map_err(system(self.len))
    }

    /// Makes a shared mapping this process's own, at the same addresses; pages are copied as they are written.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn make_private(&self) -> Result<(), MappingError> {
        if self.shared.get() {
            self.map_file(ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?;
            self.shared.set(false);
        }
        Ok(())
    }

    /// Whether it may not be written.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.get()
    }

    /// Says that a region is about to be filled: huge pages may lie below all of it. Not said of a whole buffer
    /// from its start: in the one for intermediate results, far larger than what is touched, every touch would
    /// take a huge page.
    pub(super) fn expect_bulk(&self, offset: usize, bytes: usize) {
        if !self.huge_pages || self.len < HUGE_BYTES || bytes < BULK_BYTES {
            return;
        }
        let from = offset & !(HUGE_BYTES - 1);
        let to = offset.saturating_add(bytes).div_ceil(HUGE_BYTES).saturating_mul(HUGE_BYTES).min(self.len);
        if from < to {
            self.advise(from, to - from, Advice::LinuxHugepage);
        }
    }

    /// `offset` and `len` lie within the mapping, at pages' ends.
    fn advise(&self, offset: usize, len: usize, advice: Advice) {
        // Advice only: a kernel without huge pages says no, and nothing depends on a yes.
        // SAFETY: the range is within this mapping's own, and this advice does not change its content.
        let _ = unsafe { madvise(self.start.as_ptr().byte_add(offset), len, advice) };
    }

    /// Gives the pages of a private mapping back, so that it reads as zeros again.
    pub(super) fn forget_pages(&self) {
        if !self.shared.get() && self.file.is_none() {
            // SAFETY: the range is this mapping's own pages; the caller holds the only access to its content.
            let _ = unsafe { madvise(self.start.as_ptr(), self.len, Advice::LinuxDontNeed) };
        }
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr().cast()
    }

    /// Bytes of it, whole pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never: a mapping has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's own, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn bytes(mapping: &Mapping) -> &[u8] {
        // SAFETY: all of it is readable, and the tests do not write meanwhile.
        unsafe { std::slice::from_raw_parts(mapping.start(), mapping.len) }
    }

    #[test]
    fn large_mappings_are_aligned_and_zeroed() {
        for size in [1_u64, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3] {
            let mapping = Mapping::private(size, true).unwrap();
            assert!(mapping.len() >= size);
            if size >= 2 << 20 {
                assert_eq!(mapping.start().align_offset(HUGE_BYTES), 0);
            }
            assert!(bytes(&mapping).iter().all(|byte| *byte == 0));
        }
        assert!(Mapping::private(0, true).is_err());
        assert!(Mapping::private(u64::MAX, true).is_err());
        assert!(Mapping::private(1 << 62, true).is_err());
    }

    /// Whether the kernel was told that huge pages may lie below an address.
    fn may_be_huge(address: usize) -> bool {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut within = false;
        for line in text.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends =
                range.map(|(from, to)| (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16)));
            if let Some((Ok(from), Ok(to))) = ends {
                within = (from..to).contains(&address);
            } else if within && line.starts_with("VmFlags:") {
                return line.split(' ').any(|flag| flag == "hg");
            }
        }
        panic!("{address:#x} is not mapped")
    }

    #[test]
    fn only_what_is_filled_in_bulk_may_be_huge() {
        let mapping = Mapping::private(16 << 20, true).unwrap();
        let at = |offset: usize| may_be_huge(mapping.start().addr() + offset);
        mapping.expect_bulk(1 << 20, BULK_BYTES - 1);
        assert!(!at(1 << 20), "a token's inputs");
        mapping.expect_bulk((5 << 20) + 7, BULK_BYTES);
        assert_eq!([at(3 << 20), at(4 << 20), at((6 << 20) - 1), at(6 << 20)], [false, true, true, false]);
        mapping.expect_bulk(0, 16 << 20);
        assert!(at(0) && at((16 << 20) - 1));
        let small_pages = Mapping::private(16 << 20, false).unwrap();
        small_pages.expect_bulk(0, 16 << 20);
        assert!(!may_be_huge(small_pages.start().addr()));
    }

    #[test]
    fn a_shared_mapping_becomes_private_in_place() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        assert!(matches!(
            Mapping::shared(file.try_clone().unwrap().into(), 5001, false),
            Err(MappingError::Short { have: 5000, bytes: 5001 })
        ));
        let mapping = Mapping::shared(file.try_clone().unwrap().into(), 5000, false).unwrap();
        let place = mapping.start();
        assert!(mapping.is_shared());
        mapping.make_private().unwrap();
        assert_eq!((mapping.start(), mapping.is_shared()), (place, false));
        // SAFETY: writable by now, and nothing else looks at it.
        unsafe { *place = 9 };
        assert_eq!(bytes(&mapping)[..3], [9, 7, 7]);
        let other = Mapping::shared(file.into(), 5000, false).unwrap();
        assert_eq!(bytes(&other)[0], 7);
    }
}
