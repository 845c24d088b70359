// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the layer says of a GPU: that its memory can be had as a dma-buf, and which of its memory a client can map.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use ash::vk;

use crate::instance::{enumerate, give, uuid};
use crate::settings::Settings;
use crate::table::Instance;

/// The extension that a driver may lack.
pub(crate) const DMA_BUF: &CStr = c"VK_EXT_external_memory_dma_buf";
/// The extension with which memory is imported.
pub(crate) const HOST: &CStr = c"VK_EXT_external_memory_host";

/// The driver's own extensions.
///
/// # Safety
/// `device` is a physical device of the instance.
pub(crate) unsafe fn driver_extensions(
    instance: &Instance,
    device: vk::PhysicalDevice,
) -> Result<Vec<vk::ExtensionProperties>, vk::Result> {
    let next = instance.extensions.ok_or(vk::Result::ERROR_INITIALIZATION_FAILED)?;
    // SAFETY: the caller's promise; pointers of `enumerate`.
    enumerate(|count, out| unsafe { next(device, std::ptr::null(), count, out) })
}

/// Whether a GPU's memory is ours.
///
/// # Safety
/// `device` is a physical device of the instance.
pub(crate) unsafe fn is_ours(instance: &Instance, device: vk::PhysicalDevice) -> bool {
    // SAFETY: the caller's promise.
    unsafe { uuid(instance, device) }.is_some_and(|uuid| Settings::get().is_ours(&uuid))
}

/// Whether an extension is among these.
pub(crate) fn has(extensions: &[vk::ExtensionProperties], name: &CStr) -> bool {
    extensions.iter().any(|extension| extension.extension_name_as_c_str().is_ok_and(|one| one == name))
}

pub(crate) unsafe extern "system" fn extensions(
    device: vk::PhysicalDevice,
    layer: *const c_char,
    count: *mut u32,
    out: *mut vk::ExtensionProperties,
) -> vk::Result {
    // SAFETY: the loader's promise.
    let Some(instance) = (unsafe { Instance::of(device) }) else {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    };
    let Some(next) = instance.extensions else { return vk::Result::ERROR_INITIALIZATION_FAILED };
    // SAFETY: the loader's promise.
    if !layer.is_null() || !unsafe { is_ours(&instance, device) } {
        // SAFETY: what the loader has given us.
        return unsafe { next(device, layer, count, out) };
    }
    // SAFETY: the loader's promise.
    match unsafe { driver_extensions(&instance, device) } {
        Ok(mut all) => {
            if !has(&all, DMA_BUF) && has(&all, HOST) {
                let mut ours = vk::ExtensionProperties { spec_version: 1, ..Default::default() };
                for (to, from) in ours.extension_name.iter_mut().zip(DMA_BUF.to_bytes()) {
                    *to = from.cast_signed() as c_char;
                }
                all.push(ours);
            }
            // SAFETY: the loader's promise.
            unsafe { give(&all, count, out) }
        }
        Err(error) => error,
    }
}

/// Takes "visible to the host" from types that cannot be imported: a client could not map them.
unsafe fn hide(
    instance: &Instance,
    device: vk::PhysicalDevice,
    properties: &mut vk::PhysicalDeviceMemoryProperties,
) {
    let settings = Settings::get();
    // SAFETY: the caller's promise: a physical device of the instance.
    let Some(uuid) = unsafe { uuid(instance, device) }.filter(|uuid| settings.is_ours(uuid)) else { return };
    let count = usize::try_from(properties.memory_type_count).unwrap_or_default();
    for (index, memory_type) in (0..).zip(properties.memory_types.iter_mut().take(count)) {
        if !settings.takes(&uuid, index) {
            memory_type.property_flags &= !(vk::MemoryPropertyFlags::HOST_VISIBLE
                | vk::MemoryPropertyFlags::HOST_COHERENT
                | vk::MemoryPropertyFlags::HOST_CACHED);
        }
    }
}

pub(crate) unsafe extern "system" fn memory(
    device: vk::PhysicalDevice,
    properties: *mut vk::PhysicalDeviceMemoryProperties,
) {
    // SAFETY: the loader's promise.
    let Some(instance) = (unsafe { Instance::of(device) }) else { return };
    let Some(next) = instance.memory else { return };
    // SAFETY: what the loader has given us.
    unsafe {
        next(device, properties);
        if let Some(properties) = properties.as_mut() {
            hide(&instance, device, properties);
        }
    }
}

pub(crate) unsafe extern "system" fn memory2(
    device: vk::PhysicalDevice,
    properties: *mut vk::PhysicalDeviceMemoryProperties2<'_>,
) {
    // SAFETY: the loader's promise.
    let Some(instance) = (unsafe { Instance::of(device) }) else { return };
    let Some(next) = instance.memory2 else { return };
    // SAFETY: what the loader has given us.
    unsafe {
        next(device, properties.cast());
        if let Some(properties) = properties.as_mut() {
            hide(&instance, device, &mut properties.memory_properties);
        }
    }
}

pub(crate) unsafe extern "system" fn external_buffers(
    device: vk::PhysicalDevice,
    info: *const vk::PhysicalDeviceExternalBufferInfo<'_>,
    properties: *mut vk::ExternalBufferProperties<'_>,
) {
    // SAFETY: the loader's promise.
    let Some(instance) = (unsafe { Instance::of(device) }) else { return };
    let Some(next) = instance.external_buffers else { return };
    // SAFETY: what the loader has given us.
    unsafe { next(device, info, properties.cast()) };
    // SAFETY: as above.
    let (Some(info), Some(properties)) = (unsafe { info.as_ref() }, unsafe { properties.as_mut() }) else {
        return;
    };
    let dma_buf = vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT;
    // SAFETY: the loader's promise.
    if info.handle_type == dma_buf && unsafe { is_ours(&instance, device) } {
        let memory = &mut properties.external_memory_properties;
        memory.external_memory_features |= vk::ExternalMemoryFeatureFlags::EXPORTABLE;
        memory.export_from_imported_handle_types |= dma_buf;
        memory.compatible_handle_types |= dma_buf;
    }
}
