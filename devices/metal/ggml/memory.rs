// SPDX-License-Identifier: MIT OR Apache-2.0
//! A piece of memory that tensors lie in, on the host or on a device, as ggml's buffer.
//!
//! Places in it are offsets that are checked here; addresses stay inside this folder. One thread owns it.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::backend::Device;
use super::library::Ggml;
use super::mapping::{Mapping, MappingError};
use super::raw::{Opaque, Tensor};

/// ggml's number of the type of single bytes.
const BYTES_KIND: i32 = 24;

/// Why memory could not be made or reached.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host's memory could not be mapped.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The device has no room for it.
    #[error("{device} has no room for a buffer of {bytes} bytes")]
    Device {
        /// The device.
        device: String,
        /// The size.
        bytes: u64,
    },
    /// A place outside it.
    #[error("bytes {offset}+{bytes} lie outside a buffer of {len}")]
    Outside {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// Bytes there are.
        len: u64,
    },
    /// It is being read or written already.
    #[error("buffer is in use")]
    Busy,
    /// Not of the kind that this needs.
    #[error("buffer is not the host's memory")]
    NotHost,
}

#[derive(Debug)]
enum Store {
    Host(Mapping),
    Device,
}

/// A piece of memory.
#[derive(Debug)]
pub struct Memory {
    ggml: Arc<Ggml>,
    raw: Opaque,
    base: usize,
    len: u64,
    /// Held while a slice of the content exists, so that no two can.
    access: RefCell<()>,
    // After `raw`'s use in `drop`, since fields go in order after it.
    store: Store,
}

impl Memory {
    fn over(ggml: &Arc<Ggml>, mapping: Mapping, len: u64) -> Result<Self, MemoryError> {
        let size = usize::try_from(mapping.len()).map_err(|_| MappingError::Size { bytes: len })?;
        // SAFETY: the mapping has that size, is aligned to pages, and lives as long as the buffer, which does
        // not own it.
        let raw = unsafe { (ggml.f.ggml_backend_cpu_buffer_from_ptr)(mapping.start().cast(), size) };
        if raw.is_null() {
            return Err(MemoryError::Device { device: "host".to_owned(), bytes: len });
        }
        let base = mapping.start() as usize;
        Ok(Self {
            ggml: Arc::clone(ggml),
            raw,
            base,
            len,
            access: RefCell::new(()),
            store: Store::Host(mapping),
        })
    }

