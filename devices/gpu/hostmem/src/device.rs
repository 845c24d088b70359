// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device's memory: allocated, handed out, freed.
#![allow(unsafe_code)]

use std::os::fd::IntoRawFd;
use std::sync::{MutexGuard, PoisonError};

use ash::vk;
use ash::vk::Handle;

use crate::chain::{Without, find};
use crate::memory::{Counted, Held, Memory};
use crate::settings::Settings;
use crate::table::Device;

const DMA_BUF: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT;
const HOST: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

impl Device {
    fn held(&self) -> MutexGuard<'_, std::collections::HashMap<u64, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether memory of this type is ours to make when it is asked for as a dma-buf.
    fn is_ours(&self, memory_type: u32) -> bool {
        let flags = usize::try_from(memory_type).ok().and_then(|index| self.memory_types.get(index));
        flags.is_some_and(|flags| flags.contains(vk::MemoryPropertyFlags::HOST_VISIBLE))
            && Settings::get().takes(&self.uuid, memory_type)
    }
}

pub(crate) unsafe extern "system" fn allocate(
    device: vk::Device,
    info: *const vk::MemoryAllocateInfo<'_>,
    callbacks: *const vk::AllocationCallbacks<'_>,
    out: *mut vk::DeviceMemory,
) -> vk::Result {
    // SAFETY: the loader's promise.
    let (Some(known), Some(asked)) = (unsafe { Device::of(device) }, unsafe { info.as_ref() }) else {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    };
    let Some(next) = known.allocate else { return vk::Result::ERROR_INITIALIZATION_FAILED };
    let Some(counted) = Counted::new(asked.allocation_size) else {
        return vk::Result::ERROR_OUT_OF_DEVICE_MEMORY;
    };
    // SAFETY: the caller's chain, and the structure of that type.
    let export = unsafe {
        find::<vk::ExportMemoryAllocateInfo<'_>>(asked.p_next, vk::StructureType::EXPORT_MEMORY_ALLOCATE_INFO)
            .and_then(|export| export.as_ref())
    };
    let is_wanted = export.is_some_and(|export| export.handle_types.contains(DMA_BUF));
    if !is_wanted || !known.is_ours(asked.memory_type_index) {
        // SAFETY: what the loader has given us.
        let result = unsafe { next(device, info.cast(), callbacks.cast(), out) };
        return if result == vk::Result::SUCCESS {
            // SAFETY: the driver has written it.
            known.held().insert(unsafe { *out }.as_raw(), Held::new(None, counted));
            result
        } else {
            result
        };
    }
    let Some(memory) = Memory::new(asked.allocation_size, known.alignment) else {
        return vk::Result::ERROR_OUT_OF_HOST_MEMORY;
    };
    // Memory that is imported is neither exported by the driver, nor that of one buffer or image.
    // SAFETY: Vulkan has a caller leave the chain alone during the call; it is as before after it.
    let rest = unsafe {
        Without::new(
            asked.p_next,
            &[
                vk::StructureType::EXPORT_MEMORY_ALLOCATE_INFO,
                vk::StructureType::MEMORY_DEDICATED_ALLOCATE_INFO,
            ],
        )
    };
    let import = vk::ImportMemoryHostPointerInfoEXT {
        p_next: rest.first(),
        handle_type: HOST,
        p_host_pointer: memory.at,
        ..Default::default()
    };
    let changed = vk::MemoryAllocateInfo {
        p_next: (&raw const import).cast(),
        allocation_size: memory.bytes as u64,
        memory_type_index: asked.memory_type_index,
        ..Default::default()
    };
    // SAFETY: a chain of live structures; the pointer is ours until the memory has been freed.
    let result = unsafe { next(device, &raw const changed, callbacks.cast(), out) };
    drop(rest);
    if result == vk::Result::SUCCESS {
        // SAFETY: the driver has written it.
        known.held().insert(unsafe { *out }.as_raw(), Held::new(Some(memory), counted));
    }
    result
}

pub(crate) unsafe extern "system" fn free(
    device: vk::Device,
    memory: vk::DeviceMemory,
    callbacks: *const vk::AllocationCallbacks<'_>,
) {
    // SAFETY: the loader's promise.
    let Some(known) = (unsafe { Device::of(device) }) else { return };
    // Taken out before, and dropped after the driver has let go of it: the handle may be used again at once.
    let held = known.held().remove(&memory.as_raw());
    if let Some(next) = known.free {
        // SAFETY: what the loader has given us.
        unsafe { next(device, memory, callbacks.cast()) };
    }
    drop(held);
}

pub(crate) unsafe extern "system" fn memory_fd(
    device: vk::Device,
    info: *const vk::MemoryGetFdInfoKHR<'_>,
    out: *mut i32,
) -> vk::Result {
    // SAFETY: the loader's promise.
    let (Some(known), Some(asked)) = (unsafe { Device::of(device) }, unsafe { info.as_ref() }) else {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    };
    if asked.handle_type == DMA_BUF {
        let held = known.held();
        if let Some(memory) = held.get(&asked.memory.as_raw()).and_then(|held| held.memory.as_ref()) {
            let Some(descriptor) = memory.descriptor() else { return vk::Result::ERROR_TOO_MANY_OBJECTS };
            // SAFETY: the loader's promise.
            unsafe { *out = descriptor.into_raw_fd() };
            return vk::Result::SUCCESS;
        }
    }
    let Some(next) = known.memory_fd else { return vk::Result::ERROR_INITIALIZATION_FAILED };
    // SAFETY: what the loader has given us.
    unsafe { next(device, info.cast(), out) }
}
