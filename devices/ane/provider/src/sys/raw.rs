// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one way to the kernel: a system call by number. Linux on x86-64 and aarch64; refuses to build elsewhere.
#![allow(unsafe_code)]

use core::arch::asm;

/// A system call. What comes back is as the kernel gives it: a value, or minus an error number.
///
/// # Safety
/// As for the call itself: pointers among the arguments must be good for what the kernel does with them.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's convention on this processor; the caller answers for the arguments.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A system call. What comes back is as the kernel gives it: a value, or minus an error number.
///
/// # Safety
/// As for the call itself: pointers among the arguments must be good for what the kernel does with them.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) unsafe fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's convention on this processor; the caller answers for the arguments.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}

macro_rules! numbers {
    ($($(#[$attribute:meta])* $name:ident = $x86_64:literal, $aarch64:literal;)*) => {
        $($(#[$attribute])* pub(crate) const $name: usize = if cfg!(target_arch = "aarch64") { $aarch64 } else { $x86_64 };)*
    };
}

numbers! {
    READ = 0, 63;
    WRITE = 1, 64;
    CLOSE = 3, 57;
    MMAP = 9, 222;
    MUNMAP = 11, 215;
    SCHED_YIELD = 24, 124;
    MREMAP = 25, 216;
    GETPID = 39, 172;
    SOCKET = 41, 198;
    CONNECT = 42, 203;
    SENDMSG = 46, 211;
    RECVFROM = 45, 207;
    FCNTL = 72, 25;
    FTRUNCATE = 77, 46;
    FUTEX = 202, 98;
    CLOCK_GETTIME = 228, 113;
    #[cfg_attr(not(panic = "abort"), allow(dead_code))]
    EXIT_GROUP = 231, 94;
    OPENAT = 257, 56;
    PPOLL = 271, 73;
    MEMFD_CREATE = 319, 279;
}
