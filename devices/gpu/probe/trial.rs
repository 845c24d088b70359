// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tries a driver's memory: whether what it exports can be mapped by somebody else and holds the same bytes, and whether it takes
//! shared memory of ours. Runs in the probe's child only.
//!
//! What drivers say of themselves does not decide: some export memory that is theirs alone, or with other bytes before it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::os::fd::{FromRawFd, OwnedFd};

use ash::{Device, Instance, vk};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::VulkanDevice;

const BYTES: usize = 1 << 20;
/// Words that are compared, from both sides.
const OURS: (usize, u32) = (1000, 0x600d_cafe);
const THEIRS: (usize, u32) = (0, 0x1234_5678);
const DMA_BUF: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT;
const HOST: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// A device to try.
pub(super) struct Trial {
    device: Device,
    fd: ash::khr::external_memory_fd::Device,
    /// Whether buffers can have memory that is exported as dma-buf, and exported again after an import.
    exports: bool,
    imports: bool,
}

impl Trial {
    /// Opens a device with what it has of the extensions.
    pub(super) fn new(
        instance: &Instance,
        physical: vk::PhysicalDevice,
        has: &dyn Fn(&CStr) -> bool,
    ) -> Result<Self, vk::Result> {
        let wanted =
            [c"VK_KHR_external_memory_fd", c"VK_EXT_external_memory_dma_buf", c"VK_EXT_external_memory_host"];
        let names: Vec<_> = wanted.iter().filter(|name| has(name)).map(|name| name.as_ptr()).collect();
        let priorities = [1.0];
        let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&priorities)];
        let info =
            vk::DeviceCreateInfo::default().queue_create_infos(&queues).enabled_extension_names(&names);
        // SAFETY: the instance's own device; the structures live through the call.
        let device = unsafe { instance.create_device(physical, &info, None) }?;
        let asked = vk::PhysicalDeviceExternalBufferInfo::default()
            .usage(vk::BufferUsageFlags::STORAGE_BUFFER)
            .handle_type(DMA_BUF);
        let mut answer = vk::ExternalBufferProperties::default();
        // SAFETY: as above.
        unsafe { instance.get_physical_device_external_buffer_properties(physical, &asked, &mut answer) };
        let memory = answer.external_memory_properties;
        let exports = has(c"VK_KHR_external_memory_fd")
            && has(c"VK_EXT_external_memory_dma_buf")
            && memory.external_memory_features.contains(vk::ExternalMemoryFeatureFlags::EXPORTABLE)
            && memory.export_from_imported_handle_types.contains(DMA_BUF);
        let fd = ash::khr::external_memory_fd::Device::new(instance, &device);
        Ok(Self { device, fd, exports, imports: has(c"VK_EXT_external_memory_host") })
    }

    /// Tries one memory type and notes what came of it.
    pub(super) fn try_type(&self, index: u32, described: &mut VulkanDevice) {
        match self.export(index) {
            Ok(()) => described.export_types |= 1 << index,
            Err(why) => described.troubles.push(format!("memory type {index}, as dma-buf: {why}")),
        }
        match self.import(index) {
            Ok(()) => described.import_types |= 1 << index,
            Err(why) => described.troubles.push(format!("memory type {index}, from us: {why}")),
        }
    }

    fn export(&self, index: u32) -> Result<(), String> {
        if !self.exports {
            return Err("the driver exports none".to_owned());
        }
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(DMA_BUF);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(BYTES as u64)
            .memory_type_index(index)
            .push_next(&mut export);
        // SAFETY: the structures live through the call.
        let memory = unsafe { self.device.allocate_memory(&info, None) }
            .map_err(|error| format!("allocation: {error}"))?;
        let result = self.compare_exported(memory);
        // SAFETY: allocated above.
        unsafe { self.device.free_memory(memory, None) };
        result
    }

    fn compare_exported(&self, memory: vk::DeviceMemory) -> Result<(), String> {
        let info = vk::MemoryGetFdInfoKHR::default().memory(memory).handle_type(DMA_BUF);
        // SAFETY: allocated for this.
        let fd = unsafe { self.fd.get_memory_fd(&info) }.map_err(|error| format!("export: {error}"))?;
        // SAFETY: Vulkan gives the descriptor away.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        self.compare(memory, &fd)
    }

    fn import(&self, index: u32) -> Result<(), String> {
        if !self.imports {
            return Err("the driver takes none (VK_EXT_external_memory_host)".to_owned());
        }
        let fd = memfd_create("lighter-probe", MemfdFlags::CLOEXEC).map_err(|error| error.to_string())?;
        ftruncate(&fd, BYTES as u64).map_err(|error| error.to_string())?;
        let at = map(&fd)?;
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(HOST).host_pointer(at);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(BYTES as u64)
            .memory_type_index(index)
            .push_next(&mut import);
        // SAFETY: the pointer is mapped and stays so until the memory has been freed.
        let result = unsafe { self.device.allocate_memory(&info, None) }
            .map_err(|error| format!("allocation: {error}"))
            .and_then(|memory| {
                let result = self.compare(memory, &fd);
                // SAFETY: allocated above.
                unsafe { self.device.free_memory(memory, None) };
                result
            });
        unmap(at);
        result
    }

    /// Whether the driver's mapping and one of the descriptor hold the same bytes, both ways.
    fn compare(&self, memory: vk::DeviceMemory, fd: &OwnedFd) -> Result<(), String> {
        let at = map(fd)?;
        // SAFETY: the memory can be mapped, and is nowhere.
        let theirs =
            unsafe { self.device.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()) };
        let result = match theirs {
            Ok(theirs) => {
                let same = is_same(at.cast(), theirs.cast());
                // SAFETY: mapped above.
                unsafe { self.device.unmap_memory(memory) };
                if same { Ok(()) } else { Err("what is mapped holds other bytes".to_owned()) }
            }
            Err(error) => Err(format!("mapping by the driver: {error}")),
        };
        unmap(at);
        result
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // SAFETY: all of its memory has been freed.
        unsafe { self.device.destroy_device(None) };
    }
}

fn is_same(ours: *mut u32, theirs: *mut u32) -> bool {
    // SAFETY: both are mapped, for more bytes than these words are in.
    unsafe {
        theirs.add(THEIRS.0).write_volatile(THEIRS.1);
        ours.add(OURS.0).write_volatile(OURS.1);
        ours.add(THEIRS.0).read_volatile() == THEIRS.1 && theirs.add(OURS.0).read_volatile() == OURS.1
    }
}

fn map(fd: &OwnedFd) -> Result<*mut c_void, String> {
    // SAFETY: a new mapping.
    unsafe { mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0) }
        .map_err(|error| format!("mapping: {error}"))
}

fn unmap(at: *mut c_void) {
    // SAFETY: what `map` gave, of which nothing is left.
    let _ = unsafe { munmap(at, BYTES) };
}
