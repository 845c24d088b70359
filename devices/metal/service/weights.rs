// SPDX-License-Identifier: MIT OR Apache-2.0
//! Weights that several containers hold once.
//!
//! A worker uploads a whole tensor ([`WeightStore::keep`]); the service copies and hashes the bytes itself, since a
//! worker may lie or change them meanwhile, and hands out read-only descriptors of one file per content. A
//! hash query is answered only from what the same owner has uploaded ([`WeightStore::find`]): ggml's own hash
//! is 64 bits that anybody can collide, so it must not open other owners' weights.
//!
//! The files lie on a private tmpfs with huge pages that is mounted nowhere, else in sealed memfds. A file goes
//! with the last worker that uses it.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lighter_wire::Owner;

use super::super::control::WeightKey;
use super::backing::{Backing, BackingError, open_again};
use super::cache::{Cache, Cached};

/// Bytes that are copied and hashed at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Why an upload is not kept. The worker goes on with its own copy.
#[derive(Debug, thiserror::Error)]
pub(super) enum WeightError {
    /// The key is no hash of BLAKE3, or says that the content is empty.
    #[error("key of {len} bytes and hash {blake3:?} is no name of a weight")]
    Key {
        /// Bytes.
        len: u64,
        /// The hash.
        blake3: String,
    },
    /// What came beside it is no file of this length.
    #[error("descriptor of an upload is no file of {len} bytes")]
    Descriptor {
        /// Bytes that it should have.
        len: u64,
    },
    /// The content is another one.
    #[error("upload of {len} bytes does not have the hash that the worker named")]
    Hash {
        /// Bytes.
        len: u64,
    },
    /// All shared weights together would be too much.
    #[error("shared weights would exceed {limit} bytes")]
    Full {
        /// The limit.
        limit: u64,
    },
    /// There is no descriptor for one more.
    #[error("there are {limit} shared weights already")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// One container would hold more than it may.
    #[error("the container would hold more than {limit} bytes of shared weights")]
    Quota {
        /// The limit.
        limit: u64,
    },
    /// The container's grant ended meanwhile.
    #[error("the copy was cancelled")]
    Cancelled,
    /// The upload could not be read.
    #[error("upload could not be read")]
    Read(#[source] std::io::Error),
    /// The copy could not be made.
    #[error(transparent)]
    Backing(#[from] BackingError),
}

/// BLAKE3 of a content.
pub(super) type Hash = [u8; 32];

/// Identifies a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Content {
    pub(super) len: u64,
    pub(super) hash: Hash,
}

/// Asked between chunks; true ends the copy.
pub(super) type Cancelled<'a> = &'a dyn Fn() -> bool;

/// The weights of all containers.
#[derive(Debug)]
pub(super) struct WeightStore {
    backing: Backing,
    limits: Limits,
    inner: Mutex<Inner>,
    cache: Option<Cache>,
}

/// How much the store may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of all contents.
    pub(super) bytes: u64,
    /// Contents: each takes a descriptor of the service.
    pub(super) count: usize,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Content, Entry>,
    /// Bytes that each worker uses.
    used_bytes: HashMap<u64, u64>,
    /// What an owner has uploaded, by length and ggml's hash.
    by_owner: HashMap<(Owner, u64, u64), Content>,
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    file: Arc<OwnedFd>,
    users: HashSet<u64>,
}

/// What the store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Totals {
    /// Contents.
    pub(super) count: u64,
    /// Their bytes.
    pub(super) bytes: u64,
    /// Bytes that the containers would hold besides without sharing.
    pub(super) saved_bytes: u64,
}

impl WeightStore {
    pub(super) fn new(backing: Backing, limits: Limits, cache: Option<Cache>) -> Self {
        Self { backing, limits, inner: Mutex::default(), cache }
    }

    /// A user of the store: what it holds is let go when it is dropped.
    /// It gets at most `max_bytes`.
    pub(super) fn holder(self: &Arc<Self>, worker: u64, owner: &Owner, max_bytes: u64) -> Holder {
        Holder { store: Arc::clone(self), worker, owner: owner.clone(), max_bytes }
    }

