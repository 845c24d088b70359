// SPDX-License-Identifier: MIT OR Apache-2.0
//! What lies in the device's folder in a container: lighter's Python package, unpacked and as wheels.
//!
//! `python/` is for programs that name it in `PYTHONPATH`, `wheels/` for pip. Both are made beside lighter's libraries
//! for containers, with the package for the host's Python:
//!
//! ```text
//! PLUGIN_DIR/mps/python/lighter_mps/…
//! PLUGIN_DIR/mps/wheels/lighter_mps-*.whl
//! PLUGIN_DIR/mps/lighter-mps-host.pyz
//! ```

use std::path::{Path, PathBuf};

use super::edits::FOLDER;
use super::locate::Missing;
use crate::client::{ClientFile, Content};
use crate::host::Host;

/// Folder of the wheels in the device's folder.
pub const WHEELS: &str = "wheels";
/// Folder of the unpacked package in the device's folder.
pub const PYTHON: &str = "python";
/// lighter's package for the host's Python, beside the two.
const HOST_PACKAGE: &str = "lighter-mps-host.pyz";
/// Folders below the package that are looked into.
const MAX_DEPTH: usize = 8;

/// The file without which a container has nothing to import, below the client folder.
#[must_use]
pub fn package_file() -> PathBuf {
    Path::new(FOLDER).join(PYTHON).join("lighter_mps/__init__.py")
}

/// lighter's package for the host's Python.
#[must_use]
pub fn host_package(plugin_dir: &Path) -> PathBuf {
    plugin_dir.join(FOLDER).join(HOST_PACKAGE)
}

/// Whether the packages are installed.
///
/// # Errors
/// Where one is missing, with what to do.
pub fn check(host: &Host) -> Result<(), Missing> {
    let package = host.plugin_dir.join(package_file());
    if package.is_file() {
        return Ok(());
    }
    Err(Missing {
        reason: format!("lighter's Python package for containers, {}, is not there", package.display()),
        remedy: format!(
            "install the folder {FOLDER} of lighter's release beside lighter, or name the folder that it lies in with \
             `lighter config set daemon.plugin_dir PATH`"
        ),
    })
}

/// The package and the wheels, or nothing where they are not installed.
#[must_use]
pub fn files(host: &Host) -> Vec<ClientFile> {
    if check(host).is_err() {
        return Vec::new();
    }
    let mut files = Vec::new();
    for folder in [WHEELS, PYTHON] {
        add(&host.plugin_dir, &Path::new(FOLDER).join(folder), MAX_DEPTH, &mut files);
    }
    files
}

/// Adds what is below a folder, but for what Python has left there itself.
fn add(root: &Path, folder: &Path, depth: usize, files: &mut Vec<ClientFile>) {
    let Ok(entries) = std::fs::read_dir(root.join(folder)) else { return };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| folder.join(entry.file_name())).collect();
    paths.sort();
    for path in paths {
        let from = root.join(&path);
        if from.is_file() {
            files.push(ClientFile { path, content: Content::CopyOf(from), executable: false });
        } else if from.is_dir() && depth > 0 && !path.ends_with("__pycache__") {
            add(root, &path, depth - 1, files);
        }
    }
}
