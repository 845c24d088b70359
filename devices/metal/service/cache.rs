// SPDX-License-Identifier: MIT OR Apache-2.0
//! The disk cache of weights: what an owner has uploaded before is there after a restart.
//!
//! One file a weight, below one folder an owner; a head that says what it is, then the bytes. A file appears in
//! one step (temporary file, fsync, rename), and what is read is hashed before it is used. Everything that
//! can go wrong with a disk is a miss and a line in the log, never a failure: a full disk, a cut or changed file, a
//! folder that is gone. The least recently used files go when the cap is reached.

mod head;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lighter_wire::Owner;

use self::head::{HEAD_BYTES, Head};
use super::weights::Content;

/// Weights that may wait for the disk; they stay in memory until they are written.
const MAX_WAITING: usize = 256;
/// Bytes that are copied at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// How often a failing disk is worth a line.
const COMPLAINT_EVERY: Duration = Duration::from_secs(60);
const TEMPORARY: &str = ".new-";

/// A weight and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cached {
    pub(super) owner: Owner,
    pub(super) fnv: u64,
    pub(super) content: Content,
}

/// The cache. Reading happens in the caller, writing on a thread of its own.
#[derive(Debug)]
pub(super) struct Cache {
    disk: Arc<Disk>,
    writer: Mutex<Option<SyncSender<Job>>>,
}

#[derive(Debug)]
enum Job {
    Write(Cached, Arc<OwnedFd>),
    /// Answered when everything before it is done.
    #[cfg_attr(not(test), allow(dead_code))]
    Flush(std::sync::mpsc::Sender<()>),
}

#[derive(Debug)]
struct Disk {
    folder: PathBuf,
    max_bytes: u64,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    is_read: bool,
    entries: HashMap<PathBuf, Entry>,
    bytes: u64,
    complained: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    used: SystemTime,
}

impl Cache {
    /// A cache in `folder` of at most `max_bytes`. Nothing is touched before the first use.
    pub(super) fn new(folder: PathBuf, max_bytes: u64) -> Self {
        let disk = Disk { folder, max_bytes, index: Mutex::default() };
        Self { disk: Arc::new(disk), writer: Mutex::default() }
    }

    /// Bytes on disk, as far as they have been looked at.
    pub(super) fn bytes(&self) -> u64 {
        self.disk.lock().bytes
    }

    /// Has a weight written; when too many wait already, this one is left out.
    pub(super) fn put(&self, cached: Cached, file: &Arc<OwnedFd>) {
        if self.disk.knows(&path_of(&cached.owner, cached.content.len, cached.fnv)) {
            return;
        }
        match self.send(Job::Write(cached, Arc::clone(file))) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.disk.complain("the disk is slower than the uploads", None),
            Err(TrySendError::Disconnected(_)) => self.disk.complain("the writer has ended", None),
        }
    }

    fn send(&self, job: Job) -> Result<(), TrySendError<Job>> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.is_none() {
            let (sender, jobs) = sync_channel(MAX_WAITING);
            let disk = Arc::clone(&self.disk);
            let thread = std::thread::Builder::new().name("ggml-cache".to_owned()).spawn(move || {
                for job in jobs {
                    match job {
                        Job::Write(cached, file) => disk.write(&cached, &file),
                        Job::Flush(done) => drop(done.send(())),
                    }
                }
            });
            if let Err(error) = thread {
                self.disk.complain("the writer cannot be started", Some(&error));
                return Err(TrySendError::Disconnected(job));
            }
            *writer = Some(sender);
        }
        match writer.as_ref() {
            Some(sender) => sender.try_send(job),
            None => Err(TrySendError::Disconnected(job)),
        }
    }

    /// Looks a weight up: what it should contain, the file, and where in it the bytes begin. The caller compares the
    /// hash while it reads.
    pub(super) fn get(&self, owner: &Owner, len: u64, fnv: u64) -> Option<(Content, OwnedFd, u64)> {
        let path = path_of(owner, len, fnv);
        if !self.disk.knows(&path) {
            return None;
        }
        let full = self.disk.folder.join(&path);
        match read_head(&full, owner, len, fnv) {
            Ok((head, file)) => {
                self.disk.touch(&path, &file);
                Some((Content { len, hash: head.hash }, file.into(), HEAD_BYTES as u64))
            }
            Err(error) => {
                self.disk.complain("an entry is not usable and is removed", Some(&error));
                self.disk.remove(&path);
                None
            }
        }
    }

    /// Forgets a weight whose bytes turned out to be damaged.
    pub(super) fn remove(&self, owner: &Owner, len: u64, fnv: u64) {
        self.disk.remove(&path_of(owner, len, fnv));
    }

    /// Waits until all that was put is written.
    #[cfg(test)]
    fn flush(&self) {
        let (done, wait) = std::sync::mpsc::channel();
        self.send(Job::Flush(done)).unwrap();
        wait.recv().unwrap();
    }
}

/// Where a weight lies below the cache's folder. Owners are hashed: their names are not all file names.
fn path_of(owner: &Owner, len: u64, fnv: u64) -> PathBuf {
    let folder = blake3::hash(owner.0.as_bytes()).to_hex();
    PathBuf::from(folder.as_str()).join(format!("{len}-{fnv:016x}"))
}

