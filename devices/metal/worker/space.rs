// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client's address space: its buffers, by handle and by addresses that mean nothing outside it.
//!
//! Parts of a buffer may be segments: weights that the service holds once for all. Writing to one makes it the
//! client's own in place, so graphs that point into it stay right; content that lies across a segment's end
//! moves into the buffer, and the graphs that used the segment must go.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use super::engine::{Counted, Engine};
use crate::metal::ggml::{Memory, MemoryError, Place};

/// Where the first buffer lies: far from anything that a pointer of this process could be.
const FIRST_ADDRESS: u64 = 1 << 48;
/// Bases are multiples of this, and buffers at least that far apart.
const GAP: u64 = 2 << 20;

/// Why a place is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum SpaceError {
    /// No buffer of this client.
    #[error("buffer {handle} does not exist")]
    NoBuffer {
        /// The handle.
        handle: u64,
    },
    /// Not within the buffer.
    #[error("{bytes} bytes at {address:#x} are not within buffer {handle} ({len} bytes at {base:#x})")]
    Outside {
        /// The handle.
        handle: u64,
        /// Where they begin.
        address: u64,
        /// How many.
        bytes: u64,
        /// Where the buffer begins.
        base: u64,
        /// How long it is.
        len: u64,
    },
    /// The memory failed.
    #[error("memory failed")]
    Memory(#[from] MemoryError),
}

/// What is to be done at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Look only.
    Read,
    /// Change.
    Write,
}

#[derive(Debug)]
struct Segment {
    len: u64,
    memory: Rc<Memory>,
    /// While it is shared.
    shared: Option<Counted>,
}

#[derive(Debug)]
struct Buffer {
    base: u64,
    len: u64,
    memory: Rc<Memory>,
    segments: BTreeMap<u64, Segment>,
    /// A graph has used it, so its tensors are no longer just loaded.
    computed: bool,
    _quota: Counted,
}

impl Buffer {
    /// Offsets of the segments that touch a range.
    fn touched(&self, offset: u64, end: u64) -> Vec<u64> {
        if self.segments.is_empty() {
            return Vec::new();
        }
        let before = self.segments.range(..=offset).next_back();
        let first = before.filter(|(at, segment)| offset < *at + segment.len).map_or(offset, |(at, _)| *at);
        self.segments.range(first..end.max(first)).map(|(at, _)| *at).collect()
    }
}

/// A client's buffers.
#[derive(Debug)]
pub(super) struct Space {
    engine: Arc<Engine>,
    next_address: u64,
    next_handle: u64,
    buffers: HashMap<u64, Buffer>,
    moved: Vec<Rc<Memory>>,
}

