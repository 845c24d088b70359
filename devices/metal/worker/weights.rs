// SPDX-License-Identifier: MIT OR Apache-2.0
//! Weights that several containers upload and the service holds once.
//!
//! An upload is received into a file of its own, named by its hash and given to the service; what comes back is
//! compared in full before it takes the upload's place, so neither a hash nor the service is trusted with
//! content. A service without room costs one copy, nothing else.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::engine::Engine;
use super::link::Link;
use crate::metal::control::{FromWorker, WeightKey};
use crate::metal::ggml::{Memory, MemoryError};
use crate::metal::rpc::Reader;

/// Smaller uploads are not worth a question.
pub(super) const MIN_BYTES: u64 = 64 << 10;

/// ggml's hash of an upload: FNV-1a with 64 bits.
pub(super) fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Why an upload could not be received.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadError {
    /// The client's stream failed.
    #[error("upload ended early")]
    Stream(#[source] std::io::Error),
    /// Memory failed.
    #[error("no memory for an upload")]
    Memory(#[from] MemoryError),
    /// No file for it.
    #[error("no file for an upload")]
    File(#[source] std::io::Error),
}

/// An upload's bytes in memory of its own, with the file behind it.
#[derive(Debug)]
pub(super) struct Upload {
    memory: Memory,
    file: OwnedFd,
}

impl Upload {
    /// Takes the bytes from a client's stream.
    ///
    /// # Errors
    /// When the stream ends before, or there is no memory.
    pub(super) fn receive<S: Read>(
        engine: &Engine,
        reader: &mut Reader<S>,
        len: u64,
    ) -> Result<Self, UploadError> {
        let file =
            memfd_create("lighter-weight", MemfdFlags::CLOEXEC).map_err(|e| UploadError::File(e.into()))?;
        ftruncate(&file, len).map_err(|errno| UploadError::File(errno.into()))?;
        let for_memory = file.try_clone().map_err(UploadError::File)?;
        let memory = Memory::file(&engine.ggml, for_memory, len)?;
        memory.write(0, len, |bytes| reader.read_into(bytes))?.map_err(UploadError::Stream)?;
        Ok(Self { memory, file })
    }

    /// The shared memory that holds the same bytes, if the service has it.
    pub(super) fn shared(&self, engine: &Engine, link: &Link) -> Option<Memory> {
        let len = self.memory.len();
        let named = self.memory.read(0, len, |bytes| (blake3::hash(bytes).to_hex().to_string(), fnv(bytes)));
        let (blake3, fnv) = named.ok()?;
        let key = WeightKey { len, blake3 };
        let file = link.ask(|seq| FromWorker::Keep { seq, key, fnv }, &[self.file.as_fd()])?;
        let shared = Memory::shared(&engine.ggml, file, len, engine.config.huge_pages);
        let shared =
            shared.inspect_err(|error| tracing::warn!(%error, "shared weight is not usable")).ok()?;
        let equal = self.memory.read(0, len, |own| shared.read(0, len, |theirs| own == theirs));
        if matches!(equal, Ok(Ok(true))) {
            Some(shared)
        } else {
            tracing::warn!(len, "shared weight differs from the upload, so it is not used");
            None
        }
    }

    /// Copies the bytes to where they belong when they are not shared.
    ///
    /// # Errors
    /// When they do not fit.
    pub(super) fn copy_to(&self, memory: &Memory, offset: u64) -> Result<(), UploadError> {
        Ok(memory.copy_from(offset, &self.memory, 0, self.memory.len())?)
    }
}

/// Memory with content that this owner has uploaded before, by ggml's hash.
pub(super) fn find(engine: &Engine, link: &Link, len: u64, hash: u64) -> Option<Memory> {
    let file = link.ask(|seq| FromWorker::Find { seq, len, fnv: hash }, &[])?;
    let shared = Memory::shared(&engine.ggml, file, len, engine.config.huge_pages);
    let shared = shared.inspect_err(|error| tracing::warn!(%error, "shared weight is not usable")).ok()?;
    let same = shared.read(0, len, |bytes| fnv(bytes) == hash);
    if matches!(same, Ok(true)) { Some(shared) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_ggmls() {
        assert_eq!(fnv(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
