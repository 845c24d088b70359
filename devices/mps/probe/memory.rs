// SPDX-License-Identifier: MIT OR Apache-2.0
//! What Pythons have said, kept on disk: importing torch only to list its devices takes seconds, at each start of the
//! daemon and of the service.
//!
//! An answer holds as long as the interpreter, torch, lighter's package, the settings and the GPUs' device nodes are the
//! same, and until the next boot. Only Pythons with torch are remembered: that one has none is said in a moment, and is
//! to change unnoticed by nobody. A file that cannot be read or written only makes the next start slower.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{MpsConfig, Torch, host_package};

/// The file below `mps.state_dir`.
const FILE: &str = "known-pythons.json";
/// A larger file is none of ours.
const MAX_BYTES: u64 = 1 << 20;

/// What an answer depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::mps) struct Seen {
    boot: String,
    files: Vec<(PathBuf, Option<Stamp>)>,
    devices: Vec<String>,
    settings: (Vec<PathBuf>, BTreeMap<String, String>, bool),
}

/// Size, and seconds and nanoseconds of the last change.
type Stamp = (u64, i64, i64);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    seen: Seen,
    torch: Torch,
}

/// What a Python's answer depends on, as it is at this moment.
pub(in crate::mps) fn look(torch: &Torch, config: &MpsConfig) -> Seen {
    let mut files = vec![torch.executable.clone(), host_package(config).to_owned()];
    for folder in &torch.folders {
        let inside = if folder.ends_with("torch") { folder.clone() } else { folder.join("torch") };
        let version = inside.join("version.py");
        if version.is_file() {
            files.extend([inside, version]);
        }
    }
    files.sort();
    files.dedup();
    Seen {
        boot: std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        files: files
            .into_iter()
            .map(|file| (stamp(&file), file))
            .map(|(stamp, file)| (file, stamp))
            .collect(),
        devices: device_names(),
        settings: (config.torch_path.clone(), config.environment.clone(), config.sandbox),
    }
}

fn stamp(file: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(file).ok()?;
    Some((found.len(), found.mtime(), found.mtime_nsec()))
}

/// Device nodes of GPUs: one that came or went makes other engines.
fn device_names() -> Vec<String> {
    let list = |folder: &str, starts: &[&str]| -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| starts.iter().any(|start| name.starts_with(start)))
            .collect()
    };
    let mut names = list("/dev/dri", &["renderD"]);
    names.extend(list("/dev", &["nvidia", "kfd", "dxg"]));
    names.sort();
    names
}

/// The file.
#[derive(Debug)]
pub(super) struct Memory<'a> {
    config: &'a MpsConfig,
}

impl<'a> Memory<'a> {
    pub(super) fn new(config: &'a MpsConfig) -> Self {
        Self { config }
    }

    /// What a Python said, while that holds.
    pub(super) fn recall(&self, python: &Path) -> Option<Torch> {
        let entry = self.load().remove(python)?;
        (entry.seen == look(&entry.torch, self.config)).then_some(entry.torch)
    }

    /// Keeps what a Python has said.
    pub(super) fn keep(&self, python: &Path, torch: &Torch) {
        let mut entries = self.load();
        entries.retain(|known, _| known.exists());
        let entry = Entry { seen: look(torch, self.config), torch: torch.clone() };
        entries.insert(python.to_owned(), entry);
        if let Err(error) = self.store(&entries) {
            tracing::debug!(%error, "what a Python has is not remembered");
        }
    }

    fn path(&self) -> PathBuf {
        self.config.state_dir.join(FILE)
    }

    fn load(&self) -> BTreeMap<PathBuf, Entry> {
        let path = self.path();
        if !std::fs::metadata(&path).is_ok_and(|found| found.len() <= MAX_BYTES) {
            return BTreeMap::new();
        }
        let text = std::fs::read(&path).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    fn store(&self, entries: &BTreeMap<PathBuf, Entry>) -> std::io::Result<()> {
        use std::io::Write as _;
        std::fs::create_dir_all(&self.config.state_dir)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.config.state_dir)?;
        file.write_all(&serde_json::to_vec(entries)?)?;
        file.persist(self.path()).map_err(|error| error.error)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_until_what_it_depends_on_changes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for file in ["python3", "host.pyz", "site/torch/version.py"] {
            std::fs::create_dir_all(at(file).parent().unwrap()).unwrap();
            std::fs::write(at(file), "1").unwrap();
        }
        let config =
            MpsConfig { host_package: Some(at("host.pyz")), state_dir: at("state"), ..MpsConfig::default() };
        let torch = Torch {
            executable: at("python3"),
            version: "2.6".into(),
            python: "3.10".into(),
            devices: Vec::new(),
            folders: vec![at("site"), at("elsewhere")],
        };
        let memory = Memory::new(&config);
        assert_eq!(memory.recall(&at("python3")), None);
        memory.keep(&at("python3"), &torch);
        assert_eq!(memory.recall(&at("python3")), Some(torch.clone()));
        assert_eq!(memory.recall(&at("other")), None);
        for file in ["python3", "host.pyz", "site/torch/version.py"] {
            memory.keep(&at("python3"), &torch);
            std::fs::write(at(file), "changed in size").unwrap();
            assert_eq!(memory.recall(&at("python3")), None, "{file}");
            std::fs::write(at(file), "1").unwrap();
        }
        memory.keep(&at("python3"), &torch);
        let other = MpsConfig { torch_path: vec![at("site")], ..config.clone() };
        assert_eq!(Memory::new(&other).recall(&at("python3")), None);
        std::fs::write(memory.path(), "rubbish").unwrap();
        assert_eq!(memory.recall(&at("python3")), None);
        memory.keep(&at("python3"), &torch);
        assert_eq!(memory.recall(&at("python3")), Some(torch));
    }
}
