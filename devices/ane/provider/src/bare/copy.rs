// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copying, filling and comparing memory, in assembly or by volatile reads: in plain Rust the compiler would see what
//! it is and call the very function that is being written.
#![allow(unsafe_code)]
#![cfg_attr(not(panic = "abort"), allow(dead_code, reason = "under test only"))]

use core::arch::asm;

/// # Safety
/// Both hold so many bytes; `to` does not begin within `from`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn forward(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller's promise; the processor counts upwards, as C's convention has it.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") bytes => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// Both hold so many bytes; `to` does not end within `from`.
#[cfg(target_arch = "x86_64")]
unsafe fn backward(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller's promise. In words: from the end, eight bytes at a time, which counting down by the
    // processor's own instruction is far too slow for.
    unsafe {
        asm!(
            "2:", "cmp {left}, 8", "jb 3f",
            "mov {word}, [{from} + {left} - 8]", "mov [{to} + {left} - 8], {word}", "sub {left}, 8", "jmp 2b",
            "3:", "test {left}, {left}", "jz 4f",
            "mov {word:l}, [{from} + {left} - 1]", "mov [{to} + {left} - 1], {word:l}", "dec {left}", "jmp 3b",
            "4:",
            left = inout(reg) bytes => _, from = in(reg) from, to = in(reg) to, word = out(reg_abcd) _,
            options(nostack),
        );
    }
}

/// # Safety
/// It holds so many bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn fill(to: *mut u8, byte: u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "rep stosb",
            inout("rcx") bytes => _, inout("rdi") to => _, in("al") byte,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// Both hold so many bytes; `to` does not begin within `from`.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn forward(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller's promise. Sixteen bytes at a time, then the rest.
    unsafe {
        asm!(
            "2:", "cmp {left}, #16", "b.lo 3f",
            "ldp {a}, {b}, [{from}], #16", "stp {a}, {b}, [{to}], #16", "sub {left}, {left}, #16", "b 2b",
            "3:", "cbz {left}, 4f",
            "ldrb {a:w}, [{from}], #1", "strb {a:w}, [{to}], #1", "sub {left}, {left}, #1", "b 3b",
            "4:",
            left = inout(reg) bytes => _, from = inout(reg) from => _, to = inout(reg) to => _,
            a = out(reg) _, b = out(reg) _,
            options(nostack),
        );
    }
}

/// # Safety
/// Both hold so many bytes; `to` does not end within `from`.
#[cfg(target_arch = "aarch64")]
unsafe fn backward(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller's promise. From the end, sixteen bytes at a time, then the rest.
    unsafe {
        asm!(
            "add {from}, {from}, {left}", "add {to}, {to}, {left}",
            "2:", "cmp {left}, #16", "b.lo 3f",
            "ldp {a}, {b}, [{from}, #-16]!", "stp {a}, {b}, [{to}, #-16]!", "sub {left}, {left}, #16", "b 2b",
            "3:", "cbz {left}, 4f",
            "ldrb {a:w}, [{from}, #-1]!", "strb {a:w}, [{to}, #-1]!", "sub {left}, {left}, #1", "b 3b",
            "4:",
            left = inout(reg) bytes => _, from = inout(reg) from => _, to = inout(reg) to => _,
            a = out(reg) _, b = out(reg) _,
            options(nostack),
        );
    }
}

/// # Safety
/// It holds so many bytes.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn fill(to: *mut u8, byte: u8, bytes: usize) {
    let word = u64::from_ne_bytes([byte; 8]);
    // SAFETY: the caller's promise. Sixteen bytes at a time, then the rest.
    unsafe {
        asm!(
            "2:", "cmp {left}, #16", "b.lo 3f",
            "stp {word}, {word}, [{to}], #16", "sub {left}, {left}, #16", "b 2b",
            "3:", "cbz {left}, 4f",
            "strb {word:w}, [{to}], #1", "sub {left}, {left}, #1", "b 3b",
            "4:",
            left = inout(reg) bytes => _, to = inout(reg) to => _, word = in(reg) word,
            options(nostack),
        );
    }
}

/// # Safety
/// Both hold so many bytes; they may overlap.
pub(crate) unsafe fn either_way(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller's promise; what overlaps is copied in the order that reads before it writes.
    unsafe {
        if to.addr().wrapping_sub(from.addr()) >= bytes {
            forward(to, from, bytes);
        } else {
            backward(to, from, bytes);
        }
    }
}

/// Below, at or above 0, as the first byte in which they differ.
///
/// # Safety
/// Both hold so many bytes.
pub(crate) unsafe fn compare(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    let mut at = 0;
    while at < bytes {
        // SAFETY: the caller's promise.
        let (left, right) = unsafe { (a.add(at).read_volatile(), b.add(at).read_volatile()) };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
        at += 1;
    }
    0
}

/// # Safety
/// A text that ends in a zero byte.
pub(crate) unsafe fn length(text: *const u8) -> usize {
    let mut length = 0;
    // SAFETY: the caller's promise.
    while unsafe { text.add(length).read_volatile() } != 0 {
        length += 1;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_length_is_copied_to_any_place() {
        for bytes in (0..70).chain([255, 4096, 4099]) {
            for (from, to) in [(0, 0), (3, 8), (8, 3), (1, 2), (0, 5000), (5000, 0)] {
                let start: Vec<u8> = (0..10_000_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
                let mut moved = start.clone();
                let pointer = moved.as_mut_ptr();
                // SAFETY: within ten thousand bytes.
                unsafe { either_way(pointer.add(to), pointer.add(from), bytes) };
                let mut expected = start;
                expected.copy_within(from..from + bytes, to);
                assert!(moved == expected, "{bytes} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    fn filling_stops_where_it_should() {
        for bytes in 0..70 {
            let mut filled = [1_u8; 80];
            // SAFETY: within eighty bytes.
            unsafe { fill(filled.as_mut_ptr(), 7, bytes) };
            assert!(
                filled[..bytes].iter().all(|byte| *byte == 7)
                    && filled[bytes..].iter().all(|byte| *byte == 1)
            );
        }
    }

    #[test]
    fn comparing_finds_the_first_difference() {
        // SAFETY: as long as said.
        unsafe {
            assert_eq!(compare(b"abc".as_ptr(), b"abd".as_ptr(), 2), 0);
            assert_eq!(compare(b"abc".as_ptr(), b"abd".as_ptr(), 3), -1);
            assert_eq!(compare(b"\xff".as_ptr(), b"\x01".as_ptr(), 1), 254);
            assert_eq!(length(c"four".as_ptr().cast()), 4);
        }
    }
}
