// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where ONNX Runtime's libraries are on this host. Looks at files only.
//!
//! In this order: the library that the configuration names, alone; what `lighter setup ane` fetched; the system's own;
//! what pip has put into the system's Python. Two libraries can be in use at one time, because providers come in
//! builds of their own: one with OpenVINO beside the plain one.

use std::path::{Path, PathBuf};

pub use crate::host::Missing;

use super::config::AneConfig;

/// Folders of `lighter setup ane` below the engine root, in the order of preference for the processor.
pub const SETUP_FOLDERS: [&str; 2] = ["onnxruntime", "openvino"];
/// Oldest minor version 1.x whose C interface has all that is used.
const OLDEST_MINOR: u64 = 24;
#[cfg(target_arch = "x86_64")]
const TRIPLET: &str = "x86_64-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TRIPLET: &str = "aarch64-linux-gnu";

/// One libonnxruntime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// The file.
    pub path: PathBuf,
    /// Folders that a process with it must be able to read.
    pub folders: Vec<PathBuf>,
}

/// Finds the libraries, the one for the processor first; never empty. `system` is the folder that stands for `/` (for
/// tests).
///
/// # Errors
/// When there is none, with what to do.
pub fn locate(config: &AneConfig, system: &Path) -> Result<Vec<Library>, Missing> {
    if let Some(path) = &config.library {
        if !path.is_file() {
            return Err(Missing {
                reason: format!("ane.library = {:?}: there is no such file", path.display().to_string()),
                remedy: "correct the setting, or remove it to have lighter search".to_owned(),
            });
        }
        return Ok(vec![library(path.clone(), system)]);
    }
    let fetched = SETUP_FOLDERS.iter().filter_map(|folder| library_in(&config.engine_root.join(folder)));
    let mut found: Vec<PathBuf> = fetched.collect();
    if found.is_empty() {
        found.extend(places(system).iter().find_map(|folder| library_in(folder)));
    }
    if found.is_empty() {
        return Err(Missing {
            reason: format!(
                "ONNX Runtime 1.{OLDEST_MINOR} or newer (libonnxruntime.so.1.*) is neither in {} nor in the system's \
                 library folders",
                config.engine_root.display()
            ),
            remedy: "run `lighter setup ane`, or name a library with `lighter config set ane.library PATH`"
                .to_owned(),
        });
    }
    Ok(found.into_iter().map(|path| library(path, system)).collect())
}

/// Folders in which distributions and pip put it.
fn places(system: &Path) -> Vec<PathBuf> {
    let usual = [
        "usr/local/lib".to_owned(),
        format!("usr/local/lib/{TRIPLET}"),
        format!("usr/lib/{TRIPLET}"),
        "usr/lib64".to_owned(),
        "usr/lib".to_owned(),
    ];
    let mut places: Vec<PathBuf> = usual.iter().map(|place| system.join(place)).collect();
    for lib in ["usr/local/lib", "usr/lib"] {
        let Ok(entries) = std::fs::read_dir(system.join(lib)) else { continue };
        let mut pythons: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
            .collect();
        pythons.sort();
        for python in pythons.iter().rev() {
            for packages in ["site-packages", "dist-packages"] {
                places.push(python.join(packages).join("onnxruntime/capi"));
            }
        }
    }
    places
}

/// The newest library in a folder whose name says that it is new enough.
fn library_in(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries
        .flatten()
        .filter_map(|entry| Some((version_of(&entry.file_name().to_string_lossy())?, entry.path())))
        .filter(|(version, path)| *version >= [1, OLDEST_MINOR, 0] && path.is_file())
        .max()
        .map(|(_, path)| path)
}

/// `libonnxruntime.so.1.32.0`
fn version_of(name: &str) -> Option<[u64; 3]> {
    let mut numbers = name.strip_prefix("libonnxruntime.so.")?.split('.').map(|part| part.parse().ok());
    let version = [numbers.next()??, numbers.next()??, numbers.next().unwrap_or(Some(0))?];
    numbers.next().is_none().then_some(version)
}

fn library(path: PathBuf, system: &Path) -> Library {
    // A link leads to the folder with the provider's own libraries.
    let real = std::fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
    let mut folders: Vec<PathBuf> =
        [path.parent(), real.parent()].into_iter().flatten().map(Path::to_owned).collect();
    folders.dedup();
    folders.extend(crate::system::folders(system));
    Library { path, folders }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn put(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn config(root: &Path) -> AneConfig {
        AneConfig { engine_root: root.join("engine"), ..AneConfig::default() }
    }

    fn found(system: &Path) -> Vec<PathBuf> {
        let libraries = locate(&config(system), system).unwrap();
        libraries.into_iter().map(|library| library.path).collect()
    }

    #[test]
    fn versions_are_read_from_names() {
        assert_eq!(version_of("libonnxruntime.so.1.32.0"), Some([1, 32, 0]));
        assert_eq!(version_of("libonnxruntime.so.1.24"), Some([1, 24, 0]));
        for other in
            ["libonnxruntime.so", "libonnxruntime.so.1", "libonnxruntime.so.1.2.3.4", "libonnxruntime.so.x.1"]
        {
            assert_eq!(version_of(other), None, "{other}");
        }
    }

    #[test]
    fn what_was_set_up_comes_before_the_systems_own() {
        let system = tempfile::tempdir().unwrap();
        let at = |path: &str| system.path().join(path);
        let missing = locate(&config(system.path()), system.path()).unwrap_err();
        assert!(missing.reason.contains("engine") && missing.remedy.contains("lighter setup ane"));
        put(&at("usr/local/lib/python3.11/dist-packages/onnxruntime/capi/libonnxruntime.so.1.24.4"));
        put(&at("usr/local/lib/python3.13/site-packages/onnxruntime/capi/libonnxruntime.so.1.26.0"));
        assert!(
            found(system.path())[0]
                .ends_with("python3.13/site-packages/onnxruntime/capi/libonnxruntime.so.1.26.0")
        );
        put(&at(&format!("usr/lib/{TRIPLET}/libonnxruntime.so.1.23.2")));
        assert!(found(system.path())[0].ends_with("libonnxruntime.so.1.26.0"), "1.23 is too old");
        put(&at(&format!("usr/lib/{TRIPLET}/libonnxruntime.so.1.30.1")));
        assert!(found(system.path())[0].ends_with("libonnxruntime.so.1.30.1"));
        put(&at("engine/openvino/libonnxruntime.so.1.24.1"));
        assert_eq!(found(system.path()), [at("engine/openvino/libonnxruntime.so.1.24.1")]);
        put(&at("engine/onnxruntime/libonnxruntime.so.1.32.0"));
        let both = [
            at("engine/onnxruntime/libonnxruntime.so.1.32.0"),
            at("engine/openvino/libonnxruntime.so.1.24.1"),
        ];
        assert_eq!(found(system.path()), both);
    }

    #[test]
    fn a_configured_library_is_used_alone_or_named_as_missing() {
        let system = tempfile::tempdir().unwrap();
        let path = system.path().join("mine.so");
        let config = AneConfig { library: Some(path.clone()), ..config(system.path()) };
        let missing = locate(&config, system.path()).unwrap_err();
        assert!(missing.reason.contains("ane.library") && missing.reason.contains("mine.so"));
        put(&path);
        let libraries = locate(&config, system.path()).unwrap();
        assert_eq!(libraries.len(), 1);
        assert!(libraries[0].folders.contains(&system.path().to_owned()));
    }
}