impl Space {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self {
            engine,
            next_address: FIRST_ADDRESS,
            next_handle: 1,
            buffers: HashMap::new(),
            moved: Vec::new(),
        }
    }

    /// Makes a buffer; `None` when the container's share of memory is used up or the device has no room, which
    /// a client takes as "out of memory".
    pub(super) fn allocate(&mut self, len: u64) -> Option<u64> {
        let far = len.checked_next_multiple_of(GAP)?.checked_add(GAP)?;
        let next = self.next_address.checked_add(far).filter(|_| len > 0)?;
        let quota = self.engine.reserve(len)?;
        let memory = if self.engine.host {
            Memory::host(&self.engine.ggml, len, self.engine.config.huge_pages)
        } else {
            Memory::device(&self.engine.device, len)
        };
        let memory =
            memory.inspect_err(|error| tracing::warn!(len, %error, "no memory for a buffer")).ok()?;
        let handle = self.next_handle;
        self.buffers.insert(
            handle,
            Buffer {
                base: self.next_address,
                len,
                memory: Rc::new(memory),
                segments: BTreeMap::new(),
                computed: false,
                _quota: quota,
            },
        );
        self.next_handle += 1;
        self.next_address = next;
        Some(handle)
    }

    fn buffer(&mut self, handle: u64) -> Result<&mut Buffer, SpaceError> {
        self.buffers.get_mut(&handle).ok_or(SpaceError::NoBuffer { handle })
    }

    /// Where a buffer begins.
    ///
    /// # Errors
    /// When it does not exist.
    pub(super) fn base(&mut self, handle: u64) -> Result<u64, SpaceError> {
        self.buffer(handle).map(|buffer| buffer.base)
    }

    /// Forgets a buffer; its memories are given back, so that graphs that use them can go first.
    ///
    /// # Errors
    /// When it does not exist.
    pub(super) fn free(&mut self, handle: u64) -> Result<Vec<Rc<Memory>>, SpaceError> {
        let buffer = self.buffers.remove(&handle).ok_or(SpaceError::NoBuffer { handle })?;
        let mut memories = vec![buffer.memory];
        memories.extend(buffer.segments.into_values().map(|segment| segment.memory));
        Ok(memories)
    }

    /// Fills a whole buffer with one value.
    ///
    /// # Errors
    /// When it does not exist or its memory fails.
    pub(super) fn clear(&mut self, handle: u64, value: u8) -> Result<(), SpaceError> {
        let buffer = self.buffer(handle)?;
        let gone = std::mem::take(&mut buffer.segments);
        buffer.memory.fill(0, buffer.len, value)?;
        self.moved.extend(gone.into_values().map(|segment| segment.memory));
        Ok(())
    }

    /// The offset of a range in its buffer.
    fn offset(buffer: &Buffer, handle: u64, address: u64, bytes: u64) -> Result<u64, SpaceError> {
        let (base, len) = (buffer.base, buffer.len);
        address
            .checked_sub(base)
            .filter(|offset| offset.checked_add(bytes).is_some_and(|end| end <= len))
            .ok_or(SpaceError::Outside { handle, address, bytes, base, len })
    }

    /// Finds the memory of a range.
    ///
    /// # Errors
    /// When it is not within its buffer, or memory fails.
    pub(super) fn place(
        &mut self,
        handle: u64,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Place, SpaceError> {
        let buffer = self.buffers.get_mut(&handle).ok_or(SpaceError::NoBuffer { handle })?;
        let offset = Self::offset(buffer, handle, address, bytes)?;
        let touched = buffer.touched(offset, offset + bytes);
        let Some(first) = touched.first() else {
            return Ok(Place { memory: Rc::clone(&buffer.memory), offset, bytes });
        };
        if let Some(segment) = buffer.segments.get_mut(first)
            && *first <= offset
            && offset + bytes <= *first + segment.len
        {
            if access == Access::Write && segment.memory.is_shared() {
                segment.memory.make_private()?;
                segment.shared = None;
            }
            return Ok(Place { memory: Rc::clone(&segment.memory), offset: offset - *first, bytes });
        }
        for at in touched {
            if let Some(segment) = buffer.segments.remove(&at) {
                buffer.memory.copy_from(at, &segment.memory, 0, segment.len)?;
                self.moved.push(segment.memory);
            }
        }
        Ok(Place { memory: Rc::clone(&buffer.memory), offset, bytes })
    }

    /// Whether a range may become a segment: a buffer that no graph has used, on a device with plain memory.
    pub(super) fn may_share(&mut self, handle: u64, address: u64, bytes: u64) -> Result<bool, SpaceError> {
        let host = self.engine.host;
        let buffer = self.buffer(handle)?;
        Self::offset(buffer, handle, address, bytes)?;
        Ok(host && !buffer.computed)
    }

    /// Puts shared memory in place of a range.
    ///
    /// # Errors
    /// When it is not within its buffer, or memory fails.
    pub(super) fn share(&mut self, handle: u64, address: u64, memory: Memory) -> Result<(), SpaceError> {
        let shared = Some(self.engine.count_shared(memory.len()));
        let len = memory.len();
        let buffer = self.buffers.get_mut(&handle).ok_or(SpaceError::NoBuffer { handle })?;
        let offset = Self::offset(buffer, handle, address, len)?;
        for at in buffer.touched(offset, offset + len) {
            let Some(old) = buffer.segments.remove(&at) else { continue };
            if at < offset || at + old.len > offset + len {
                buffer.memory.copy_from(at, &old.memory, 0, old.len)?;
            }
            self.moved.push(old.memory);
        }
        let segment = Segment { len, memory: Rc::new(memory), shared };
        buffer.segments.insert(offset, segment);
        Ok(())
    }

    /// Notes that a graph uses a buffer.
    pub(super) fn mark_computed(&mut self, handle: u64) {
        if let Some(buffer) = self.buffers.get_mut(&handle) {
            buffer.computed = true;
        }
    }

    /// Gives back what was taken with [`Space::take_moved`], for who drops the graphs.
    pub(super) fn put_moved(&mut self, moved: Vec<Rc<Memory>>) {
        self.moved.extend(moved);
    }

    /// Memories that content has moved out of since this was last asked.
    pub(super) fn take_moved(&mut self) -> Vec<Rc<Memory>> {
        std::mem::take(&mut self.moved)
    }
}
