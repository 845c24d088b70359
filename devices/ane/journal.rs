// SPDX-License-Identifier: MIT OR Apache-2.0
//! The journal: which engine was tried with which model, how it went, and what was chosen.
//!
//! A line is written *before* an attempt, so that whatever an attempt takes down, the next start knows of it: an
//! attempt without an end is a crash. Lines are only appended, each by itself, and a line that cannot be read
//! costs nothing but itself. Used by the service, and by `lighter ane`, which needs no running daemon for it:
//! whoever appends holds the lock file, and readers look for lines that others have added.

mod fold;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::control::{ModelHash, Shapes};

pub use self::fold::{Advice, Chosen, Fold, ModelFacts, Record};

/// Longest line; longer ones are not read.
const MAX_LINE_BYTES: usize = 4096;
/// Longest text of an engine in a line.
const MAX_TEXT: usize = 300;
/// Longest notation of shapes; longer ones are named by their hash.
const MAX_SHAPES: usize = 200;
/// A journal of this size is written anew with what it says in the end.
const COMPACT_BYTES: u64 = 4 << 20;

/// Why the journal could not be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file.
    #[error("journal {} could not be {done}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Opened, read, written.
        done: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What was tried: one engine with one model and the shapes of one run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Hash of the model's bytes and ports.
    pub model: ModelHash,
    /// Shapes of the inputs, as [`shapes_text`] writes them.
    pub shapes: String,
    /// Name of the engine, as in `lighter devices`.
    pub engine: String,
    /// What else decides: provider, its options, the build of ONNX Runtime, the system. An upgrade is another
    /// key, and so tries again what failed before.
    pub build: String,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum End {
    /// With the processor's answer.
    Agreed {
        /// Largest difference, as a share of the largest value.
        largest: f64,
        /// How long compiling took; `None` when that is not known.
        compile_us: Option<u64>,
        /// Least time of its timed runs; `None` when it was not timed.
        us: Option<u64>,
        /// Least time of the processor's runs between them.
        cpu_us: Option<u64>,
    },
    /// With another answer: never used for this model.
    Wrong {
        /// The difference.
        text: String,
    },
    /// With an error.
    Failed {
        /// The engine's words.
        text: String,
    },
    /// With the end of its process.
    Crashed {
        /// What was seen of it.
        text: String,
    },
    /// Not at all, within the limit.
    Hung {
        /// The limit that passed.
        text: String,
    },
}

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Line {
    /// A model that was seen for the first time.
    Model {
        /// Seconds since 1970.
        at_s: u64,
        /// Its hash.
        model: ModelHash,
        /// Its own name; may be empty.
        label: String,
        /// Length of its proto.
        proto_bytes: u64,
        /// Length of its weights.
        weights_bytes: u64,
    },
    /// An engine is about to be tried.
    Attempt {
        /// Seconds since 1970.
        at_s: u64,
        /// What.
        key: Key,
    },
    /// It has been.
    Ended {
        /// Seconds since 1970.
        at_s: u64,
        /// What.
        key: Key,
        /// How.
        end: End,
    },
    /// An engine was chosen for a model's shapes.
    Chosen {
        /// Seconds since 1970.
        at_s: u64,
        /// What.
        key: Key,
    },
    /// All about a model is forgotten.
    Forgot {
        /// Seconds since 1970.
        at_s: u64,
        /// Its hash.
        model: ModelHash,
    },
}

/// Seconds since 1970.
#[must_use]
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Shapes as keys hold them.
#[must_use]
pub fn shapes_text(shapes: &Shapes) -> String {
    let text = shapes.to_string();
    if text.len() <= MAX_SHAPES {
        return text;
    }
    format!("{} inputs {}", shapes.0.len(), &blake3::hash(text.as_bytes()).to_hex()[..16])
}

/// An engine's words as lines hold them.
#[must_use]
pub fn short_text(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_TEXT).collect()
}

