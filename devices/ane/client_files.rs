// SPDX-License-Identifier: MIT OR Apache-2.0
//! What lies in the device's folder in a container: lighter's provider for ONNX Runtime, and helpers for Python.

use std::path::{Path, PathBuf};

use super::edits::FOLDER;
use crate::client::{ClientFile, Content};
use crate::host::Host;

/// The provider's file, in `Host::plugin_dir` and in the device's folder.
const LIBRARY: &str = "liblighter_ane_ep.so";

/// The provider below the client folder.
#[must_use]
pub fn library_path() -> PathBuf {
    Path::new(FOLDER).join(LIBRARY)
}

/// Whether the provider is installed.
///
/// # Errors
/// Where it is missing, with what to do.
pub fn check(host: &Host) -> Result<(), super::locate::Missing> {
    let path = host.plugin_dir.join(LIBRARY);
    if path.is_file() {
        return Ok(());
    }
    Err(super::locate::Missing {
        reason: format!("lighter's provider for containers, {}, is not there", path.display()),
        remedy: format!(
            "install {LIBRARY} beside lighter, or name its folder with `lighter config set daemon.plugin_dir PATH`"
        ),
    })
}

/// The helpers for Python, beside the provider. The names of `python/`; the second value says which is a program.
const HELPERS: [(&str, bool, &str); 4] = [
    ("lighter-ane-check", true, include_str!("python/lighter-ane-check")),
    ("lighter_ane_check.py", false, include_str!("python/lighter_ane_check.py")),
    ("lighter_ane_auto.py", false, include_str!("python/lighter_ane_auto.py")),
    ("sitecustomize.py", false, include_str!("python/sitecustomize.py")),
];

/// The provider and the helpers, or nothing where the provider is not installed.
#[must_use]
pub fn files(host: &Host) -> Vec<ClientFile> {
    if check(host).is_err() {
        return Vec::new();
    }
    let content = Content::CopyOf(host.plugin_dir.join(LIBRARY));
    let mut files = vec![ClientFile { path: library_path(), content, executable: false }];
    files.extend(HELPERS.map(|(name, executable, text)| ClientFile {
        path: Path::new(FOLDER).join(name),
        content: Content::Bytes(text.as_bytes().to_vec()),
        executable,
    }));
    files
}
