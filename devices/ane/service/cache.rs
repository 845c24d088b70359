// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiled models on disk: a folder for each owner and engine, bounded in bytes, the longest unused files go first.
//!
//! What a provider has compiled is code for its device, so nothing of one owner's is ever given to another's worker, and
//! a folder is for one build of ONNX Runtime with one set of options on one system: artefacts do not fit others. A
//! folder belongs to one worker at a time, to whose user it is given; a second one at the same time has none. What is
//! in it is not looked into, and links in it are not followed.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, lchown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lighter_wire::Owner;

/// Deepest folder that is looked into, and most files: what is beyond is removed.
const MAX_DEPTH: usize = 4;
const MAX_FILES: usize = 20_000;

/// All folders.
#[derive(Debug)]
pub(super) struct Cache {
    root: PathBuf,
    max_bytes: u64,
    in_use: Mutex<BTreeSet<PathBuf>>,
}

/// A worker's part of the cache; given back when dropped.
#[derive(Debug)]
pub(super) struct CacheFolder {
    cache: Arc<Cache>,
    path: PathBuf,
}

impl CacheFolder {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the folder and all that is in it to a user.
    pub(super) fn give_to(&self, uid: u32, gid: u32) -> std::io::Result<()> {
        let mut result = lchown(&self.path, Some(uid), Some(gid));
        walk(&self.path, 0, &mut |path, _| {
            if let Err(error) = lchown(path, Some(uid), Some(gid)) {
                result = Err(error);
            }
        });
        result
    }
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        self.cache.lock().remove(&self.path);
        self.cache.trim();
    }
}

impl Cache {
    pub(super) fn new(root: PathBuf, max_bytes: u64) -> Self {
        Self { root, max_bytes, in_use: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folder of this owner for this build of an engine; `None` when there is no cache, another worker has the
    /// folder, or the disk fails, which is a line in the log.
    pub(super) fn take(self: &Arc<Self>, owner: &Owner, build: &str) -> Option<CacheFolder> {
        if self.max_bytes == 0 {
            return None;
        }
        let name = |text: &str| blake3::hash(text.as_bytes()).to_hex()[..32].to_owned();
        let path = self.root.join(name(&owner.0)).join(name(build));
        if !self.lock().insert(path.clone()) {
            return None;
        }
        let folder = CacheFolder { cache: Arc::clone(self), path };
        let parent = folder.path.parent().unwrap_or(&self.root);
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(parent).and_then(|()| {
            match fs::DirBuilder::new().mode(0o700).create(&folder.path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
                made => made,
            }
        });
        if let Err(error) = made {
            tracing::warn!(path = %folder.path.display(), %error, "no cache for compiled models");
            return None;
        }
        Some(folder)
    }

    /// Removes files, the longest unused first, until all folders together are under the limit. Folders in use count and
    /// stay.
    pub(super) fn trim(&self) {
        let in_use = self.lock().clone();
        let mut files = Vec::new();
        let mut bytes = 0u64;
        for owner in folders(&self.root) {
            for folder in folders(&owner) {
                let keep = in_use.contains(&folder);
                let mut count = 0;
                walk(&folder, 0, &mut |path, found| {
                    count += 1;
                    if found.is_dir() {
                        return;
                    }
                    bytes = bytes.saturating_add(found.len());
                    let used = found.atime().max(found.mtime());
                    if !keep {
                        files.push((
                            if count > MAX_FILES { i64::MIN } else { used },
                            found.len(),
                            path.to_owned(),
                        ));
                    }
                });
            }
        }
        files.sort();
        for (used, len, path) in files {
            if bytes <= self.max_bytes && used != i64::MIN {
                break;
            }
            match fs::remove_file(&path) {
                Ok(()) => bytes = bytes.saturating_sub(len),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a compiled model stays on disk")
                }
            }
        }
    }
}

fn folders(of: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(of) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Everything below a folder, which is a worker's to fill: no link is followed, and what lies too deep is removed.
fn walk(folder: &Path, depth: usize, each: &mut dyn FnMut(&Path, &fs::Metadata)) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        each(&path, &found);
        if !found.is_dir() {
            continue;
        }
        if depth < MAX_DEPTH {
            walk(&path, depth + 1, each);
        } else if let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!(path = %path.display(), %error, "a deep folder of compiled models stays on disk");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    fn cache(root: &Path, max_bytes: u64) -> Arc<Cache> {
        Arc::new(Cache::new(root.join("cache"), max_bytes))
    }

    fn owner(name: &str) -> Owner {
        Owner(name.to_owned())
    }

    fn put(folder: &Path, name: &str, bytes: usize, age_s: u64) {
        let path = folder.join(name);
        fs::write(&path, vec![0; bytes]).unwrap();
        let when = SystemTime::now() - Duration::from_secs(age_s);
        let times = fs::FileTimes::new().set_accessed(when).set_modified(when);
        fs::File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
    }

    #[test]
    fn owners_and_builds_have_folders_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(root.path(), 1000);
        let a = cache.take(&owner("a"), "1.24.1").unwrap();
        let path = a.path().to_owned();
        assert!(cache.take(&owner("a"), "1.24.1").is_none(), "it is in use");
        let others = [cache.take(&owner("b"), "1.24.1").unwrap(), cache.take(&owner("a"), "1.32.0").unwrap()];
        assert!(others.iter().all(|other| other.path() != path));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        put(&path, "model.blob", 10, 0);
        drop(a);
        let again = cache.take(&owner("a"), "1.24.1").unwrap();
        assert!(again.path().join("model.blob").is_file());
    }

    #[test]
    fn the_longest_unused_go_and_what_is_in_use_stays() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(root.path(), 1000);
        let (a, b) = (cache.take(&owner("a"), "x").unwrap(), cache.take(&owner("b"), "x").unwrap());
        let paths = [a.path().to_owned(), b.path().to_owned()];
        put(&paths[0], "old", 600, 500);
        put(&paths[0], "older", 600, 900);
        put(&paths[1], "oldest", 600, 9000);
        drop(a);
        assert!(!paths[0].join("older").exists() && !paths[0].join("old").exists(), "600 are in use");
        assert!(paths[1].join("oldest").exists());
        put(&paths[1], "new", 500, 1);
        drop(b);
        assert!(!paths[1].join("oldest").exists() && paths[1].join("new").exists());
    }

    #[test]
    fn links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let outside = root.path().join("outside");
        fs::create_dir(&outside).unwrap();
        put(&outside, "secret", 5000, 9000);
        let cache = cache(root.path(), 1000);
        let folder = cache.take(&owner("a"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, folder.path().join("link")).unwrap();
        folder.give_to(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()).unwrap();
        drop(folder);
        assert!(outside.join("secret").exists());
    }

    #[test]
    fn no_bytes_are_no_cache() {
        let root = tempfile::tempdir().unwrap();
        assert!(cache(root.path(), 0).take(&owner("a"), "x").is_none());
        assert!(!root.path().join("cache").exists());
    }
}
