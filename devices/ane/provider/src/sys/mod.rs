// SPDX-License-Identifier: MIT OR Apache-2.0
//! What this library asks of the kernel, without a C library: descriptors, sockets, shared memory, waiting, time.
//!
//! Everything that can be interrupted is tried again. Refuses nothing on its own; errors are the kernel's numbers.

pub(crate) mod lock;
pub(crate) mod memory;
pub(crate) mod raw;
pub(crate) mod socket;
pub(crate) mod wait;

mod descriptor;

pub(crate) use descriptor::{Descriptor, getpid, read_file, write_to_stderr};

use core::fmt;

/// The kernel's number of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    pub(crate) const INTERRUPTED: Self = Self(4);
    pub(crate) const AGAIN: Self = Self(11);
    pub(crate) const NO_MEMORY: Self = Self(12);
    pub(crate) const INVALID: Self = Self(22);
    /// This library's own: the peer closed the stream.
    pub(crate) const HUNG_UP: Self = Self(104);
    pub(crate) const TIMED_OUT: Self = Self(110);
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            2 => "no such file",
            12 => "no memory",
            13 => "permission denied",
            20 => "not a folder",
            22 => "invalid argument",
            24 => "no descriptors left",
            32 | 104 => "the other side closed the connection",
            110 => "no answer in time",
            111 => "nobody listens there",
            number => return write!(f, "error {number} of the kernel"),
        })
    }
}

/// A system call's result as a value or an error.
pub(crate) fn checked(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno(i32::try_from(result.wrapping_neg()).unwrap_or(i32::MAX)))
}

/// Repeats what a signal interrupted.
pub(crate) fn uninterrupted(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        match checked(call()) {
            Err(Errno::INTERRUPTED) => {}
            result => return result,
        }
    }
}
