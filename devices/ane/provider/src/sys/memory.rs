// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory from the kernel: pages of this process, files in memory, and their seals.
#![allow(unsafe_code)]

use core::ffi::CStr;
use core::ptr::{NonNull, with_exposed_provenance_mut};

use super::raw::{self, call};
use super::{Descriptor, Errno, checked, uninterrupted};

const PROT_READ: usize = 1;
const PROT_READ_WRITE: usize = 3;
const MAP_SHARED: usize = 1;
const MAP_PRIVATE_ANONYMOUS: usize = 0x22;
const NO_DESCRIPTOR: usize = usize::MAX;
const MREMAP_MAYMOVE: usize = 1;
const MFD_CLOEXEC: usize = 1;
const MFD_ALLOW_SEALING: usize = 2;
const MFD_NOEXEC_SEAL: usize = 8;
const F_ADD_SEALS: usize = 1033;
const F_SEAL_SEAL: usize = 1;
const F_SEAL_SHRINK: usize = 2;
const F_SEAL_GROW: usize = 4;
const F_SEAL_WRITE: usize = 8;

/// What a file in memory is sealed against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seals {
    /// Shrinking and growing: both sides go on writing.
    Size,
    /// Any change.
    Content,
}

/// A new file in memory that can be sealed.
pub(crate) fn file_in_memory(name: &CStr) -> Result<Descriptor, Errno> {
    let create = |flags| {
        let pointer = name.as_ptr().expose_provenance();
        // SAFETY: a name that ends in a zero byte and lives through the call.
        uninterrupted(|| unsafe { call(raw::MEMFD_CREATE, [pointer, flags, 0, 0, 0, 0]) })
    };
    // A system may demand the flag, one older than the flag refuses it.
    let number = create(MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL)
        .or_else(|_| create(MFD_CLOEXEC | MFD_ALLOW_SEALING))?;
    Descriptor::new(number)
}

/// Sets a file's length.
pub(crate) fn set_length(file: &Descriptor, bytes: usize) -> Result<(), Errno> {
    // SAFETY: plain numbers.
    uninterrupted(|| unsafe { call(raw::FTRUNCATE, [file.argument(), bytes, 0, 0, 0, 0]) }).map(drop)
}

/// Seals a file, and the seals with it.
pub(crate) fn seal(file: &Descriptor, seals: Seals) -> Result<(), Errno> {
    let seals =
        F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | if seals == Seals::Content { F_SEAL_WRITE } else { 0 };
    // SAFETY: plain numbers.
    uninterrupted(|| unsafe { call(raw::FCNTL, [file.argument(), F_ADD_SEALS, seals, 0, 0, 0]) }).map(drop)
}

/// A file's pages in this process, until dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process; who reads or writes it answers for the order.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first bytes of a file that others map too.
    pub(crate) fn shared(file: &Descriptor, bytes: usize) -> Result<Self, Errno> {
        Self::map(file, bytes, PROT_READ_WRITE)
    }

    /// Maps the first bytes of a file to read.
    pub(crate) fn read_only(file: &Descriptor, bytes: usize) -> Result<Self, Errno> {
        Self::map(file, bytes, PROT_READ)
    }

    fn map(file: &Descriptor, bytes: usize, protection: usize) -> Result<Self, Errno> {
        // SAFETY: the kernel chooses where, so nothing that is there is replaced.
        let result = unsafe { call(raw::MMAP, [0, bytes, protection, MAP_SHARED, file.argument(), 0]) };
        let start = NonNull::new(with_exposed_provenance_mut(checked(result)?)).ok_or(Errno::NO_MEMORY)?;
        Ok(Self { start, bytes })
    }

    /// The bytes of a file that is sealed against any change.
    pub(crate) fn sealed_bytes(&self) -> &[u8] {
        // SAFETY: mapped pages of this length; nobody can change or cut the file.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) const fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping's own pages, which nobody borrows any more.
        unsafe { give_pages(self.start.as_ptr(), self.bytes) };
    }
}

/// Fresh pages, all zero; null when there are none.
pub(crate) fn take_pages(bytes: usize) -> *mut u8 {
    // SAFETY: the kernel chooses where, so nothing that is there is replaced.
    let result =
        unsafe { call(raw::MMAP, [0, bytes, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, NO_DESCRIPTOR, 0]) };
    checked(result).map_or(core::ptr::null_mut(), with_exposed_provenance_mut)
}

/// # Safety
/// Whole pages from [`take_pages`] or a mapping, which nobody uses any more.
pub(crate) unsafe fn give_pages(start: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    let _ = unsafe { call(raw::MUNMAP, [start.expose_provenance(), bytes, 0, 0, 0, 0]) };
}

/// Pages of another length with the same content at the front, perhaps elsewhere; null when there are none.
///
/// # Safety
/// Whole pages from [`take_pages`] of that length; the old address is gone afterwards unless null came back.
pub(crate) unsafe fn resize_pages(start: *mut u8, old_bytes: usize, new_bytes: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    let result =
        unsafe { call(raw::MREMAP, [start.expose_provenance(), old_bytes, new_bytes, MREMAP_MAYMOVE, 0, 0]) };
    checked(result).map_or(core::ptr::null_mut(), with_exposed_provenance_mut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_file_keeps_its_content() {
        let file = file_in_memory(c"test").unwrap();
        file.write_all(b"words").unwrap();
        seal(&file, Seals::Content).unwrap();
        assert!(file.write_all(b"more").is_err());
        assert!(set_length(&file, 1).is_err());
        assert!(seal(&file, Seals::Size).is_err(), "no more seals");
        let mapping = Mapping::read_only(&file, 5).unwrap();
        assert_eq!(mapping.sealed_bytes(), b"words");
    }

    #[test]
    fn a_file_of_fixed_size_can_be_written_to() {
        let file = file_in_memory(c"test").unwrap();
        set_length(&file, 4096).unwrap();
        seal(&file, Seals::Size).unwrap();
        assert!(set_length(&file, 8192).is_err() && set_length(&file, 1).is_err());
        let (here, there) = (Mapping::shared(&file, 4096).unwrap(), Mapping::shared(&file, 4096).unwrap());
        // SAFETY: the first byte of two mappings of the same page.
        unsafe {
            here.start().write_volatile(7);
            assert_eq!(there.start().read_volatile(), 7);
        }
    }

    #[test]
    fn pages_keep_what_is_in_them_when_they_are_resized() {
        let start = take_pages(4096);
        // SAFETY: pages of these lengths, given back once.
        unsafe {
            start.write(9);
            let start = resize_pages(start, 4096, 1 << 20);
            assert_eq!((start.read(), start.add((1 << 20) - 1).read()), (9, 0));
            give_pages(start, 1 << 20);
        }
    }
}
