// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes listening unix sockets: the hook's, and those of devices.
//!
//! A socket appears under its name only when it listens and everybody may connect; the file of a daemon that has gone is
//! replaced, and stays until then. Refuses a name that another program answers at.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Why a socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another program answers there.
    #[error(
        "{path} is answered by another program; stop it, or give this daemon another directory for its sockets"
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The file system or the kernel refused.
    #[error("{path}: cannot {what}")]
    Make {
        /// What was touched.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl SocketError {
    fn at(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Make { path, what, source }
    }
}

/// Makes a directory for a socket that users of every kind reach: nobody else writes to it, all may pass.
pub(crate) fn make_directory(directory: &Path) -> Result<(), SocketError> {
    let make = SocketError::at(directory, "make the socket's directory");
    fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(make)?;
    let used = || SocketError::at(directory, "use it as the directory of a socket");
    // A link would let whoever can move its target choose what containers see.
    let found = fs::symlink_metadata(directory).map_err(used())?;
    if !found.is_dir() {
        return Err(used()(io::ErrorKind::NotADirectory.into()));
    }
    // Whatever the umask was.
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).map_err(used())
}

/// Listens at `path`, non-blocking; who may connect is decided by who connects, so everybody may.
pub(crate) fn listen_at(path: &Path, kind: SocketType, backlog: i32) -> Result<OwnedFd, SocketError> {
    let at = |what| move |errno: Errno| SocketError::at(path, what)(errno.into());
    let make = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, kind, flags, None).map_err(at("make a socket"))
    };
    const NAME: &str = "use the path as a socket's name";
    let address = SocketAddrUnix::new(path).map_err(at(NAME))?;
    // One that is too busy to answer, or of another type, is somebody's as well.
    if matches!(connect(&make()?, &address), Ok(()) | Err(Errno::WOULDBLOCK | Errno::PROTOTYPE)) {
        return Err(SocketError::InUse { path: path.into() });
    }
    let new = path.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(SocketError::at(&new, "remove an old socket")(error));
        }
        _ => {}
    }
    let socket = make()?;
    let new_address = SocketAddrUnix::new(&new).map_err(at(NAME))?;
    bind(&socket, &new_address).map_err(at("make the socket's file"))?;
    listen(&socket, backlog).map_err(at("listen"))?;
    let everybody = fs::Permissions::from_mode(0o666);
    fs::set_permissions(&new, everybody).map_err(SocketError::at(path, "let every user connect"))?;
    fs::rename(&new, path).map_err(SocketError::at(path, "put the socket in its place"))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_socket_replaces_the_file_of_one_that_has_gone_and_no_living_one() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("a/b");
        make_directory(&directory).unwrap();
        let path = directory.join("socket");
        drop(UnixListener::bind(&path).unwrap());
        // What a daemon that was killed in between leaves.
        drop(UnixListener::bind(path.with_extension("new")).unwrap());
        assert!(UnixStream::connect(&path).is_err());
        let socket = listen_at(&path, SocketType::STREAM, 4).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!((mode(&directory), mode(&path)), (0o755, 0o666));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        for other in [SocketType::STREAM, SocketType::SEQPACKET] {
            let error = listen_at(&path, other, 4).unwrap_err();
            assert!(matches!(&error, SocketError::InUse { path: of } if *of == path), "{error}");
        }
        drop(socket);
        listen_at(&path, SocketType::SEQPACKET, 4).unwrap();
    }

    #[test]
    fn a_socket_with_a_full_queue_is_in_use_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _busy = listen_at(&path, SocketType::STREAM, 0).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        assert!(matches!(listen_at(&path, SocketType::STREAM, 0), Err(SocketError::InUse { .. })));
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (link, file) = (folder.path().join("link"), folder.path().join("file"));
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        fs::write(&file, "").unwrap();
        for directory in [&link, &file] {
            let error = make_directory(directory).unwrap_err().to_string();
            assert!(error.contains(&directory.display().to_string()), "{error}");
        }
        let long = folder.path().join("x".repeat(200));
        let error = listen_at(&long, SocketType::STREAM, 4).unwrap_err().to_string();
        assert!(error.contains("xxx") && error.contains("name"), "{error}");
    }
}
