// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices that a list of spec directories offers.
//!
//! Directories are given lowest priority first; a device of a later directory shadows one of an earlier.
//! Two files of one directory that define the same device conflict, and that name is then offered by
//! nobody, as in every engine. A file that cannot be used is reported by its path and hides no other.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::names::QualifiedName;
use crate::parse::{MAX_SPEC_BYTES, ParseError, parse_bytes};
use crate::spec::{Device, Spec};

/// Where engines look by default, lowest priority first.
pub const DEFAULT_DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Why a path offers less than it seems to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file or directory cannot be read.
    #[error("cannot read it: {0}")]
    Read(io::Error),
    /// Something other than a file has the name of a spec.
    #[error("it is not a regular file")]
    NotAFile,
    /// The content is no valid spec.
    #[error("{0}")]
    Spec(ParseError),
    /// Another file of the same directory defines the same device, so nobody offers it.
    #[error("device {name} is also defined by {other}: define it in one of them, neither counts now")]
    Conflict {
        /// The device.
        name: QualifiedName,
        /// The other file.
        other: PathBuf,
    },
}

/// A spec file that was read.
#[derive(Debug)]
struct SpecFile {
    path: PathBuf,
    /// Index of its directory.
    priority: usize,
    spec: Spec,
}

/// Where a device is defined: file and place in it.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: usize,
    device: usize,
}

/// A device on offer.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Its qualified name.
    pub name: &'a str,
    /// The file that defines it.
    pub path: &'a Path,
    /// That file's content.
    pub spec: &'a Spec,
    /// The device itself.
    pub device: &'a Device,
    /// Identity of the file within the registry.
    pub(crate) file: usize,
}

/// A definition that a directory of higher priority hides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shadowed {
    /// The device's qualified name.
    pub name: String,
    /// The file whose definition does not count.
    pub path: PathBuf,
    /// The file whose definition counts instead.
    pub by: PathBuf,
}

/// What a scan of directories found.
#[derive(Debug, Default)]
pub struct Registry {
    files: Vec<SpecFile>,
    /// By qualified name, as text: that is the order in which other tools list devices.
    devices: BTreeMap<String, Place>,
    shadowed: Vec<Shadowed>,
    errors: Vec<(PathBuf, FileError)>,
}

impl Registry {
    /// Reads all spec files of `directories`, lowest priority first. A missing directory is an empty one.
    #[must_use]
    pub fn scan<P: AsRef<Path>>(directories: &[P]) -> Self {
        let mut registry = Self::default();
        let mut conflicts = HashSet::new();
        for (priority, directory) in directories.iter().enumerate() {
            let names = match spec_names(directory.as_ref()) {
                Ok(names) => names,
                Err(error) => {
                    registry.errors.push((directory.as_ref().to_owned(), FileError::Read(error)));
                    continue;
                }
            };
            for path in names {
                match read(&path) {
                    Ok(spec) => registry.add(SpecFile { path, priority, spec }, &mut conflicts),
                    Err(error) => registry.errors.push((path, error)),
                }
            }
        }
        // Also where a directory of higher priority has a definition: engines drop the name altogether.
        registry.devices.retain(|name, _| !conflicts.contains(name));
        registry.shadowed.retain(|shadowed| !conflicts.contains(&shadowed.name));
        registry.shadowed.sort();
        registry.errors.sort_by(|(a, _), (b, _)| a.cmp(b));
        registry
    }

    /// All devices on offer, sorted by qualified name.
    pub fn devices(&self) -> impl Iterator<Item = Offer<'_>> {
        self.devices.iter().filter_map(|(name, place)| self.offer(name, *place))
    }

    /// The device of this qualified name, if it is on offer.
    #[must_use]
    pub fn device(&self, name: &str) -> Option<Offer<'_>> {
        let (name, place) = self.devices.get_key_value(name)?;
        self.offer(name, *place)
    }

    /// Definitions that a directory of higher priority hides, sorted.
    #[must_use]
    pub fn shadowed(&self) -> &[Shadowed] {
        &self.shadowed
    }

    /// What is wrong, by path; a path may have several.
    pub fn errors(&self) -> impl Iterator<Item = (&Path, &FileError)> {
        self.errors.iter().map(|(path, error)| (path.as_path(), error))
    }

    fn offer<'a>(&'a self, name: &'a str, place: Place) -> Option<Offer<'a>> {
        let file = self.files.get(place.file)?;
        let device = file.spec.devices.get(place.device)?;
        Some(Offer { name, path: &file.path, spec: &file.spec, device, file: place.file })
    }

    fn add(&mut self, new: SpecFile, conflicts: &mut HashSet<String>) {
        let file = self.files.len();
        for (device, qualified) in new.spec.qualified_names().enumerate() {
            let name = qualified.to_string();
            let old = self.devices.get(&name).and_then(|place| self.files.get(place.file));
            match old {
                Some(old) if old.priority == new.priority => {
                    for (path, other) in [(&new.path, &old.path), (&old.path, &new.path)] {
                        let error = FileError::Conflict { name: qualified.clone(), other: other.clone() };
                        self.errors.push((path.clone(), error));
                    }
                    conflicts.insert(name);
                    continue;
                }
                Some(old) => self.shadowed.push(Shadowed {
                    name: name.clone(),
                    path: old.path.clone(),
                    by: new.path.clone(),
                }),
                None => {}
            }
            self.devices.insert(name, Place { file, device });
        }
        self.files.push(new);
    }
}

/// The paths in a directory that have the name of a spec, in the order of their bytes.
fn spec_names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let named_so = [b".json".as_slice(), b".yaml"].iter().any(|end| name.as_bytes().ends_with(end));
        // Directories are passed over in silence; a link is looked at when it is read.
        if named_so && !entry.file_type()?.is_dir() {
            paths.push(directory.join(name));
        }
    }
    paths.sort_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
    Ok(paths)
}

fn read(path: &Path) -> Result<Spec, FileError> {
    // Non-blocking, so that a pipe with the name of a spec does not stop the scan.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| FileError::Read(error.into()))?;
    let file = File::from(file);
    if !file.metadata().map_err(FileError::Read)?.is_file() {
        return Err(FileError::NotAFile);
    }
    let mut bytes = Vec::new();
    let limit = u64::try_from(MAX_SPEC_BYTES).unwrap_or(u64::MAX).saturating_add(1);
    file.take(limit).read_to_end(&mut bytes).map_err(FileError::Read)?;
    parse_bytes(&bytes).map_err(FileError::Spec)
}
