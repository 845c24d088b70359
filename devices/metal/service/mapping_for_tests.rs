// SPDX-License-Identifier: MIT OR Apache-2.0
//! Maps a file and asks the kernel how it is mapped. Tests only.
#![allow(unsafe_code)]

use std::fs::File;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of huge pages in a read-only mapping of the first `len` bytes of `file`, all of them touched.
pub(super) fn huge_bytes(file: &File, len: usize) -> u64 {
    // SAFETY: a new mapping, read below within its length and unmapped at the end.
    let start =
        unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) }.unwrap();
    let mut sum = 0u64;
    for offset in (0..len).step_by(4096) {
        // SAFETY: within the mapping; the file is `len` bytes long.
        sum += u64::from(unsafe { start.cast::<u8>().add(offset).read_volatile() });
    }
    assert!(sum > 0);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    // SAFETY: the mapping made above; nothing refers to it any more.
    unsafe { munmap(start, len) }.unwrap();
    let head = format!("{:x}-", start as usize);
    let kib: u64 = smaps
        .lines()
        .skip_while(|line| !line.starts_with(&head))
        .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    kib * 1024
}