    /// The host's memory, zeroed.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn host(ggml: &Arc<Ggml>, len: u64, huge_pages: bool) -> Result<Self, MemoryError> {
        Self::over(ggml, Mapping::private(len, huge_pages)?, len)
    }

    /// A file of the service's, shared and not to be written before [`Memory::make_private`].
    ///
    /// # Errors
    /// When the file is shorter or the system refuses.
    pub fn shared(ggml: &Arc<Ggml>, file: OwnedFd, len: u64, huge_pages: bool) -> Result<Self, MemoryError> {
        Self::over(ggml, Mapping::shared(file, len, huge_pages)?, len)
    }

    /// A file that this process made, to be written.
    ///
    /// # Errors
    /// When the file is shorter or the system refuses.
    pub fn file(ggml: &Arc<Ggml>, file: OwnedFd, len: u64) -> Result<Self, MemoryError> {
        Self::over(ggml, Mapping::writable(file, len)?, len)
    }

    /// The device's own memory.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn device(device: &Device, len: u64) -> Result<Self, MemoryError> {
        let none = || MemoryError::Device { device: device.name(), bytes: len };
        let size = usize::try_from(len).map_err(|_| none())?;
        let f = &device.ggml.f;
        // SAFETY: the buffer type belongs to the device.
        let raw = unsafe { (f.ggml_backend_buft_alloc_buffer)(device.buffer_type(), size) };
        if raw.is_null() {
            return Err(none());
        }
        // SAFETY: the buffer is valid.
        let (base, have) = unsafe {
            ((f.ggml_backend_buffer_get_base)(raw) as usize, (f.ggml_backend_buffer_get_size)(raw))
        };
        let ggml = Arc::clone(&device.ggml);
        let memory = Self { ggml, raw, base, len, access: RefCell::new(()), store: Store::Device };
        if (have as u64) < len { Err(none()) } else { Ok(memory) }
    }

    /// Bytes that tensors may lie in.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is plain memory of this process.
    #[must_use]
    pub fn is_host(&self) -> bool {
        matches!(self.store, Store::Host(_))
    }

    /// Whether it is shared, and so not to be written.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(&self.store, Store::Host(mapping) if mapping.is_shared())
    }

    /// Makes shared memory this client's own, in place.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn make_private(&self) -> Result<(), MemoryError> {
        match &self.store {
            Store::Host(mapping) => Ok(mapping.make_private()?),
            Store::Device => Ok(()),
        }
    }

    /// The offset as one of this process, if the bytes behind it lie within.
    fn within(&self, offset: u64, bytes: u64) -> Result<usize, MemoryError> {
        let outside = MemoryError::Outside { offset, bytes, len: self.len };
        match offset.checked_add(bytes) {
            Some(end) if end <= self.len => usize::try_from(offset).map_err(|_| outside),
            _ => Err(outside),
        }
    }

    pub(super) fn buffer(&self) -> Opaque {
        self.raw
    }

    /// The address of a place, if the bytes behind it lie within.
    pub(super) fn address(&self, offset: u64, bytes: u64) -> Result<Opaque, MemoryError> {
        let offset = self.within(offset, bytes)?;
        Ok(match &self.store {
            // SAFETY: within the mapping, as just found.
            Store::Host(mapping) => unsafe { mapping.start().add(offset) }.cast(),
            // A device's base may be a number that only the device understands.
            Store::Device => (self.base + offset) as Opaque,
        })
    }

    /// Looks at content in place.
    ///
    /// # Errors
    /// When it is not the host's memory, not within, or being written.
    pub fn read<R>(&self, offset: u64, bytes: u64, look: impl FnOnce(&[u8]) -> R) -> Result<R, MemoryError> {
        let Store::Host(mapping) = &self.store else { return Err(MemoryError::NotHost) };
        let (start, len) = (self.within(offset, bytes)?, usize::try_from(bytes).unwrap_or(0));
        let _held = self.access.try_borrow().map_err(|_| MemoryError::Busy)?;
        // SAFETY: within the mapping, which is readable; writes need the access that is held, and no graph runs
        // on this thread's host memory while this runs.
        Ok(look(unsafe { std::slice::from_raw_parts(mapping.start().add(start), len) }))
    }

    /// Changes content in place.
    ///
    /// # Errors
    /// When it is not the host's memory or is shared, not within, or in use.
    pub fn write<R>(
        &self,
        offset: u64,
        bytes: u64,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, MemoryError> {
        let Store::Host(mapping) = &self.store else { return Err(MemoryError::NotHost) };
        if mapping.is_shared() {
            return Err(MemoryError::Busy);
        }
        let (start, len) = (self.within(offset, bytes)?, usize::try_from(bytes).unwrap_or(0));
        let _held = self.access.try_borrow_mut().map_err(|_| MemoryError::Busy)?;
        mapping.expect_bulk(start, len);
        // SAFETY: within the mapping, which is writable when not shared; the access that is held makes this the
        // only slice.
        Ok(change(unsafe { std::slice::from_raw_parts_mut(mapping.start().add(start), len) }))
    }

    /// A tensor of single bytes at a place, for ggml's transfers.
    fn bytes_tensor(&self, offset: u64, bytes: u64) -> Result<Tensor, MemoryError> {
        let data = self.address(offset, bytes)?;
        let len = usize::try_from(bytes).unwrap_or(0);
        let elements = i64::try_from(bytes).unwrap_or(0);
        // SAFETY: all fields may be zero or null.
        let mut tensor = unsafe { std::mem::zeroed::<Tensor>() };
        tensor.kind = BYTES_KIND;
        tensor.ne = [elements, 1, 1, 1];
        tensor.nb = [1, len, len, len];
        tensor.buffer = self.raw;
        tensor.data = data;
        Ok(tensor)
    }

    /// Writes bytes, wherever the memory is.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn put(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        if self.is_host() {
            return self.write(offset, from.len() as u64, |to| to.copy_from_slice(from));
        }
        let mut tensor = self.bytes_tensor(offset, from.len() as u64)?;
        if !from.is_empty() {
            // SAFETY: the tensor has exactly these bytes, within the buffer.
            unsafe {
                (self.ggml.f.ggml_backend_tensor_set)(&raw mut tensor, from.as_ptr().cast(), 0, from.len());
            }
        }
        Ok(())
    }

    /// Reads bytes, wherever the memory is.
    ///
    /// # Errors
    /// When they do not lie within.
    pub fn get(&self, offset: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        if self.is_host() {
            return self.read(offset, to.len() as u64, |from| to.copy_from_slice(from));
        }
        let tensor = self.bytes_tensor(offset, to.len() as u64)?;
        if !to.is_empty() {
            // SAFETY: the tensor has exactly these bytes, within the buffer.
            unsafe {
                (self.ggml.f.ggml_backend_tensor_get)(&raw const tensor, to.as_mut_ptr().cast(), 0, to.len());
            }
        }
        Ok(())
    }

    /// Fills a region with one value.
    ///
    /// # Errors
    /// When it does not lie within.
    pub fn fill(&self, offset: u64, bytes: u64, value: u8) -> Result<(), MemoryError> {
        if let Store::Host(mapping) = &self.store {
            if offset == 0 && bytes == self.len && value == 0 && !mapping.is_shared() {
                let _held = self.access.try_borrow_mut().map_err(|_| MemoryError::Busy)?;
                mapping.forget_pages();
                // Caches are cleared, and then used whole.
                mapping.expect_bulk(0, usize::try_from(bytes).unwrap_or(0));
                return Ok(());
            }
            return self.write(offset, bytes, |to| to.fill(value));
        }
        let mut tensor = self.bytes_tensor(offset, bytes)?;
        let f = &self.ggml.f;
        if offset == 0 && bytes == self.len {
            // SAFETY: the buffer is valid.
            unsafe { (f.ggml_backend_buffer_clear)(self.raw, value) }
        } else if bytes > 0 {
            // SAFETY: the tensor has exactly these bytes, within the buffer.
            unsafe { (f.ggml_backend_tensor_memset)(&raw mut tensor, value, 0, tensor.nb[1]) }
        }
        Ok(())
    }

    /// Copies bytes from other memory of the same device.
    ///
    /// # Errors
    /// When they do not lie within.
    pub fn copy_from(
        &self,
        offset: u64,
        from: &Self,
        from_offset: u64,
        bytes: u64,
    ) -> Result<(), MemoryError> {
        let (Store::Host(to), Store::Host(source)) = (&self.store, &from.store) else {
            let source = from.bytes_tensor(from_offset, bytes)?;
            let mut target = self.bytes_tensor(offset, bytes)?;
            if bytes > 0 {
                // SAFETY: both have exactly these bytes, within their buffers.
                unsafe { (self.ggml.f.ggml_backend_tensor_copy)(&raw const source, &raw mut target) }
            }
            return Ok(());
        };
        if to.is_shared() {
            return Err(MemoryError::Busy);
        }
        let (at, source_at) = (self.within(offset, bytes)?, from.within(from_offset, bytes)?);
        let _held = self.access.try_borrow_mut().map_err(|_| MemoryError::Busy)?;
        let len = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: both ranges lie within their mappings, the target is writable and no slice of it exists; the
        // two may overlap.
        unsafe { std::ptr::copy(source.start().add(source_at), to.start().add(at), len) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: valid, and not used after; the mapping below it goes after this.
        unsafe { (self.ggml.f.ggml_backend_buffer_free)(self.raw) }
    }
}