fn read_head(path: &Path, owner: &Owner, len: u64, fnv: u64) -> io::Result<(Head, File)> {
    let bad =
        |reason: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {reason}", path.display()));
    let file = File::open(path)?;
    let mut bytes = [0; HEAD_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    let head = Head::parse(&bytes).map_err(|error| bad(error.to_string()))?;
    if head != (Head { owner: *blake3::hash(owner.0.as_bytes()).as_bytes(), len, fnv, hash: head.hash }) {
        return Err(bad("its head names another weight".to_owned()));
    }
    let found = file.metadata()?.len();
    if len.checked_add(HEAD_BYTES as u64) != Some(found) {
        return Err(bad(format!("{found} bytes long, but {len} bytes of weight are named")));
    }
    Ok((head, file))
}

impl Disk {
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index, filled from the folder at its first use.
    fn index(&self) -> MutexGuard<'_, Index> {
        let mut index = self.lock();
        if !index.is_read {
            index.is_read = true;
            self.read_folder(&mut index);
        }
        index
    }

    fn read_folder(&self, index: &mut Index) {
        let Ok(owners) = fs::read_dir(&self.folder) else { return };
        for owner in owners.flatten() {
            let Ok(files) = fs::read_dir(owner.path()) else { continue };
            for file in files.flatten() {
                if file.file_name().to_string_lossy().starts_with(TEMPORARY) {
                    // Left by a service that was killed while it wrote.
                    let _ = fs::remove_file(file.path());
                    continue;
                }
                let Ok(found) = file.metadata() else { continue };
                if found.is_file() {
                    let path = Path::new(&owner.file_name()).join(file.file_name());
                    let used = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    index.bytes = index.bytes.saturating_add(found.len());
                    index.entries.insert(path, Entry { bytes: found.len(), used });
                }
            }
        }
    }

    fn knows(&self, path: &Path) -> bool {
        self.index().entries.contains_key(path)
    }

    /// The file's own time is the record of its last use, so that it outlives the service.
    fn touch(&self, path: &Path, file: &File) {
        let now = SystemTime::now();
        if let Some(entry) = self.index().entries.get_mut(path) {
            entry.used = now;
        }
        let _ = file.set_modified(now);
    }

    fn remove(&self, path: &Path) {
        let mut index = self.index();
        if let Some(entry) = index.entries.remove(path) {
            index.bytes = index.bytes.saturating_sub(entry.bytes);
        }
        drop(index);
        let _ = fs::remove_file(self.folder.join(path));
    }

    fn complain(&self, what: &str, error: Option<&io::Error>) {
        let mut index = self.lock();
        if index.complained.is_some_and(|when| when.elapsed() < COMPLAINT_EVERY) {
            return;
        }
        index.complained = Some(Instant::now());
        drop(index);
        let folder = self.folder.display();
        match error {
            Some(error) => tracing::warn!(%folder, %error, "disk cache of weights: {what}"),
            None => tracing::warn!(%folder, "disk cache of weights: {what}"),
        }
    }

    fn write(&self, cached: &Cached, file: &OwnedFd) {
        let path = path_of(&cached.owner, cached.content.len, cached.fnv);
        let bytes = cached.content.len.saturating_add(HEAD_BYTES as u64);
        if bytes > self.max_bytes || self.knows(&path) {
            return;
        }
        self.make_room(bytes);
        match self.write_file(&path, cached, file) {
            Ok(()) => {
                let mut index = self.index();
                index.bytes = index.bytes.saturating_add(bytes);
                index.entries.insert(path, Entry { bytes, used: SystemTime::now() });
            }
            Err(error) => self.complain("a weight could not be written and is left out", Some(&error)),
        }
    }

    fn make_room(&self, bytes: u64) {
        loop {
            let oldest = {
                let index = self.index();
                if index.bytes.saturating_add(bytes) <= self.max_bytes {
                    return;
                }
                index.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(path, _)| path.clone())
            };
            match oldest {
                Some(path) => self.remove(&path),
                None => return,
            }
        }
    }

    fn write_file(&self, path: &Path, cached: &Cached, source: &OwnedFd) -> io::Result<()> {
        let full = self.folder.join(path);
        let folder = full.parent().ok_or(io::ErrorKind::InvalidInput)?;
        // Weights are their owners' data: nobody else reads them.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut file = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(folder)?;
        let head = Head {
            owner: *blake3::hash(cached.owner.0.as_bytes()).as_bytes(),
            len: cached.content.len,
            fnv: cached.fnv,
            hash: cached.content.hash,
        };
        io::Write::write_all(file.as_file_mut(), &head.to_bytes())?;
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut done = 0;
        while done < cached.content.len {
            let left = usize::try_from(cached.content.len - done).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let space = buffer.get_mut(..left).unwrap_or_default();
            let got = rustix::io::retry_on_intr(|| rustix::io::pread(source.as_fd(), &mut *space, done))?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            io::Write::write_all(file.as_file_mut(), buffer.get(..got).unwrap_or_default())?;
            done += got as u64;
        }
        file.as_file().sync_all()?;
        file.persist(&full).map_err(|error| error.error)?;
        File::open(folder)?.sync_all()?;
        debug_assert_eq!(fs::metadata(&full).map(|found| found.size()).ok(), Some(done + HEAD_BYTES as u64));
        Ok(())
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
