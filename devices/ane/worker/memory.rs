// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory: a model's sealed file, a ring that a container writes too, and private memory for a run's data.
//!
//! What comes from a container must be sealed so that it cannot shrink under a mapping, and lie in ordinary memory:
//! a file of another kind can fail at any access, which would end the worker.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU32;

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// `f_type` of files in ordinary shared memory.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// Private memory stands on the border of a cache line, as every tensor in a ring does.
const LINE_BYTES: usize = 64;

/// Why a file cannot be used as memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    /// Not memory, or not sealed.
    #[error("file is {what}")]
    Unfit {
        /// What is wrong with it.
        what: &'static str,
    },
    /// Another size than announced.
    #[error("file has {found} bytes, {announced} were announced")]
    Size {
        /// Its size.
        found: u64,
        /// What was said.
        announced: u64,
    },
    /// The system refused.
    #[error("memory of {bytes} bytes is not to be had")]
    System {
        /// How much.
        bytes: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Checks a file: memory, of this size, sealed at least so.
fn check(file: impl AsFd, bytes: u64, seals: SealFlags) -> Result<usize, MemoryError> {
    let system = |errno: rustix::io::Errno| MemoryError::System { bytes, source: errno.into() };
    let kind = rustix::fs::fstatfs(&file).map_err(system)?.f_type;
    if kind != TMPFS_MAGIC {
        return Err(MemoryError::Unfit { what: "no ordinary memory" });
    }
    let has =
        rustix::fs::fcntl_get_seals(&file).map_err(|_| MemoryError::Unfit { what: "nothing with seals" })?;
    if !has.contains(seals) {
        return Err(MemoryError::Unfit { what: "not sealed" });
    }
    let found = u64::try_from(rustix::fs::fstat(&file).map_err(system)?.st_size).unwrap_or(0);
    if found != bytes {
        return Err(MemoryError::Size { found, announced: bytes });
    }
    match usize::try_from(bytes) {
        Ok(length) if length > 0 => Ok(length),
        _ => Err(MemoryError::Size { found, announced: bytes }),
    }
}

/// A mapping of a whole file.
#[derive(Debug)]
struct Map {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Map {}
// SAFETY: what may be done to it by several threads is up to the types below.
unsafe impl Sync for Map {}

impl Map {
    fn new(
        file: impl AsFd,
        length: usize,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, MemoryError> {
        let bytes = u64::try_from(length).unwrap_or(u64::MAX);
        // SAFETY: a new mapping at a place of the kernel's choice; nothing else is there.
        let start = unsafe { mmap(null_mut(), length, protection, flags, file, 0) };
        let start = start.map_err(|errno| MemoryError::System { bytes, source: errno.into() })?;
        let nothing = || MemoryError::System { bytes, source: io::ErrorKind::OutOfMemory.into() };
        Ok(Self { start: NonNull::new(start.cast()).ok_or_else(nothing)?, length })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and unmapped once; who borrowed from it is gone.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// A file that nobody can change any more.
#[derive(Debug)]
pub(super) struct Sealed(Map);

impl Sealed {
    /// Maps it.
    ///
    /// # Errors
    /// When it is not sealed against everything, or has another size.
    pub(super) fn new(file: impl AsFd, bytes: u64) -> Result<Self, MemoryError> {
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
        let length = check(&file, bytes, seals)?;
        Ok(Self(Map::new(file, length, ProtFlags::READ, MapFlags::SHARED)?))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for reading over the whole length for as long as `self`, and sealed against writing and
        // shrinking.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.length) }
    }
}

/// Memory that a container has mapped as well, and may write at any time.
#[derive(Debug)]
pub(super) struct Shared {
    map: Map,
    /// Kept to be handed on.
    file: File,
}

impl Shared {
    /// Maps it.
    ///
    /// # Errors
    /// When it can still shrink or grow, or has another size.
    pub(super) fn new(file: File, bytes: u64) -> Result<Self, MemoryError> {
        let length = check(&file, bytes, SealFlags::SHRINK | SealFlags::GROW)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = Map::new(&file, length, protection, MapFlags::SHARED)?;
        Ok(Self { map, file })
    }

    pub(super) fn length(&self) -> usize {
        self.map.length
    }

    /// Gives up the mapping and keeps the file.
    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// A pointer to a part; `None` when it is not within.
    pub(super) fn part(&self, offset: usize, length: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        // SAFETY: the offset is within the mapping.
        (end <= self.map.length).then(|| unsafe { self.map.start.add(offset) })
    }

    /// A word that both sides use as an atomic; `None` when it is not within.
    pub(super) fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let part = self.part(offset, size_of::<AtomicU32>())?.cast::<AtomicU32>();
        if !part.is_aligned() {
            return None;
        }
        // SAFETY: within the mapping, aligned, alive as long as `self`, and valid whatever is in it.
        Some(unsafe { part.as_ref() })
    }

    /// Copies bytes out; false when they are not within.
    #[must_use]
    pub(super) fn read(&self, offset: usize, to: &mut [u8]) -> bool {
        let Some(part) = self.part(offset, to.len()) else { return false };
        // SAFETY: within the mapping; the target is ours alone. A container that writes meanwhile mixes the bytes,
        // every mixture of which is looked at only after this copy.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to.as_mut_ptr(), to.len()) };
        true
    }

    /// Copies bytes in; false when they do not fit.
    #[must_use]
    pub(super) fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(part) = self.part(offset, from.len()) else { return false };
        // SAFETY: within the mapping, to which there are no references but to the words, which are atomics.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), part.as_ptr(), from.len()) };
        true
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// Private memory for the data of a run, used again for the next.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// At least this many bytes, with what was in them before.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn room(&mut self, bytes: usize) -> Result<&mut [u8], MemoryError> {
        let lines = bytes.div_ceil(LINE_BYTES);
        if let Some(more) = lines.checked_sub(self.0.len()) {
            self.0.try_reserve_exact(more).map_err(|_| MemoryError::System {
                bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
                source: io::ErrorKind::OutOfMemory.into(),
            })?;
            self.0.resize(lines, Line([0; LINE_BYTES]));
        }
        // SAFETY: lines are plain bytes without gaps, borrowed from `self` alone.
        let all = unsafe {
            std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<u8>(), self.0.len() * LINE_BYTES)
        };
        Ok(all.get_mut(..bytes).unwrap_or_default())
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `room`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<u8>(), self.0.len() * LINE_BYTES) }
    }

    /// Gives memory back when there is more than this.
    pub(super) fn trim(&mut self, bytes: usize) {
        if self.0.len() > bytes.div_ceil(LINE_BYTES) {
            self.0 = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    const SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    #[test]
    fn a_file_that_can_shrink_or_is_no_memory_is_refused() {
        let text = |file: OwnedFd| Shared::new(file.into(), 4096).unwrap_err().to_string();
        assert_eq!(text(memfd(4096, SealFlags::GROW)), "file is not sealed");
        assert_eq!(text(memfd(4096, SealFlags::empty())), "file is not sealed");
        assert_eq!(text(memfd(8192, SIZE)), "file has 8192 bytes, 4096 were announced");
        assert_eq!(text(File::open("/proc/self/exe").unwrap().into()), "file is no ordinary memory");
        assert!(text(tempfile::tempfile().unwrap().into()).starts_with("file is n"));
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(text(socket.into()), "file is no ordinary memory");
    }

    #[test]
    fn a_model_that_can_still_be_written_is_refused() {
        assert!(Sealed::new(memfd(4096, SIZE), 4096).is_err());
        let sealed = Sealed::new(memfd(4096, SIZE | SealFlags::WRITE), 4096).unwrap();
        assert_eq!(sealed.bytes(), [0; 4096]);
        assert!(Sealed::new(memfd(0, SIZE | SealFlags::WRITE), 0).is_err());
    }

    #[test]
    fn nothing_outside_of_shared_memory_is_touched() {
        let shared = Shared::new(memfd(4096, SIZE).into(), 4096).unwrap();
        assert!(shared.write(4094, &[1, 2]) && !shared.write(4095, &[1, 2]));
        let mut two = [0; 2];
        assert!(shared.read(4094, &mut two));
        assert_eq!(two, [1, 2]);
        assert!(!shared.read(usize::MAX, &mut two));
        assert!(shared.word(4092).is_some() && shared.word(4093).is_none() && shared.word(4096).is_none());
    }

    #[test]
    fn a_buffer_grows_and_gives_back() {
        let mut buffer = Buffer::default();
        buffer.room(65).unwrap().fill(7);
        assert_eq!((buffer.bytes().len(), buffer.bytes().as_ptr().addr() % 64), (128, 0));
        buffer.trim(128);
        assert_eq!(buffer.bytes().len(), 128);
        buffer.trim(64);
        assert!(buffer.bytes().is_empty());
        assert!(buffer.room(usize::MAX / 2).is_err());
    }
}