    pub(super) fn totals(&self) -> Totals {
        let inner = self.lock();
        let saved = |(content, entry): (&Content, &Entry)| {
            content.len.saturating_mul((entry.users.len() as u64).saturating_sub(1))
        };
        Totals {
            count: inner.entries.len() as u64,
            bytes: inner.bytes,
            saved_bytes: inner.entries.iter().map(saved).fold(0, u64::saturating_add),
        }
    }

    /// Bytes on disk, when there is a disk cache.
    pub(super) fn cache_bytes(&self) -> Option<u64> {
        self.cache.as_ref().map(Cache::bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A read-only descriptor of a content that is there, with `worker` as one of its users.
    fn take(&self, content: Content, worker: u64) -> Option<Arc<OwnedFd>> {
        let mut inner = self.lock();
        let Inner { entries, used_bytes, .. } = &mut *inner;
        Some(entries.get_mut(&content)?.join(content, worker, used_bytes))
    }

    /// Adds a content, or joins one that came meanwhile.
    fn insert(&self, content: Content, file: OwnedFd, worker: u64) -> Result<Arc<OwnedFd>, WeightError> {
        let mut inner = self.lock();
        if !inner.entries.contains_key(&content) {
            inner.check_room(self.limits, content)?;
            inner.bytes = inner.bytes.saturating_add(content.len);
        }
        let Inner { entries, used_bytes, .. } = &mut *inner;
        let entry =
            entries.entry(content).or_insert_with(|| Entry { file: Arc::new(file), users: HashSet::new() });
        Ok(entry.join(content, worker, used_bytes))
    }

    fn release(&self, worker: u64) {
        let mut inner = self.lock();
        let Inner { entries, by_owner, bytes, used_bytes } = &mut *inner;
        used_bytes.remove(&worker);
        entries.retain(|content, entry| {
            entry.users.remove(&worker);
            let is_used = !entry.users.is_empty();
            if !is_used {
                *bytes = bytes.saturating_sub(content.len);
            }
            is_used
        });
        by_owner.retain(|_, content| entries.contains_key(content));
    }
}

impl Inner {
    fn check_room(&self, limits: Limits, content: Content) -> Result<(), WeightError> {
        if self.bytes.saturating_add(content.len) > limits.bytes {
            return Err(WeightError::Full { limit: limits.bytes });
        }
        if self.entries.len() >= limits.count {
            return Err(WeightError::TooMany { limit: limits.count });
        }
        Ok(())
    }
}

impl Entry {
    fn join(&mut self, content: Content, worker: u64, used_bytes: &mut HashMap<u64, u64>) -> Arc<OwnedFd> {
        if self.users.insert(worker) {
            let used = used_bytes.entry(worker).or_default();
            *used = used.saturating_add(content.len);
        }
        Arc::clone(&self.file)
    }
}

/// One worker's use of the store.
#[derive(Debug)]
pub(super) struct Holder {
    store: Arc<WeightStore>,
    worker: u64,
    owner: Owner,
    max_bytes: u64,
}

impl Holder {
    /// Takes an upload over; returns the descriptor to hand out.
    pub(super) fn keep(
        &self,
        key: &WeightKey,
        fnv: u64,
        upload: impl AsFd,
        cancelled: Cancelled<'_>,
    ) -> Result<OwnedFd, WeightError> {
        let content = parse_key(key)?;
        check_file(&upload, content.len)?;
        let store = &self.store;
        let known = {
            let inner = store.lock();
            self.check_quota(&inner, content.len)?;
            let known = inner.entries.contains_key(&content);
            if !known {
                inner.check_room(store.limits, content)?;
            }
            known
        };
        // Also a content that is there is read in full: naming a hash must not be enough to get the bytes.
        if known {
            copy(&upload, 0, content, None, cancelled)?;
        }
        let file = match known.then(|| store.take(content, self.worker)).flatten() {
            Some(file) => file,
            None => {
                let target = store.backing.create(content.len)?;
                copy(&upload, 0, content, Some(&target), cancelled)?;
                store.insert(content, target.finish()?, self.worker)?
            }
        };
        store.lock().by_owner.insert((self.owner.clone(), content.len, fnv), content);
        if let Some(cache) = &store.cache {
            cache.put(Cached { owner: self.owner.clone(), fnv, content }, &file);
        }
        Ok(open_again(&file)?)
    }

    /// What a worker says of its own account is not relied on.
    fn check_quota(&self, inner: &Inner, len: u64) -> Result<(), WeightError> {
        let used = inner.used_bytes.get(&self.worker).copied().unwrap_or(0);
        if used.saturating_add(len) > self.max_bytes {
            return Err(WeightError::Quota { limit: self.max_bytes });
        }
        Ok(())
    }

    /// Answers a hash query from this owner's uploads, in memory or on disk.
    pub(super) fn find(&self, len: u64, fnv: u64, cancelled: Cancelled<'_>) -> Option<OwnedFd> {
        let name = (self.owner.clone(), len, fnv);
        let known = {
            let inner = self.store.lock();
            self.check_quota(&inner, len).ok()?;
            inner.by_owner.get(&name).copied()
        };
        if let Some(file) = known.and_then(|content| self.store.take(content, self.worker)) {
            return open_again(&file).ok();
        }
        let (content, source, offset) = self.store.cache.as_ref()?.get(&self.owner, len, fnv)?;
        let file = self.load(content, &source, offset, cancelled);
        match file {
            Ok(file) => {
                self.store.lock().by_owner.insert(name, content);
                open_again(&file).ok()
            }
            Err(error) => {
                if matches!(error, WeightError::Hash { .. } | WeightError::Read(_)) {
                    tracing::warn!(%error, len, "entry of the disk cache is damaged and is removed");
                    if let Some(cache) = &self.store.cache {
                        cache.remove(&self.owner, len, fnv);
                    }
                } else {
                    tracing::warn!(%error, len, "entry of the disk cache could not be loaded");
                }
                None
            }
        }
    }

    fn load(
        &self,
        content: Content,
        source: &OwnedFd,
        offset: u64,
        cancelled: Cancelled<'_>,
    ) -> Result<Arc<OwnedFd>, WeightError> {
        if let Some(file) = self.store.take(content, self.worker) {
            return Ok(file);
        }
        let target = self.store.backing.create(content.len)?;
        copy(source, offset, content, Some(&target), cancelled)?;
        self.store.insert(content, target.finish()?, self.worker)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.store.release(self.worker);
    }
}

fn parse_key(key: &WeightKey) -> Result<Content, WeightError> {
    match blake3::Hash::from_hex(&key.blake3) {
        Ok(hash) if key.len > 0 => Ok(Content { len: key.len, hash: *hash.as_bytes() }),
        _ => Err(WeightError::Key { len: key.len, blake3: key.blake3.chars().take(80).collect() }),
    }
}

fn check_file(upload: impl AsFd, len: u64) -> Result<(), WeightError> {
    let found = rustix::fs::fstat(upload).map_err(|errno| WeightError::Read(errno.into()))?;
    let is_file = rustix::fs::FileType::from_raw_mode(found.st_mode).is_file();
    if is_file && u64::try_from(found.st_size) == Ok(len) {
        Ok(())
    } else {
        Err(WeightError::Descriptor { len })
    }
}

/// Reads `content.len` bytes from `offset`, copies them when there is a target, and compares the hash of exactly
/// the bytes that were copied. The source may change meanwhile: every byte is read once.
fn copy(
    source: impl AsFd,
    offset: u64,
    content: Content,
    target: Option<&super::backing::Target<'_>>,
    cancelled: Cancelled<'_>,
) -> Result<(), WeightError> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut hasher = blake3::Hasher::new();
    let mut done = 0;
    while done < content.len {
        if cancelled() {
            return Err(WeightError::Cancelled);
        }
        let left = usize::try_from(content.len - done).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let space = buffer.get_mut(..left).unwrap_or_default();
        let got = rustix::io::retry_on_intr(|| rustix::io::pread(&source, &mut *space, offset + done))
            .map_err(|errno| WeightError::Read(errno.into()))?;
        if got == 0 {
            let cut = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the content is cut short");
            return Err(WeightError::Read(cut));
        }
        let bytes = buffer.get(..got).unwrap_or_default();
        hasher.update(bytes);
        if let Some(target) = target {
            target.write(bytes, done)?;
        }
        done += got as u64;
    }
    if *hasher.finalize().as_bytes() == content.hash {
        Ok(())
    } else {
        Err(WeightError::Hash { len: content.len })
    }
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
