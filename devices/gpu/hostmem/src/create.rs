// SPDX-License-Identifier: MIT OR Apache-2.0
//! Instances and devices: made and ended by the next layer, known here in between.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::Mutex;

use ash::vk;

use crate::chain::{DeviceLink, InstanceLink, loader_info};
use crate::instance::uuid;
use crate::properties::{DMA_BUF, HOST, driver_extensions, has};
use crate::settings::Settings;
use crate::table::{Device, Instance};

const FAILED: vk::Result = vk::Result::ERROR_INITIALIZATION_FAILED;

pub(crate) unsafe extern "system" fn create_instance(
    info: *const vk::InstanceCreateInfo<'_>,
    callbacks: *const vk::AllocationCallbacks<'_>,
    out: *mut vk::Instance,
) -> vk::Result {
    // SAFETY: the loader's promise: its chain has a link for this layer.
    let links = unsafe {
        loader_info::<InstanceLink>((*info).p_next, vk::StructureType::LOADER_INSTANCE_CREATE_INFO)
    };
    let Some(links) = links else { return FAILED };
    // SAFETY: as above; the next layer finds its own link at the front.
    let next = unsafe {
        let link = (*links).link;
        (*links).link = (*link).next;
        (*link).get_instance_proc_addr
    };
    // SAFETY: a function of this name is of this type.
    let create: Option<vk::PFN_vkCreateInstance> = unsafe {
        next(vk::Instance::null(), c"vkCreateInstance".as_ptr()).map(|function| std::mem::transmute(function))
    };
    let Some(create) = create else { return FAILED };
    // SAFETY: what the loader has given us.
    let result = unsafe { create(info.cast(), callbacks.cast(), out) };
    if result == vk::Result::SUCCESS {
        // SAFETY: it has just been made.
        unsafe { Instance::keep(*out, next) };
    }
    result
}

pub(crate) unsafe extern "system" fn destroy_instance(
    instance: vk::Instance,
    callbacks: *const vk::AllocationCallbacks<'_>,
) {
    if instance == vk::Instance::null() {
        return;
    }
    // SAFETY: the loader's promise; it is live until the next layer has ended it.
    if let Some(destroy) = unsafe { Instance::forget(instance) }.and_then(|known| known.destroy) {
        // SAFETY: what the loader has given us.
        unsafe { destroy(instance, callbacks.cast()) };
    }
}

pub(crate) unsafe extern "system" fn create_device(
    physical_device: vk::PhysicalDevice,
    info: *const vk::DeviceCreateInfo<'_>,
    callbacks: *const vk::AllocationCallbacks<'_>,
    out: *mut vk::Device,
) -> vk::Result {
    // SAFETY: the loader's promise.
    let (Some(instance), Some(asked)) = (unsafe { Instance::of(physical_device) }, unsafe { info.as_ref() })
    else {
        return FAILED;
    };
    // SAFETY: the loader's promise: its chain has a link for this layer.
    let links =
        unsafe { loader_info::<DeviceLink>(asked.p_next, vk::StructureType::LOADER_DEVICE_CREATE_INFO) };
    let Some(links) = links else { return FAILED };
    // SAFETY: as above; the next layer finds its own link at the front.
    let (next, next_of_devices) = unsafe {
        let link = (*links).link;
        (*links).link = (*link).next;
        ((*link).get_instance_proc_addr, (*link).get_device_proc_addr)
    };
    // SAFETY: a function of this name is of this type.
    let create: Option<vk::PFN_vkCreateDevice> = unsafe {
        next(instance.handle, c"vkCreateDevice".as_ptr()).map(|function| std::mem::transmute(function))
    };
    let Some(create) = create else { return FAILED };
    // SAFETY: a physical device of the instance.
    let (known, known_uuid) =
        unsafe { (driver_extensions(&instance, physical_device), uuid(&instance, physical_device)) };
    let known = match known {
        Ok(known) => known,
        Err(error) => return error,
    };
    let count = usize::try_from(asked.enabled_extension_count).unwrap_or_default();
    let mut extensions: Vec<*const c_char> = if count == 0 {
        Vec::new()
    } else {
        // SAFETY: Vulkan's promise: as many terminated names.
        unsafe { std::slice::from_raw_parts(asked.pp_enabled_extension_names, count) }.to_vec()
    };
    if known_uuid.is_some_and(|uuid| Settings::get().is_ours(&uuid)) && has(&known, HOST) {
        // SAFETY: terminated names.
        extensions.retain(|name| has(&known, DMA_BUF) || unsafe { CStr::from_ptr(*name) } != DMA_BUF);
        // SAFETY: as above.
        if !extensions.iter().any(|name| unsafe { CStr::from_ptr(*name) } == HOST) {
            extensions.push(HOST.as_ptr());
        }
    }
    let mut changed = *asked;
    changed.enabled_extension_count = u32::try_from(extensions.len()).unwrap_or_default();
    changed.pp_enabled_extension_names = extensions.as_ptr();
    // SAFETY: a copy of the caller's structure with live names.
    let result = unsafe { create(physical_device, (&raw const changed).cast(), callbacks.cast(), out) };
    if result == vk::Result::SUCCESS {
        // SAFETY: it has just been made.
        unsafe { keep(&instance, physical_device, *out, next_of_devices, known_uuid.unwrap_or_default()) };
    }
    result
}

/// Keeps a device that has just been made.
unsafe fn keep(
    instance: &Instance,
    physical_device: vk::PhysicalDevice,
    device: vk::Device,
    next: vk::PFN_vkGetDeviceProcAddr,
    uuid: crate::settings::Uuid,
) {
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the name is terminated, and the function is of the type that its name says.
            unsafe { next(device, CStr::as_ptr($name)).map(|function| std::mem::transmute(function)) }
        };
    }
    let mut memory = vk::PhysicalDeviceMemoryProperties::default();
    if let Some(properties) = instance.memory {
        // SAFETY: a physical device of the instance, a live structure.
        unsafe { properties(physical_device, &raw mut memory) };
    }
    let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut host);
    if let Some(get) = instance.properties {
        // SAFETY: as above.
        unsafe { get(physical_device, &raw mut properties) };
    }
    let known = Device {
        get_device_proc_addr: next,
        destroy: function!(c"vkDestroyDevice"),
        allocate: function!(c"vkAllocateMemory"),
        free: function!(c"vkFreeMemory"),
        memory_fd: function!(c"vkGetMemoryFdKHR"),
        uuid,
        memory_types: memory.memory_types_as_slice().iter().map(|one| one.property_flags).collect(),
        alignment: usize::try_from(host.min_imported_host_pointer_alignment).unwrap_or(1).max(1),
        held: Mutex::new(HashMap::new()),
    };
    // SAFETY: the caller's promise.
    unsafe { Device::keep(device, known) };
}

pub(crate) unsafe extern "system" fn destroy_device(
    device: vk::Device,
    callbacks: *const vk::AllocationCallbacks<'_>,
) {
    if device == vk::Device::null() {
        return;
    }
    // SAFETY: the loader's promise; it is live until the next layer has ended it.
    let known = unsafe { Device::forget(device) };
    if let Some(destroy) = known.as_ref().and_then(|known| known.destroy) {
        // SAFETY: what the loader has given us.
        unsafe { destroy(device, callbacks.cast()) };
    }
    // With it what is left of its memory, which the driver has let go of now.
    drop(known);
}
