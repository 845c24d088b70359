// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that is handed out: a sealed memfd, mapped where the driver can import it; and how many bytes there may be.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::settings::Settings;

/// Shared memory, mapped.
#[derive(Debug)]
pub(crate) struct Memory {
    file: OwnedFd,
    /// What was reserved, to be given back.
    reserved: (*mut c_void, usize),
    /// Where the memory begins: a multiple of what was asked for.
    pub(crate) at: *mut c_void,
    /// A multiple of the same.
    pub(crate) bytes: usize,
}

// SAFETY: a mapping belongs to the process, and who uses it is Vulkan's matter.
unsafe impl Send for Memory {}

impl Memory {
    /// New memory of at least this size; beginning and size are multiples of `alignment`, a power of two.
    pub(crate) fn new(bytes: u64, alignment: usize) -> Option<Self> {
        let alignment = alignment.max(rustix::param::page_size());
        let bytes = usize::try_from(bytes).ok()?.max(1).checked_next_multiple_of(alignment)?;
        let file = memfd_create("lighter-gpu", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
        ftruncate(&file, u64::try_from(bytes).ok()?).ok()?;
        // A client that has it can neither take it away under the driver nor make it larger.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
        let room = bytes.checked_add(alignment)?;
        // SAFETY: new address space.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                room,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .ok()?;
        let memory = Self {
            file,
            reserved: (start, room),
            at: start.wrapping_byte_add(start.align_offset_to(alignment)),
            bytes,
        };
        // SAFETY: within what has just been reserved, which nobody else has.
        unsafe {
            mmap(
                memory.at,
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &memory.file,
                0,
            )
        }
        .ok()?;
        Some(memory)
    }

    /// The memory for somebody else to map.
    pub(crate) fn descriptor(&self) -> Option<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.file, 3).ok()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: ours, and the driver has let go of it: it is dropped after the memory has been freed.
        let _ = unsafe { munmap(self.reserved.0, self.reserved.1) };
    }
}

/// How far a pointer is from the next multiple.
trait AlignOffsetTo {
    fn align_offset_to(self, alignment: usize) -> usize;
}

impl AlignOffsetTo for *mut c_void {
    fn align_offset_to(self, alignment: usize) -> usize {
        self.addr().next_multiple_of(alignment) - self.addr()
    }
}

/// What a device's memory holds.
#[derive(Debug)]
pub(crate) struct Held {
    /// Memory that was handed out, or is to be.
    pub(crate) memory: Option<Memory>,
    /// Its part of the account.
    _counted: Counted,
}

impl Held {
    pub(crate) fn new(memory: Option<Memory>, counted: Counted) -> Self {
        Self { memory, _counted: counted }
    }
}

/// Bytes of all allocations of this process.
static BYTES: AtomicU64 = AtomicU64::new(0);

/// A part of the account, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(u64);

impl Counted {
    /// Counts bytes; `None` when that would be too many.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        let most = Settings::get().max_bytes.unwrap_or(u64::MAX);
        let add = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= most);
        BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok().map(|_| Self(bytes))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn memory_is_aligned_sealed_and_the_same_for_both() {
        for alignment in [1, 4096, 65_536, 1 << 21] {
            let memory = Memory::new(5000, alignment).unwrap();
            assert!(memory.at.addr().is_multiple_of(alignment.max(4096)));
            assert!(memory.bytes >= 5000 && memory.bytes.is_multiple_of(alignment.max(4096)));
            // SAFETY: mapped, and nobody else's.
            unsafe { memory.at.cast::<u8>().add(4999).write_volatile(7) };
            let file = std::fs::File::from(memory.descriptor().unwrap());
            let mut byte = [0];
            file.read_exact_at(&mut byte, 4999).unwrap();
            assert_eq!(byte, [7]);
            assert!(file.set_len(1).is_err(), "a client could take the memory away");
            assert!(file.set_len(1 << 30).is_err());
        }
        assert!(Memory::new(u64::MAX, 4096).is_none());
    }
}
