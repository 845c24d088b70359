// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory files for shared weights, which workers can read and not change.
//!
//! - As root, with workers of other users: files on a tmpfs of our own with huge pages, whatever the host's
//!   setting for shared memory is. The tmpfs is attached to no folder, and goes with the process.
//! - Else: memfds, sealed once they are filled, with ordinary pages.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};

/// Why there is no room for a weight.
#[derive(Debug, thiserror::Error)]
pub(super) enum BackingError {
    /// No file.
    #[error("memory file of {len} bytes could not be made")]
    Create {
        /// Bytes.
        len: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// No room in it.
    #[error("memory file could not be written")]
    Write(#[source] std::io::Error),
    /// It could not be closed to writers.
    #[error("memory file could not be made read-only")]
    Finish(#[source] std::io::Error),
}

/// Where memory files come from.
#[derive(Debug)]
pub(super) enum Backing {
    /// The root of a tmpfs.
    Tmpfs(OwnedFd),
    /// memfds.
    Memfd,
}

impl Backing {
    /// The best kind that this process can have. `others_only`: whether all who get descriptors run as other users.
    pub(super) fn open(others_only: bool) -> Self {
        if !others_only {
            // The same user could open a read-only descriptor again for writing; seals hold against that.
            return Self::Memfd;
        }
        match mount_tmpfs() {
            Ok(root) => Self::Tmpfs(root),
            Err(error) => {
                tracing::info!(%error, "no tmpfs for shared weights: ordinary pages are used");
                Self::Memfd
            }
        }
    }

    pub(super) fn describe(&self) -> &'static str {
        match self {
            Self::Tmpfs(_) => "tmpfs with huge pages",
            Self::Memfd => "memfd",
        }
    }

    /// A new file of `len` bytes.
    pub(super) fn create(&self, len: u64) -> Result<Target<'_>, BackingError> {
        let failed = |errno: rustix::io::Errno| BackingError::Create { len, source: errno.into() };
        let file = match self {
            Self::Tmpfs(root) => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                rustix::fs::openat(root, ".", flags, Mode::from_raw_mode(0o400)).map_err(failed)?
            }
            Self::Memfd => rustix::fs::memfd_create(
                "lighter-weight",
                MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL,
            )
            .or_else(|errno| match errno {
                // Kernels before 6.3 do not know the flag.
                rustix::io::Errno::INVAL => rustix::fs::memfd_create(
                    "lighter-weight",
                    MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
                ),
                errno => Err(errno),
            })
            .map_err(failed)?,
        };
        rustix::fs::ftruncate(&file, len).map_err(failed)?;
        Ok(Target { backing: self, file })
    }
}

/// A file that is being filled.
#[derive(Debug)]
pub(super) struct Target<'a> {
    backing: &'a Backing,
    file: OwnedFd,
}

impl Target<'_> {
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> Result<(), BackingError> {
        let mut rest = bytes;
        let mut offset = offset;
        while !rest.is_empty() {
            let put = rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, rest, offset))
                .map_err(|errno| BackingError::Write(errno.into()))?;
            if put == 0 {
                return Err(BackingError::Write(std::io::ErrorKind::WriteZero.into()));
            }
            rest = rest.get(put..).unwrap_or_default();
            offset += put as u64;
        }
        Ok(())
    }

    /// A descriptor that only reads; nobody can write any more.
    pub(super) fn finish(self) -> Result<OwnedFd, BackingError> {
        let failed = |errno: rustix::io::Errno| BackingError::Finish(errno.into());
        if matches!(self.backing, Backing::Memfd) {
            let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&self.file, seals).map_err(failed)?;
        }
        open_again(&self.file)
    }
}

/// A read-only descriptor of a file, with a position of its own: what is handed to one worker must not be moved by
/// another.
pub(super) fn open_again(file: &OwnedFd) -> Result<OwnedFd, BackingError> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| BackingError::Finish(errno.into()))
}

fn mount_tmpfs() -> std::io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Huge pages as far as a file fills them: "always" would give one to each of a model's many small tensors.
    fsconfig_set_string(&context, "huge", "within_size")?;
    // The service's own account is the limit; the tmpfs' default would be half of the memory.
    fsconfig_set_string(&context, "size", "0")?;
    fsconfig_set_string(&context, "mode", "0700")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(backing: &Backing, len: u64) -> OwnedFd {
        let target = backing.create(len).unwrap();
        target.write(&vec![7; usize::try_from(len).unwrap()], 0).unwrap();
        target.finish().unwrap()
    }

    fn cannot_be_written(file: &OwnedFd) {
        assert!(rustix::io::pwrite(file, b"x", 0).is_err());
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = rustix::fs::openat(CWD, path, OFlags::RDWR, Mode::empty());
        // Root may open a tmpfs' file again; workers are not root. A sealed one refuses the write.
        if let (Ok(again), false) = (again, rustix::process::geteuid().is_root()) {
            assert!(rustix::io::pwrite(&again, b"x", 0).is_err());
        }
    }

    #[test]
    fn a_sealed_memfd_takes_no_write_by_any_descriptor() {
        let file = filled(&Backing::Memfd, 5000);
        cannot_be_written(&file);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        if let Ok(again) = rustix::fs::openat(CWD, path, OFlags::RDWR, Mode::empty()) {
            assert!(rustix::io::pwrite(&again, b"x", 0).is_err());
            assert!(rustix::fs::ftruncate(&again, 1).is_err());
        }
    }

    #[test]
    fn the_tmpfs_gives_huge_pages() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: a tmpfs cannot be mounted");
            return;
        }
        let Ok(root) = mount_tmpfs() else {
            eprintln!("needs CAP_SYS_ADMIN: a tmpfs cannot be mounted");
            return;
        };
        let file = filled(&Backing::Tmpfs(root), 8 << 20);
        cannot_be_written(&file);
        assert!(huge_bytes(&file) >= 2 << 20, "no huge page in the file");
    }

    #[test]
    fn a_small_weight_takes_no_more_than_its_size() {
        let Ok(root) = mount_tmpfs() else {
            eprintln!("needs CAP_SYS_ADMIN: a tmpfs cannot be mounted");
            return;
        };
        let file = filled(&Backing::Tmpfs(root), 600_000);
        let taken_bytes = rustix::fs::fstat(&file).unwrap().st_blocks * 512;
        assert!(taken_bytes <= 700_000, "{taken_bytes}");
    }

    /// Huge pages in a mapping of the file, as the kernel counts them.
    fn huge_bytes(file: &OwnedFd) -> u64 {
        let file = std::fs::File::from(file.try_clone().unwrap());
        crate::metal::service::mapping_for_tests::huge_bytes(&file, 8 << 20)
    }
}
