// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which Pythons of this host may have torch. Looks at files only; who has it is asked by the probe.
//!
//! In this order: the one that the configuration names, alone; the one that `lighter setup mps` made; `python3` and
//! `python3.N` in the folders of `PATH`, so that a daemon started in an activated environment uses it; the system's
//! folders; `/opt/*/bin`. Scripts that choose a Python (pyenv's) are passed over: what they choose depends on who asks.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub use crate::host::Missing;

use super::config::MpsConfig;

/// Written by `lighter setup mps` into its folder when all is there.
pub const SETUP_MARK: &str = "VERSION";
/// More Pythons are not asked.
const MAX_CANDIDATES: usize = 12;
/// Oldest minor version 3.x that lighter's package runs on.
const OLDEST_MINOR: u32 = 10;

/// The Pythons to ask, in this order; never empty. `path` is the variable `PATH`, `system` the folder that stands for
/// `/` (for tests).
///
/// # Errors
/// When there is none, with what to do.
pub fn candidates(config: &MpsConfig, path: Option<&OsStr>, system: &Path) -> Result<Vec<PathBuf>, Missing> {
    if let Some(python) = &config.torch_python {
        if !is_program(python) {
            return Err(Missing {
                reason: format!(
                    "mps.torch_python = {:?}: there is no such program",
                    python.display().to_string()
                ),
                remedy:
                    "name another with `lighter config --torch-python PATH`, or have lighter search with \
                         `lighter config --torch-python ''`"
                        .to_owned(),
            });
        }
        return Ok(vec![python.clone()]);
    }
    let mut found = Found::default();
    if config.engine_root.join(SETUP_MARK).is_file() {
        found.add(config.engine_root.join("bin/python3"));
    }
    let listed: Vec<PathBuf> = path.map(|path| std::env::split_paths(path).collect()).unwrap_or_default();
    for folder in listed.iter().filter(|folder| folder.is_absolute()) {
        found.add_folder(folder);
    }
    for folder in ["usr/local/bin", "usr/bin"] {
        found.add_folder(&system.join(folder));
    }
    for folder in sorted_entries(&system.join("opt")) {
        found.add_folder(&folder.join("bin"));
    }
    if found.pythons.is_empty() {
        return Err(Missing {
            reason: "no Python 3 is in the folders of PATH, /usr/local/bin, /usr/bin or /opt/*/bin"
                .to_owned(),
            remedy: remedy().to_owned(),
        });
    }
    Ok(found.pythons)
}

/// How to get a torch.
pub(super) fn remedy() -> &'static str {
    "run `lighter setup mps`, or name a Python that has torch 2.6 or newer with `lighter config --torch-python PATH`"
}

#[derive(Debug, Default)]
struct Found {
    pythons: Vec<PathBuf>,
    /// What they are, so that no Python is asked twice by two names.
    identities: Vec<PathBuf>,
}

impl Found {
    fn add_folder(&mut self, folder: &Path) {
        self.add(folder.join("python3"));
        let minor =
            |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix("python3.")?.parse::<u32>().ok();
        let mut versions: Vec<(u32, PathBuf)> = sorted_entries(folder)
            .into_iter()
            .filter_map(|path| Some((minor(&path)?, path)))
            .filter(|(minor, _)| *minor >= OLDEST_MINOR)
            .collect();
        versions.sort();
        for (_, path) in versions.into_iter().rev() {
            self.add(path);
        }
    }

    fn add(&mut self, python: PathBuf) {
        let Some(identity) = identity(&python) else { return };
        if self.pythons.len() < MAX_CANDIDATES
            && is_interpreter(&python)
            && !self.identities.contains(&identity)
        {
            self.pythons.push(python);
            self.identities.push(identity);
        }
    }
}

/// The file itself; in a virtual environment the name in it, because by that name the same file is another Python.
fn identity(python: &Path) -> Option<PathBuf> {
    let folder = python.parent()?;
    let is_environment = folder.parent().is_some_and(|root| root.join("pyvenv.cfg").is_file());
    let real = std::fs::canonicalize(python).ok()?;
    if is_environment { std::fs::canonicalize(folder).ok() } else { Some(real) }
}

fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// A program and no script.
fn is_interpreter(path: &Path) -> bool {
    let mut start = [0; 2];
    is_program(path)
        && std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && &start != b"#!"
}

fn sorted_entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn put(path: &Path, content: &str, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn pythons_are_found_once_each_in_order() {
        let system = tempfile::tempdir().unwrap();
        let at = |path: &str| system.path().join(path);
        let config = MpsConfig { engine_root: at("engine"), ..MpsConfig::default() };
        let path = std::env::join_paths([at("shims"), at("venv/bin"), PathBuf::from("relative")]).unwrap();
        let look = || candidates(&config, Some(&path), system.path());
        let missing = look().unwrap_err();
        assert!(missing.remedy.contains("lighter setup mps"), "{missing:?}");
        put(&at("usr/bin/python3.13"), "ELF", 0o755);
        put(&at("usr/bin/python3.9"), "ELF", 0o755);
        put(&at("usr/bin/python3.12"), "ELF", 0o755);
        put(&at("usr/bin/python3.13-config"), "ELF", 0o755);
        put(&at("usr/bin/python3.14"), "ELF", 0o644);
        std::os::unix::fs::symlink("python3.12", at("usr/bin/python3")).unwrap();
        put(&at("shims/python3"), "#!/bin/sh", 0o755);
        put(&at("opt/conda/bin/python3"), "ELF", 0o755);
        assert_eq!(
            look().unwrap(),
            [at("usr/bin/python3"), at("usr/bin/python3.13"), at("opt/conda/bin/python3")]
        );
        put(&at("venv/pyvenv.cfg"), "", 0o644);
        fs::create_dir_all(at("venv/bin")).unwrap();
        for name in ["python3", "python3.12"] {
            std::os::unix::fs::symlink(at("usr/bin/python3.12"), at("venv/bin").join(name)).unwrap();
        }
        put(&at("engine/bin/python3"), "ELF", 0o755);
        assert_eq!(look().unwrap()[..2], [at("venv/bin/python3"), at("usr/bin/python3")]);
        put(&at("engine/VERSION"), "", 0o644);
        assert_eq!(look().unwrap()[..2], [at("engine/bin/python3"), at("venv/bin/python3")]);
    }

    #[test]
    fn a_configured_python_is_asked_alone_or_named_as_missing() {
        let system = tempfile::tempdir().unwrap();
        let python = system.path().join("mine");
        let config = MpsConfig { torch_python: Some(python.clone()), ..MpsConfig::default() };
        let look = || candidates(&config, None, Path::new("/"));
        let missing = look().unwrap_err();
        assert!(
            missing.reason.contains("mps.torch_python") && missing.reason.contains("mine"),
            "{missing:?}"
        );
        put(&python, "#!/bin/sh\n", 0o755);
        assert_eq!(look().unwrap(), [python]);
    }
}
