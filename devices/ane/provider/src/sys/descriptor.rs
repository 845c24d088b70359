// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors that close themselves, and the little that is done with files.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::ffi::CStr;

use super::raw::{self, call};
use super::{Errno, checked, uninterrupted};

const FOLDER_OF_THE_PROCESS: isize = -100;
const O_CLOEXEC: usize = 0o2_000_000;
const STDERR: usize = 2;

/// An open descriptor, closed when dropped.
#[derive(Debug)]
pub(crate) struct Descriptor(i32);

impl Descriptor {
    /// Of a number that a call has just made.
    pub(crate) fn new(number: usize) -> Result<Self, Errno> {
        i32::try_from(number).map(Self).map_err(|_| Errno::INVALID)
    }

    pub(crate) const fn number(&self) -> i32 {
        self.0
    }

    /// As an argument of a call.
    pub(crate) fn argument(&self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    /// Writes all of it.
    pub(crate) fn write_all(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            let (pointer, length) = (bytes.as_ptr().expose_provenance(), bytes.len());
            // SAFETY: bytes that live through the call.
            let written =
                uninterrupted(|| unsafe { call(raw::WRITE, [self.argument(), pointer, length, 0, 0, 0]) })?;
            bytes = bytes.get(written.max(1)..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads what there is, up to the buffer's length.
    pub(crate) fn read(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let (pointer, length) = (into.as_mut_ptr().expose_provenance(), into.len());
        // SAFETY: a buffer of that length that lives through the call.
        uninterrupted(|| unsafe { call(raw::READ, [self.argument(), pointer, length, 0, 0, 0]) })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: this library's own descriptor, closed once. An error leaves it closed all the same.
        let _ = unsafe { call(raw::CLOSE, [self.argument(), 0, 0, 0, 0, 0]) };
    }
}

/// A whole file, if it is there and not longer than `max_bytes`.
pub(crate) fn read_file(path: &CStr, max_bytes: usize) -> Option<Vec<u8>> {
    let folder = FOLDER_OF_THE_PROCESS.cast_unsigned();
    let pointer = path.as_ptr().expose_provenance();
    // SAFETY: a path that ends in a zero byte and lives through the call.
    let opened = uninterrupted(|| unsafe { call(raw::OPENAT, [folder, pointer, O_CLOEXEC, 0, 0, 0]) });
    let file = Descriptor::new(opened.ok()?).ok()?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match file.read(&mut chunk).ok()? {
            0 => return Some(bytes),
            got => bytes.extend_from_slice(chunk.get(..got)?),
        }
        if bytes.len() > max_bytes {
            return None;
        }
    }
}

/// This process's number; another one after a fork.
pub(crate) fn getpid() -> u32 {
    // SAFETY: takes nothing.
    let number = checked(unsafe { call(raw::GETPID, [0; 6]) });
    number.ok().and_then(|number| u32::try_from(number).ok()).unwrap_or(0)
}

/// Writes to standard error as much as it takes; there is nobody to tell when it does not.
pub(crate) fn write_to_stderr(bytes: &[u8]) {
    // SAFETY: bytes that live through the call.
    let _ = uninterrupted(|| unsafe {
        call(raw::WRITE, [STDERR, bytes.as_ptr().expose_provenance(), bytes.len(), 0, 0, 0])
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole_or_not_at_all() {
        let status = read_file(c"/proc/self/status", 1 << 20).unwrap();
        assert!(status.starts_with(b"Name:"));
        assert_eq!(read_file(c"/proc/self/status", 10), None);
        assert_eq!(read_file(c"/nonexistent", 10), None);
        assert_eq!(getpid(), std::process::id());
    }
}