/// The journal of a host.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    fold: Fold,
    /// Up to where the file has been read, and which file that was.
    read: u64,
    inode: Option<u64>,
}

impl Journal {
    /// The journal in this folder; nothing is read or made yet.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join("journal"), fold: Fold::default(), read: 0, inode: None }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says, as far as it was read.
    #[must_use]
    pub fn fold(&self) -> &Fold {
        &self.fold
    }

    /// Changes whenever more has been read.
    #[must_use]
    pub fn position(&self) -> (Option<u64>, u64) {
        (self.inode, self.read)
    }

    /// Reads what others have added. A journal that is not there says nothing.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn refresh(&mut self) -> Result<&Fold, JournalError> {
        use std::os::unix::fs::MetadataExt;
        let failed = |source| JournalError::File { path: self.path.clone(), done: "read", source };
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if self.inode.take().is_some() {
                    (self.fold, self.read) = (Fold::default(), 0);
                }
                return Ok(&self.fold);
            }
            Err(error) => return Err(failed(error)),
        };
        let found = file.metadata().map_err(failed)?;
        if self.inode != Some(found.ino()) || found.len() < self.read {
            (self.fold, self.read, self.inode) = (Fold::default(), 0, Some(found.ino()));
        }
        if found.len() == self.read {
            return Ok(&self.fold);
        }
        file.seek(SeekFrom::Start(self.read)).map_err(failed)?;
        let mut bytes = Vec::new();
        // The journal is bounded by its being written anew; this is for one that somebody else wrote.
        file.take(COMPACT_BYTES * 4).read_to_end(&mut bytes).map_err(failed)?;
        self.take(&bytes);
        Ok(&self.fold)
    }

    /// Whole lines only: one that is still being written is read the next time.
    fn take(&mut self, bytes: &[u8]) {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let Some(text) = line.strip_suffix(b"\n") else { break };
            self.read += line.len() as u64;
            if text.is_empty() {
                continue;
            }
            let parsed = (text.len() <= MAX_LINE_BYTES).then(|| serde_json::from_slice::<Line>(text).ok());
            match parsed.flatten() {
                Some(line) => self.fold.add(&line),
                None => self.fold.add_unreadable(),
            }
        }
    }

    /// Appends lines, on disk when this returns.
    ///
    /// # Errors
    /// When the folder or the file cannot be written.
    pub fn append(&mut self, lines: &[Line]) -> Result<(), JournalError> {
        let failed = |source| JournalError::File { path: self.path.clone(), done: "written", source };
        if let Some(folder) = self.path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(failed)?;
        }
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.path.with_extension("lock"))
            .map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut file =
            OpenOptions::new().create(true).append(true).read(true).open(&self.path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut text = Vec::new();
        // A line that a crash has cut must not take the next one with it.
        let mut last = [b'\n'];
        if len > 0 {
            file.read_exact_at(&mut last, len - 1).map_err(failed)?;
        }
        if last != [b'\n'] {
            text.push(b'\n');
        }
        for line in lines {
            serde_json::to_writer(&mut text, line).map_err(|error| failed(error.into()))?;
            text.push(b'\n');
        }
        file.write_all(&text).and_then(|()| file.sync_data()).map_err(failed)?;
        drop(file);
        self.refresh()?;
        if len > COMPACT_BYTES {
            self.compact()?;
        }
        Ok(())
    }

    /// Writes the journal anew; the caller holds the lock.
    fn compact(&mut self) -> Result<(), JournalError> {
        let failed = |source| JournalError::File { path: self.path.clone(), done: "written anew", source };
        let mut text = Vec::new();
        for line in self.fold.lines() {
            serde_json::to_writer(&mut text, &line).map_err(|error| failed(error.into()))?;
            text.push(b'\n');
        }
        let temporary = self.path.with_extension("new");
        let mut file = File::create(&temporary).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&temporary, &self.path).map_err(failed)?;
        self.refresh().map(|_| ())
    }
}

#[cfg(test)]
#[path = "journal/tests.rs"]
mod tests;
