// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which process connected a unix socket, as the kernel noted it at that moment.
//!
//! Neither question has a safe wrapper that takes "no process that you can see" for an answer, hence the unsafe code.
#![allow(unsafe_code)]

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::process::Pid;

/// A value that the kernel may fill with any bytes.
///
/// # Safety
/// Every bit pattern must be a value of the type.
unsafe trait Plain: Copy {}

// SAFETY: an integer.
unsafe impl Plain for RawFd {}
// SAFETY: a struct of three integers.
unsafe impl Plain for libc::ucred {}

fn socket_option<T: Plain>(socket: impl AsFd, option: i32) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::zeroed();
    let bytes = libc::socklen_t::try_from(size_of::<T>()).map_err(|_| Errno::INVAL)?;
    let mut got = bytes;
    // SAFETY: the kernel writes at most `got` bytes, the size of `value`, and the descriptor is open.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.as_mut_ptr().cast(),
            &raw mut got,
        )
    };
    if result != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    if got != bytes {
        return Err(Errno::PROTO);
    }
    // SAFETY: all of it is written, and zeroed before; any bits are a value.
    Ok(unsafe { value.assume_init() })
}

/// A pidfd of the process that connected (Linux 6.5 and later; `NOPROTOOPT` before).
pub(crate) fn pidfd(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    let fd: RawFd = socket_option(socket, libc::SO_PEERPIDFD)?;
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the call succeeded, so its result is a new descriptor of this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Who connected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Credentials {
    /// The process, which may have ended since; `None` when it lives out of sight.
    pub(crate) pid: Option<Pid>,
    /// Its user.
    pub(crate) uid: u32,
}

/// Who connected, by numbers.
pub(crate) fn of(socket: impl AsFd) -> Result<Credentials, Errno> {
    let credentials: libc::ucred = socket_option(socket, libc::SO_PEERCRED)?;
    Ok(Credentials { pid: Pid::from_raw(credentials.pid), uid: credentials.uid })
}
