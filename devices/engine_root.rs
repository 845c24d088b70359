// SPDX-License-Identifier: MIT OR Apache-2.0
//! Engine roots: folders that `lighter setup` makes of a distribution's packages, with their own C library, and how a program
//! is started with the libraries in one.
//!
//! A process for an engine root is started through the root's own loader, because the libraries in it may need a newer C
//! library than the system's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The multiarch triplet and the loader of this architecture, as in Debian.
#[cfg(target_arch = "x86_64")]
pub(crate) const PLATFORM: (&str, &str) = ("x86_64-linux-gnu", "ld-linux-x86-64.so.2");
#[cfg(target_arch = "aarch64")]
pub(crate) const PLATFORM: (&str, &str) = ("aarch64-linux-gnu", "ld-linux-aarch64.so.1");

/// A dynamic loader and where it finds libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loader {
    /// The loader program.
    pub program: PathBuf,
    /// Folders with libraries, for its `--library-path`.
    pub library_path: OsString,
}

impl Loader {
    /// The loader of an engine root; `None` when it has none.
    #[must_use]
    pub fn of_root(root: &Path) -> Option<Self> {
        let (_, loader) = PLATFORM;
        let libraries = library_folder(root);
        let places = ["lib64", "usr/lib64", "lib", "usr/lib"].map(|place| root.join(place).join(loader));
        let program = places.into_iter().chain([libraries.join(loader)]).find(|path| path.is_file())?;
        // Drivers of the host that no package can bring, such as NVIDIA's, are found by the loader's own search.
        let mut library_path = libraries.clone().into_os_string();
        for place in ["blas", "lapack"] {
            let folder = libraries.join(place);
            if folder.is_dir() {
                library_path.push(":");
                library_path.push(folder);
            }
        }
        Some(Self { program, library_path })
    }
}

/// The folder of an engine root's libraries.
#[must_use]
pub fn library_folder(root: &Path) -> PathBuf {
    root.join("usr/lib").join(PLATFORM.0)
}

/// Folders in which a system keeps its libraries, the likeliest first. `system` is the folder that stands for `/`.
pub(crate) fn system_library_folders(system: &Path) -> Vec<PathBuf> {
    let (triplet, _) = PLATFORM;
    let usual = [
        format!("usr/local/lib/{triplet}"),
        "usr/local/lib".to_owned(),
        format!("usr/lib/{triplet}"),
        "usr/lib64".to_owned(),
        "usr/lib".to_owned(),
    ];
    usual.iter().map(|place| system.join(place)).chain(crate::system::loader_folders(system)).collect()
}

/// The command that starts `program` with this loader, or in the ordinary way, in an environment of these variables alone.
#[must_use]
pub fn command(program: &Path, loader: Option<&Loader>, environment: &[(String, String)]) -> Command {
    let mut command = match loader {
        Some(loader) => {
            let mut command = Command::new(&loader.program);
            command.arg("--library-path").arg(&loader.library_path).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
    command
}

/// Descriptions of Vulkan drivers for a process in an engine root: the root's own, and the host's NVIDIA driver. The host's
/// Mesa is left out: it is built against the host's libraries.
pub(crate) fn vulkan_drivers(root: &Path, system: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for place in ["etc/vulkan/icd.d", "usr/share/vulkan/icd.d"] {
        files.extend(driver_files(&root.join(place)));
        let is_nvidia =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains("nvidia"));
        files.extend(driver_files(&system.join(place)).into_iter().filter(is_nvidia));
    }
    files
}

/// Descriptions of Vulkan drivers in a folder, in the order of their names.
pub(crate) fn driver_files(folder: &Path) -> Vec<PathBuf> {
    let entries: Vec<_> =
        std::fs::read_dir(folder).map(|entries| entries.flatten().collect()).unwrap_or_default();
    let mut files: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files
}

/// Paths as the Vulkan loader's variables have them.
pub(crate) fn joined(files: &[PathBuf]) -> String {
    files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":")
}
