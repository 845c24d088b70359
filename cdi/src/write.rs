// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes and removes spec files so that no reader ever sees half of one.
//!
//! The temporary file lies in the spec directory itself: engines that watch the directory do not notice
//! a rename from elsewhere, and a name that ends neither in `.json` nor in `.yaml` is no spec to them. A
//! file that is already right is left alone, so that nothing wakes up for it. Refuses invalid specs.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::spec::Spec;
use crate::validate::ValidateError;

/// Everybody may read a spec: rootless engines read it as their user.
const MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;
/// Names left behind by earlier crashes are skipped; this many in a row is a fault.
const ATTEMPTS: u32 = 64;

/// What [`write_spec`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The file is new, or has new content.
    Changed,
    /// The file had exactly this content already and was not touched.
    Unchanged,
}

/// Why a spec file was not written or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The spec is not valid.
    #[error("the spec for {path} is not valid")]
    Invalid {
        /// The file it was meant for.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: ValidateError,
    },
    /// The file name is no plain `NAME.json`.
    #[error("{name:?} cannot be a spec file: use a plain file name that ends in .json")]
    FileName {
        /// The name.
        name: String,
    },
    /// The spec cannot be expressed as JSON.
    #[error("the spec for {path} cannot be encoded")]
    Encode {
        /// The file it was meant for.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The file system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl WriteError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// Writes `spec` as `directory/file_name`, making the directory if needed.
///
/// # Errors
/// The spec is invalid, the name is not `NAME.json`, or the file system refuses; the old file then stands.
pub fn write_spec(directory: &Path, file_name: &str, spec: &Spec) -> Result<Written, WriteError> {
    let path = spec_path(directory, file_name)?;
    spec.validate().map_err(|source| WriteError::Invalid { path: path.clone(), source })?;
    let content = spec.to_json().map_err(|source| WriteError::Encode { path: path.clone(), source })?;
    if is_current(&path, &content) {
        return Ok(Written::Unchanged);
    }
    make_directory(directory)?;
    let (mut file, temporary) = create_temporary(directory, file_name)?;
    let result = fill(&mut file, &content, &temporary)
        .and_then(|()| fs::rename(&temporary, &path).map_err(WriteError::io("rename a new file to", &path)));
    if let Err(error) = result {
        // The error that matters is the first one; a leftover is harmless, no reader takes it for a spec.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    sync_directory(directory)?;
    Ok(Written::Changed)
}

/// Removes `directory/file_name`; true if it was there.
///
/// # Errors
/// The name is not `NAME.json`, or the file system refuses.
pub fn remove_spec(directory: &Path, file_name: &str) -> Result<bool, WriteError> {
    let path = spec_path(directory, file_name)?;
    match fs::remove_file(&path) {
        Ok(()) => sync_directory(directory).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(WriteError::io("remove", &path)(error)),
    }
}

fn spec_path(directory: &Path, file_name: &str) -> Result<PathBuf, WriteError> {
    let plain = !file_name.contains(['/', '\0']) && file_name.len() > ".json".len();
    if plain && file_name.ends_with(".json") {
        Ok(directory.join(file_name))
    } else {
        Err(WriteError::FileName { name: file_name.to_owned() })
    }
}

/// True if the path is a regular file (no link) with this content and mode. Any doubt means false.
fn is_current(path: &Path, content: &[u8]) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else { return false };
    metadata.is_file()
        && metadata.permissions().mode() & 0o7777 == MODE
        && u64::try_from(content.len()).is_ok_and(|length| length == metadata.len())
        && fs::read(path).is_ok_and(|old| old == content)
}

fn make_directory(directory: &Path) -> Result<(), WriteError> {
    if directory.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(directory).map_err(WriteError::io("make the directory", directory))?;
    // The umask may have taken away what other users need to find the specs.
    fs::set_permissions(directory, fs::Permissions::from_mode(DIRECTORY_MODE))
        .map_err(WriteError::io("set the mode of the directory", directory))
}

fn create_temporary(directory: &Path, file_name: &str) -> Result<(File, PathBuf), WriteError> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    for _ in 0..ATTEMPTS {
        let mut name = OsString::from(format!(".{file_name}."));
        name.push(format!("{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let path = directory.join(name);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(WriteError::io("create a temporary file in", directory)(error)),
        }
    }
    Err(WriteError::io("create a temporary file in", directory)(io::ErrorKind::AlreadyExists.into()))
}

fn fill(file: &mut File, content: &[u8], path: &Path) -> Result<(), WriteError> {
    file.write_all(content)
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(MODE)))
        .and_then(|()| file.sync_all())
        .map_err(WriteError::io("write", path))
}

/// Without this the rename itself may be lost in a crash, leaving the old file.
fn sync_directory(directory: &Path) -> Result<(), WriteError> {
    File::open(directory)
        .and_then(|handle| handle.sync_all())
        .map_err(WriteError::io("sync the directory", directory))
}
