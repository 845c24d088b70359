// SPDX-License-Identifier: MIT OR Apache-2.0
//! The models that one container has sent: sealed memory files by the hash of their bytes.
//!
//! A file comes sealed from the container, or is filled here and sealed; after that nobody can change it, so its hash,
//! computed here, holds for ever. A container may have so many models and so many bytes of them; those that are not in
//! use go first. What one container sent no other one learns of, and all goes with the grant.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lighter_frames::{Dim, Model, Port};
use rustix::fs::{MemfdFlags, SealFlags, memfd_create};

use super::super::control::ModelHash;

/// What a model's file must be sealed against.
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);
const CHUNK_BYTES: usize = 1 << 20;

/// Why a model was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum ModelError {
    /// The container has too much already.
    #[error(
        "a model of {bytes} bytes is over this container's limit of {limit} bytes for all its models \
         (ane.max_model_bytes_per_container)"
    )]
    Bytes {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The container has too many already.
    #[error("this container has {limit} models in use already (ane.max_models_per_container)")]
    Count {
        /// The limit.
        limit: u32,
    },
    /// The descriptor is no sealed memory file.
    #[error("the model's file is not sealed against writing, shrinking and growing: {found}")]
    Seals {
        /// What was found.
        found: String,
    },
    /// The file is not as long as was said.
    #[error("the model's file is {found} bytes long and not {said}")]
    Length {
        /// What was found.
        found: u64,
        /// What the frame said.
        said: u64,
    },
    /// Its bytes are not those whose hash was given.
    #[error("the model's bytes do not have the hash that was given for them")]
    Hash,
    /// The connection or a file failed.
    #[error("the model's bytes could not be read")]
    Read(#[source] std::io::Error),
    /// No memory for it.
    #[error("memory file of {bytes} bytes for a model could not be made")]
    Memory {
        /// Its length.
        bytes: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// A model's bytes.
#[derive(Debug)]
pub(super) struct ModelFile {
    /// BLAKE3 of them.
    pub(super) hash: [u8; 32],
    pub(super) file: OwnedFd,
    pub(super) bytes: u64,
}

/// All models of one container.
#[derive(Debug)]
pub(super) struct Models {
    max_bytes: u64,
    max_count: u32,
    inner: Mutex<Inner>,
    /// Held while a file is hashed: one container keeps one processor busy with that.
    hashing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Inner {
    files: HashMap<[u8; 32], (Arc<ModelFile>, u64)>,
    /// Bytes and number of the files, and of those that are on their way.
    bytes: u64,
    count: u32,
    clock: u64,
}

/// Room for a model that is on its way; given back when it does not arrive.
#[derive(Debug)]
pub(super) struct Room<'a> {
    models: &'a Models,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut inner = self.models.lock();
        inner.bytes = inner.bytes.saturating_sub(self.bytes);
        inner.count = inner.count.saturating_sub(1);
    }
}

impl Models {
    pub(super) fn new(max_bytes: u64, max_count: u32) -> Self {
        Self { max_bytes, max_count, inner: Mutex::default(), hashing: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all models.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// A model that the container has sent before.
    pub(super) fn find(&self, hash: &[u8; 32], bytes: u64) -> Option<Arc<ModelFile>> {
        let mut inner = self.lock();
        inner.clock += 1;
        let clock = inner.clock;
        let (file, used) = inner.files.get_mut(hash)?;
        *used = clock;
        (file.bytes == bytes).then(|| Arc::clone(file))
    }

    /// Room for one more, made by dropping models that nobody uses.
    pub(super) fn room(&self, bytes: u64) -> Result<Room<'_>, ModelError> {
        let mut inner = self.lock();
        if bytes > self.max_bytes {
            return Err(ModelError::Bytes { bytes, limit: self.max_bytes });
        }
        while inner.bytes.saturating_add(bytes) > self.max_bytes || inner.count >= self.max_count {
            let unused = |(_, (file, _)): &(&[u8; 32], &(Arc<ModelFile>, u64))| Arc::strong_count(file) == 1;
            let oldest = inner.files.iter().filter(unused).min_by_key(|(_, (_, used))| *used);
            match oldest.map(|(hash, (file, _))| (*hash, file.bytes)) {
                Some((hash, bytes)) => {
                    inner.files.remove(&hash);
                    inner.bytes = inner.bytes.saturating_sub(bytes);
                    inner.count = inner.count.saturating_sub(1);
                }
                None if inner.count >= self.max_count => {
                    return Err(ModelError::Count { limit: self.max_count });
                }
                None => return Err(ModelError::Bytes { bytes, limit: self.max_bytes }),
            }
        }
        inner.bytes += bytes;
        inner.count += 1;
        Ok(Room { models: self, bytes })
    }

    fn keep(&self, room: Room<'_>, hash: [u8; 32], file: OwnedFd) -> Arc<ModelFile> {
        let bytes = room.bytes;
        let mut inner = self.lock();
        inner.clock += 1;
        let clock = inner.clock;
        if let Some((known, used)) = inner.files.get_mut(&hash) {
            // Two streams of one container sent it at once.
            *used = clock;
            let known = Arc::clone(known);
            drop(inner);
            drop(room);
            return known;
        }
        let kept = Arc::new(ModelFile { hash, file, bytes });
        inner.files.insert(hash, (Arc::clone(&kept), clock));
        drop(inner);
        // The room is the file's now.
        std::mem::forget(room);
        kept
    }

    /// Takes a container's memory file.
    pub(super) fn take_file(
        &self,
        room: Room<'_>,
        file: OwnedFd,
        said: [u8; 32],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Arc<ModelFile>, ModelError> {
        check_seals(&file)?;
        let found = rustix::fs::fstat(&file).map_err(|errno| ModelError::Read(errno.into()))?;
        let found = u64::try_from(found.st_size).unwrap_or(0);
        if found != room.bytes {
            return Err(ModelError::Length { found, said: room.bytes });
        }
        let turn = self.hashing.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = hash_of(&file, found, cancelled)?;
        drop(turn);
        if hash != said {
            return Err(ModelError::Hash);
        }
        Ok(self.keep(room, hash, file))
    }

    /// Takes a model's bytes out of a stream.
    pub(super) fn take_stream(
        &self,
        room: Room<'_>,
        from: &mut dyn Read,
        said: [u8; 32],
    ) -> Result<Arc<ModelFile>, ModelError> {
        let bytes = room.bytes;
        let failed = |errno: rustix::io::Errno| ModelError::Memory { bytes, source: errno.into() };
        let file =
            memfd_create("lighter-model", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        let mut hasher = blake3::Hasher::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut done = 0;
        while done < bytes {
            let left = usize::try_from(bytes - done).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let space = chunk.get_mut(..left).unwrap_or_default();
            from.read_exact(space).map_err(ModelError::Read)?;
            hasher.update(space);
            // Grows with what has come, not with what was promised.
            write_all(&file, space, done).map_err(failed)?;
            done += left as u64;
        }
        let hash = *hasher.finalize().as_bytes();
        if hash != said {
            return Err(ModelError::Hash);
        }
        rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::SEAL).map_err(failed)?;
        Ok(self.keep(room, hash, file))
    }
}

fn write_all(file: &OwnedFd, bytes: &[u8], offset: u64) -> Result<(), rustix::io::Errno> {
    let (mut rest, mut offset) = (bytes, offset);
    while !rest.is_empty() {
        let put = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, rest, offset))?;
        rest = rest.get(put..).unwrap_or_default();
        offset += put as u64;
    }
    Ok(())
}

/// Refuses what anybody could still change.
pub(super) fn check_seals(file: impl AsFd) -> Result<(), ModelError> {
    match rustix::fs::fcntl_get_seals(file) {
        Ok(seals) if seals.contains(SEALS) => Ok(()),
        Ok(seals) => Err(ModelError::Seals { found: format!("it has the seals {:#x}", seals.bits()) }),
        Err(_) => Err(ModelError::Seals { found: "it is no memory file".to_owned() }),
    }
}

fn hash_of(file: &OwnedFd, bytes: u64, cancelled: &dyn Fn() -> bool) -> Result<[u8; 32], ModelError> {
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut done = 0;
    while done < bytes {
        if cancelled() {
            return Err(ModelError::Read(std::io::ErrorKind::Interrupted.into()));
        }
        let got = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *chunk, done))
            .map_err(|errno| ModelError::Read(errno.into()))?;
        if got == 0 {
            return Err(ModelError::Read(std::io::ErrorKind::UnexpectedEof.into()));
        }
        hasher.update(chunk.get(..got).unwrap_or_default());
        done += got as u64;
    }
    Ok(*hasher.finalize().as_bytes())
}

