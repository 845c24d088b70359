// SPDX-License-Identifier: MIT OR Apache-2.0
//! Linux namespaces: naming one, asking who owns it, entering one for a moment.
//!
//! The kernel answers "who owns this" and "where does this socket live" only through ioctls, hence the unsafe code.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::ioctl::{Getter, Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

/// Names a namespace for as long as something keeps it alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NsId {
    dev: u64,
    ino: u64,
}

impl NsId {
    /// The namespace behind a descriptor from `/proc/PID/ns/*`.
    ///
    /// # Errors
    /// When the descriptor cannot be asked.
    pub fn of(namespace: impl AsFd) -> io::Result<Self> {
        Ok(Self::from_stat(&rustix::fs::fstat(namespace)?))
    }

    pub(crate) const fn from_stat(stat: &rustix::fs::Stat) -> Self {
        Self { dev: stat.st_dev, ino: stat.st_ino }
    }

    #[cfg(test)]
    pub(crate) const fn fake(ino: u64) -> Self {
        Self { dev: 4, ino }
    }
}

impl fmt::Display for NsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ino)
    }
}

const NS_GET_OWNER_UID: Opcode = 0xb704;
const SIOCGSKNS: Opcode = 0x894c;

/// An ioctl without argument whose result is a new descriptor.
struct NewDescriptor<const OPCODE: Opcode>;

// SAFETY: the one opcode used with it takes no argument and returns a descriptor that nobody else owns.
unsafe impl<const OPCODE: Opcode> Ioctl for NewDescriptor<OPCODE> {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the call succeeded, so its result is a new descriptor of this process.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

/// The uid, as this process sees it, of who made a user namespace.
pub(crate) fn user_ns_owner(user_namespace: impl AsFd) -> io::Result<u32> {
    // SAFETY: NS_GET_OWNER_UID writes one uid_t.
    let uid: u32 = unsafe { ioctl(user_namespace, Getter::<NS_GET_OWNER_UID, u32>::new()) }?;
    Ok(uid)
}

/// The network namespace in which a socket lives; of a unix socket that was accepted, the one of who connected.
pub(crate) fn namespace_of_socket(socket: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: SIOCGSKNS takes no argument and returns a descriptor of the namespace.
    Ok(unsafe { ioctl(socket, NewDescriptor::<SIOCGSKNS>) }?)
}

/// Names the network namespace in which a socket lives.
pub(crate) fn of_socket(socket: impl AsFd) -> io::Result<NsId> {
    NsId::of(namespace_of_socket(socket)?)
}

/// Moves the calling thread into a network namespace.
///
/// # Errors
/// When the kernel refuses it; it wants `CAP_SYS_ADMIN` over the namespace's owner.
pub fn enter_network(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

/// Runs `work` inside a network namespace, in a thread of its own that ends with it, so that no other
/// work ever runs there by mistake.
pub(crate) fn within_network<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("lighter-netns".into())
            .spawn_scoped(scope, move || {
                enter_network(namespace)?;
                work()
            })?
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace panicked")))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::net::{AddressFamily, SocketType, socket};

    use super::*;

    #[test]
    fn a_socket_tells_its_namespace_and_the_namespace_its_owner() {
        let own = File::open("/proc/self/ns/net").unwrap();
        let id = NsId::of(&own).unwrap();
        let here = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        assert_eq!(of_socket(here).unwrap(), id);
        assert_eq!(user_ns_owner(File::open("/proc/self/ns/user").unwrap()).unwrap(), 0);
        let inside = within_network(own.as_fd(), || NsId::of(File::open("/proc/thread-self/ns/net")?));
        assert_eq!(inside.unwrap(), id);
    }
}
