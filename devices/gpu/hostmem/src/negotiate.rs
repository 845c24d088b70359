// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the loader enters the layer, and how it finds the layer's functions.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use ash::vk;

use crate::table::{Device, Instance};
use crate::{create, device, instance, properties};

/// The version of the loader's interface that the layer speaks.
const INTERFACE_VERSION: u32 = 2;

/// What loader and layer tell each other first.
#[repr(C)]
#[derive(Debug)]
pub struct Negotiation {
    s_type: i32,
    next: *mut c_void,
    version: u32,
    get_instance_proc_addr: Option<vk::PFN_vkGetInstanceProcAddr>,
    get_device_proc_addr: Option<vk::PFN_vkGetDeviceProcAddr>,
    get_physical_device_proc_addr: *const c_void,
}

/// The layer's only symbol.
///
/// # Safety
/// Called by the loader, with its structure.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "system" fn vkNegotiateLoaderLayerInterfaceVersion(
    negotiation: *mut Negotiation,
) -> vk::Result {
    // SAFETY: the caller's promise.
    let Some(negotiation) = (unsafe { negotiation.as_mut() }) else {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    };
    if negotiation.version < INTERFACE_VERSION {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    }
    negotiation.version = INTERFACE_VERSION;
    negotiation.get_instance_proc_addr = Some(get_instance_proc_addr);
    negotiation.get_device_proc_addr = Some(get_device_proc_addr);
    negotiation.get_physical_device_proc_addr = std::ptr::null();
    vk::Result::SUCCESS
}

/// A function as the loader takes it.
macro_rules! void {
    ($function:expr, $type:ty) => {{
        let function: $type = $function;
        // SAFETY: all of these are functions; who calls one knows its type by its name.
        Some(unsafe { std::mem::transmute::<$type, unsafe extern "system" fn()>(function) })
    }};
}

/// The layer's functions on instances and physical devices.
fn of_instances(name: &[u8]) -> vk::PFN_vkVoidFunction {
    match name {
        b"vkGetInstanceProcAddr" => void!(get_instance_proc_addr, vk::PFN_vkGetInstanceProcAddr),
        b"vkCreateInstance" => void!(create::create_instance, vk::PFN_vkCreateInstance),
        b"vkDestroyInstance" => void!(create::destroy_instance, vk::PFN_vkDestroyInstance),
        b"vkCreateDevice" => void!(create::create_device, vk::PFN_vkCreateDevice),
        b"vkEnumeratePhysicalDevices" => {
            void!(instance::physical_devices, vk::PFN_vkEnumeratePhysicalDevices)
        }
        b"vkEnumeratePhysicalDeviceGroups" | b"vkEnumeratePhysicalDeviceGroupsKHR" => {
            void!(instance::groups, vk::PFN_vkEnumeratePhysicalDeviceGroups)
        }
        b"vkEnumerateDeviceExtensionProperties" => {
            void!(properties::extensions, vk::PFN_vkEnumerateDeviceExtensionProperties)
        }
        b"vkGetPhysicalDeviceMemoryProperties" => {
            void!(properties::memory, vk::PFN_vkGetPhysicalDeviceMemoryProperties)
        }
        b"vkGetPhysicalDeviceMemoryProperties2" | b"vkGetPhysicalDeviceMemoryProperties2KHR" => {
            void!(properties::memory2, vk::PFN_vkGetPhysicalDeviceMemoryProperties2)
        }
        b"vkGetPhysicalDeviceExternalBufferProperties"
        | b"vkGetPhysicalDeviceExternalBufferPropertiesKHR" => {
            void!(properties::external_buffers, vk::PFN_vkGetPhysicalDeviceExternalBufferProperties)
        }
        _ => None,
    }
}

/// The layer's functions on devices.
fn of_devices(name: &[u8]) -> vk::PFN_vkVoidFunction {
    match name {
        b"vkGetDeviceProcAddr" => void!(get_device_proc_addr, vk::PFN_vkGetDeviceProcAddr),
        b"vkDestroyDevice" => void!(create::destroy_device, vk::PFN_vkDestroyDevice),
        b"vkAllocateMemory" => void!(device::allocate, vk::PFN_vkAllocateMemory),
        b"vkFreeMemory" => void!(device::free, vk::PFN_vkFreeMemory),
        b"vkGetMemoryFdKHR" => void!(device::memory_fd, vk::PFN_vkGetMemoryFdKHR),
        _ => None,
    }
}

unsafe extern "system" fn get_instance_proc_addr(
    instance: vk::Instance,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: the loader's promise.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    // These belong to no instance. The loader asks for the second with one of its own that does not exist yet.
    if matches!(text, b"vkGetInstanceProcAddr" | b"vkCreateInstance") {
        return of_instances(text);
    }
    if instance == vk::Instance::null() {
        return None;
    }
    // SAFETY: the loader's promise.
    let next = unsafe { Instance::of(instance) };
    // SAFETY: the instance's own function, with the instance as the next layer knows it.
    let theirs = next.and_then(|next| unsafe { (next.get_instance_proc_addr)(next.handle, name) });
    // What the next layer has not, this one has not either.
    theirs.and_then(|theirs| of_instances(text).or(of_devices(text)).or(Some(theirs)))
}

unsafe extern "system" fn get_device_proc_addr(
    device: vk::Device,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: the loader's promise.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    // SAFETY: the loader's promise.
    let next = unsafe { Device::of(device) };
    // SAFETY: the device's own function.
    let theirs = next.and_then(|next| unsafe { (next.get_device_proc_addr)(device, name) });
    theirs.and_then(|theirs| of_devices(text).or(Some(theirs)))
}