/// What names a model: its bytes and its ports, since equal bytes may have their ports in another order; `units` besides,
/// where models with different pins are different models.
pub(super) fn identity(hash: &[u8; 32], model: &Model, units: Option<&str>) -> ModelHash {
    let mut hasher = blake3::Hasher::new_derive_key("lighter.sh ane model 1");
    hasher.update(hash);
    let mut number = |value: u64| {
        hasher.update(&value.to_le_bytes());
    };
    number(model.proto_bytes);
    number(model.weights_bytes);
    for ports in [&model.inputs, &model.outputs] {
        hasher.update(&(ports.len() as u64).to_le_bytes());
        for port in ports {
            add_port(&mut hasher, port);
        }
    }
    if let Some(units) = units {
        hasher.update(units.as_bytes());
    }
    ModelHash(*hasher.finalize().as_bytes())
}

fn add_port(hasher: &mut blake3::Hasher, port: &Port) {
    hasher.update(&(port.name.len() as u64).to_le_bytes());
    hasher.update(port.name.as_bytes());
    hasher.update(&[port.element.number()]);
    let Some(dims) = &port.dims else {
        hasher.update(&[u8::MAX]);
        return;
    };
    hasher.update(&(dims.len() as u64).to_le_bytes());
    for dim in dims {
        let (tag, value) = match dim {
            Dim::Fixed(value) => (1, *value),
            Dim::Free => (0, 0),
        };
        hasher.update(&[tag]);
        hasher.update(&value.to_le_bytes());
    }
}

#[cfg(test)]
#[path = "models_tests.rs"]
mod tests;
