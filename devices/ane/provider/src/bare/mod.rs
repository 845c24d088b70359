// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a Rust library needs of a C library, for the build that has none (`panic = "abort"`): the memory functions that
//! the compiler calls, an allocator, and an end for what cannot go on.
//!
//! The symbols are hidden: the program around has its own of the same names. In other builds, which have the standard
//! library, all this is ordinary code under test.
#![allow(unsafe_code)]

pub(crate) mod copy;
pub(crate) mod heap;

#[cfg(panic = "abort")]
mod symbols {
    use core::arch::global_asm;

    use super::{copy, heap::Heap};
    use crate::sys::{raw, write_to_stderr};

    #[global_allocator]
    static HEAP: Heap = Heap::new();

    #[panic_handler]
    fn panicked(_: &core::panic::PanicInfo<'_>) -> ! {
        write_to_stderr(b"lighter-ane: internal error, the program ends\n");
        loop {
            // SAFETY: ends the process; as an abort would be seen by a shell.
            let _ = unsafe { raw::call(raw::EXIT_GROUP, [134, 0, 0, 0, 0, 0]) };
        }
    }

    /// Named in the standard library's object code; never called where panics abort.
    #[unsafe(no_mangle)]
    extern "C" fn rust_eh_personality() {}

    /// As `rust_eh_personality`.
    #[unsafe(no_mangle)]
    extern "C" fn _Unwind_Resume() -> ! {
        panicked_twice()
    }

    fn panicked_twice() -> ! {
        loop {
            // SAFETY: ends the process.
            let _ = unsafe { raw::call(raw::EXIT_GROUP, [134, 0, 0, 0, 0, 0]) };
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        // SAFETY: C's own contract: both hold as many bytes and do not overlap.
        unsafe { copy::forward(to, from, bytes) };
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        // SAFETY: C's own contract: both hold as many bytes.
        unsafe { copy::either_way(to, from, bytes) };
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, byte: i32, bytes: usize) -> *mut u8 {
        let [byte, ..] = byte.to_le_bytes();
        // SAFETY: C's own contract: it holds as many bytes.
        unsafe { copy::fill(to, byte, bytes) };
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
        // SAFETY: C's own contract: both hold as many bytes.
        unsafe { copy::compare(a, b, bytes) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
        // SAFETY: as for memcmp.
        unsafe { copy::compare(a, b, bytes) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn strlen(text: *const u8) -> usize {
        // SAFETY: C's own contract: a text that ends in a zero byte.
        unsafe { copy::length(text) }
    }

    global_asm!(
        ".hidden memcpy",
        ".hidden memmove",
        ".hidden memset",
        ".hidden memcmp",
        ".hidden bcmp",
        ".hidden strlen",
        ".hidden rust_eh_personality",
        ".hidden _Unwind_Resume",
    );
}
