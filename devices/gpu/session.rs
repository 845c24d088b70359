// SPDX-License-Identifier: MIT OR Apache-2.0
//! What one client, or one machine, has of the renderer: contexts, their memory, fences; and how much of each it may have.
//!
//! Both fronts stand on it: [`super::vtest`] for a container's process, virtio for a machine. A process has one session.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::virgl::{BlobKind, NewBlob, Passed, Renderer, VirglError};

/// How much one session may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Contexts at a time.
    pub max_contexts: u32,
    /// Pieces of mapped memory at a time.
    pub max_blobs: u32,
    /// Their bytes.
    pub max_blob_bytes: u64,
    /// Longest request.
    pub max_request_bytes: u64,
}

/// Why a session cannot do that.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The renderer cannot.
    #[error(transparent)]
    Renderer(#[from] VirglError),
    /// A context that is not there.
    #[error("there is no context {context}")]
    NoContext {
        /// Its number.
        context: u32,
    },
    /// A context that is there already.
    #[error("context {context} is there already")]
    SameContext {
        /// Its number.
        context: u32,
    },
    /// A resource that is there already.
    #[error("resource {resource} is there already")]
    SameResource {
        /// Its number.
        resource: u32,
    },
    /// Too many contexts.
    #[error("{max} contexts are open already (gpu.max_contexts_per_session)")]
    Contexts {
        /// Most.
        max: u32,
    },
    /// Too many pieces of memory.
    #[error("{max} pieces of memory are mapped already (gpu.max_blobs_per_session)")]
    Blobs {
        /// Most.
        max: u32,
    },
    /// Too much memory.
    #[error(
        "{wanted_bytes} more bytes do not fit: {held_bytes} are mapped, {max_bytes} is the most (gpu.max_bytes_per_session)"
    )]
    Bytes {
        /// What was asked for.
        wanted_bytes: u64,
        /// What there is.
        held_bytes: u64,
        /// Most.
        max_bytes: u64,
    },
}

/// The renderer with what a client has of it.
#[derive(Debug)]
pub struct Session {
    renderer: Renderer,
    limits: Limits,
    contexts: Vec<u32>,
    /// Bytes of each resource.
    blobs: BTreeMap<u32, u64>,
    held_bytes: u64,
    next_fence: u64,
}

impl Session {
    /// A session with nothing yet.
    #[must_use]
    pub fn new(renderer: Renderer, limits: Limits) -> Self {
        Self { renderer, limits, contexts: Vec::new(), blobs: BTreeMap::new(), held_bytes: 0, next_fence: 1 }
    }

    /// The renderer's capabilities: the newest version, and the words of it.
    #[must_use]
    pub fn capset(&self) -> (u32, &[u32]) {
        (self.renderer.capset_version(), self.renderer.capset())
    }

    /// How much it may have.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Bytes that are mapped, and in how many pieces.
    #[must_use]
    pub fn held(&self) -> (u64, usize) {
        (self.held_bytes, self.blobs.len())
    }

    /// Begins a context.
    ///
    /// # Errors
    /// When there is one of this number, there are too many, or the renderer makes none.
    pub fn open_context(&mut self, context: u32, name: &str) -> Result<(), SessionError> {
        if self.contexts.contains(&context) {
            return Err(SessionError::SameContext { context });
        }
        let max = self.limits.max_contexts;
        if u32::try_from(self.contexts.len()).is_ok_and(|open| open >= max) {
            return Err(SessionError::Contexts { max });
        }
        self.renderer.create_context(context, name)?;
        self.contexts.push(context);
        Ok(())
    }

    /// Ends a context.
    pub fn close_context(&mut self, context: u32) {
        if self.contexts.contains(&context) {
            self.contexts.retain(|open| *open != context);
            self.renderer.destroy_context(context);
        }
    }

    /// Makes a resource of a context's memory.
    ///
    /// # Errors
    /// When the number is taken, a limit is reached, or there is no such memory.
    pub fn create_blob(&mut self, blob: &NewBlob) -> Result<(), SessionError> {
        self.check(blob.context)?;
        if self.blobs.contains_key(&blob.resource) {
            return Err(SessionError::SameResource { resource: blob.resource });
        }
        let max = self.limits.max_blobs;
        if u32::try_from(self.blobs.len()).is_ok_and(|held| held >= max) {
            return Err(SessionError::Blobs { max });
        }
        let max_bytes = self.limits.max_blob_bytes;
        let held = self.held_bytes.checked_add(blob.size_bytes).filter(|bytes| *bytes <= max_bytes);
        let held_bytes = held.ok_or(SessionError::Bytes {
            wanted_bytes: blob.size_bytes,
            held_bytes: self.held_bytes,
            max_bytes,
        })?;
        self.renderer.create_blob(blob)?;
        self.held_bytes = held_bytes;
        self.blobs.insert(blob.resource, blob.size_bytes);
        Ok(())
    }

    /// A resource's memory, for somebody else to map.
    ///
    /// # Errors
    /// When the driver does not give it out.
    pub fn export_blob(&self, resource: u32) -> Result<(OwnedFd, BlobKind), SessionError> {
        Ok(self.renderer.export_blob(resource)?)
    }

    /// Forgets a resource; an unknown one is left alone.
    pub fn remove_blob(&mut self, context: u32, resource: u32) {
        if let Some(bytes) = self.blobs.remove(&resource) {
            self.held_bytes = self.held_bytes.saturating_sub(bytes);
            self.renderer.remove_resource(context, resource);
        }
    }

    /// Gives commands to a context.
    ///
    /// # Errors
    /// When they are none, or the renderer has ended.
    pub fn submit(&mut self, context: u32, commands: &mut [u32]) -> Result<(), SessionError> {
        self.check(context)?;
        Ok(self.renderer.submit(context, commands)?)
    }

    /// Notes a fence on a context's ring, which comes with [`Self::passed`]; returns its number, larger than all before.
    ///
    /// # Errors
    /// When the renderer has ended.
    pub fn fence(&mut self, context: u32, ring: u32) -> Result<u64, SessionError> {
        self.check(context)?;
        let fence = self.next_fence;
        self.next_fence = self.next_fence.wrapping_add(1);
        self.renderer.create_fence(context, ring, fence)?;
        Ok(fence)
    }

    /// Readable when fences of a context may have been passed.
    #[must_use]
    pub fn poll_fd(&self, context: u32) -> Option<BorrowedFd<'_>> {
        self.renderer.poll_fd(context)
    }

    /// Fences that have been passed.
    #[must_use]
    pub fn passed(&self, context: u32) -> Vec<Passed> {
        self.renderer.passed(context)
    }

    fn check(&self, context: u32) -> Result<(), SessionError> {
        if self.contexts.contains(&context) { Ok(()) } else { Err(SessionError::NoContext { context }) }
    }
}
