// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the layer knows of each instance and device: the next layer's functions, looked up once when it is made.
//!
//! Looked up once, because a look-up on every call may come back into this layer through the loader.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use ash::vk;
use ash::vk::Handle;

use crate::memory::Held;
use crate::settings::Uuid;

/// An instance and the next layer's functions for it.
pub(crate) struct Instance {
    pub(crate) get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    pub(crate) handle: vk::Instance,
    pub(crate) destroy: Option<vk::PFN_vkDestroyInstance>,
    pub(crate) physical_devices: Option<vk::PFN_vkEnumeratePhysicalDevices>,
    pub(crate) groups: Option<vk::PFN_vkEnumeratePhysicalDeviceGroups>,
    pub(crate) extensions: Option<vk::PFN_vkEnumerateDeviceExtensionProperties>,
    pub(crate) properties: Option<vk::PFN_vkGetPhysicalDeviceProperties2>,
    pub(crate) memory: Option<vk::PFN_vkGetPhysicalDeviceMemoryProperties>,
    pub(crate) memory2: Option<vk::PFN_vkGetPhysicalDeviceMemoryProperties2>,
    pub(crate) external_buffers: Option<vk::PFN_vkGetPhysicalDeviceExternalBufferProperties>,
}

/// A device and the next layer's functions for it.
pub(crate) struct Device {
    pub(crate) get_device_proc_addr: vk::PFN_vkGetDeviceProcAddr,
    pub(crate) destroy: Option<vk::PFN_vkDestroyDevice>,
    pub(crate) allocate: Option<vk::PFN_vkAllocateMemory>,
    pub(crate) free: Option<vk::PFN_vkFreeMemory>,
    pub(crate) memory_fd: Option<vk::PFN_vkGetMemoryFdKHR>,
    /// Its GPU.
    pub(crate) uuid: Uuid,
    /// What its memory types are, as the driver says.
    pub(crate) memory_types: Vec<vk::MemoryPropertyFlags>,
    /// What imported pointers and sizes are multiples of.
    pub(crate) alignment: usize,
    /// Its memory, by handle.
    pub(crate) held: Mutex<HashMap<u64, Held>>,
}

type Table<T> = LazyLock<RwLock<HashMap<usize, Arc<T>>>>;

static INSTANCES: Table<Instance> = LazyLock::new(RwLock::default);
static DEVICES: Table<Device> = LazyLock::new(RwLock::default);

/// What an instance and its physical devices, or a device and its queues, have in common: the loader's table.
///
/// # Safety
/// `handle` is a live dispatchable handle.
unsafe fn key(handle: u64) -> Option<usize> {
    let pointer = std::ptr::with_exposed_provenance::<usize>(usize::try_from(handle).ok()?);
    // SAFETY: the caller's promise: such a handle points to a pointer to the loader's table.
    (!pointer.is_null()).then(|| unsafe { pointer.read() })
}

fn get<T>(table: &Table<T>, key: Option<usize>) -> Option<Arc<T>> {
    table.read().unwrap_or_else(PoisonError::into_inner).get(&key?).cloned()
}

fn put<T>(table: &Table<T>, key: Option<usize>, value: T) {
    if let Some(key) = key {
        table.write().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::new(value));
    }
}

fn take<T>(table: &Table<T>, key: Option<usize>) -> Option<Arc<T>> {
    table.write().unwrap_or_else(PoisonError::into_inner).remove(&key?)
}

impl Instance {
    /// Looks up the functions and keeps them.
    ///
    /// # Safety
    /// `handle` is the instance that the next layer has just made.
    pub(crate) unsafe fn keep(handle: vk::Instance, next: vk::PFN_vkGetInstanceProcAddr) {
        macro_rules! function {
            ($($name:literal),+) => {{
                let mut found = None;
                $(if found.is_none() {
                    // SAFETY: the name is terminated, and the function is of the type that its name says.
                    found = unsafe { next(handle, CStr::as_ptr($name)).map(|f| std::mem::transmute(f)) };
                })+
                found
            }};
        }
        let instance = Self {
            get_instance_proc_addr: next,
            handle,
            destroy: function!(c"vkDestroyInstance"),
            physical_devices: function!(c"vkEnumeratePhysicalDevices"),
            groups: function!(c"vkEnumeratePhysicalDeviceGroups", c"vkEnumeratePhysicalDeviceGroupsKHR"),
            extensions: function!(c"vkEnumerateDeviceExtensionProperties"),
            properties: function!(c"vkGetPhysicalDeviceProperties2", c"vkGetPhysicalDeviceProperties2KHR"),
            memory: function!(c"vkGetPhysicalDeviceMemoryProperties"),
            memory2: function!(
                c"vkGetPhysicalDeviceMemoryProperties2",
                c"vkGetPhysicalDeviceMemoryProperties2KHR"
            ),
            external_buffers: function!(
                c"vkGetPhysicalDeviceExternalBufferProperties",
                c"vkGetPhysicalDeviceExternalBufferPropertiesKHR"
            ),
        };
        // SAFETY: the caller's promise.
        put(&INSTANCES, unsafe { key(handle.as_raw()) }, instance);
    }

    /// The instance of a live instance or physical device.
    ///
    /// # Safety
    /// `handle` is one of these.
    pub(crate) unsafe fn of(handle: impl Handle) -> Option<Arc<Self>> {
        // SAFETY: the caller's promise.
        get(&INSTANCES, unsafe { key(handle.as_raw()) })
    }

    /// Forgets an instance that ends.
    ///
    /// # Safety
    /// As for [`Self::of`].
    pub(crate) unsafe fn forget(handle: vk::Instance) -> Option<Arc<Self>> {
        // SAFETY: the caller's promise.
        take(&INSTANCES, unsafe { key(handle.as_raw()) })
    }
}

impl Device {
    /// Keeps a device.
    ///
    /// # Safety
    /// `handle` is the device that the next layer has just made.
    pub(crate) unsafe fn keep(handle: vk::Device, device: Self) {
        // SAFETY: the caller's promise.
        put(&DEVICES, unsafe { key(handle.as_raw()) }, device);
    }

    /// The device of a live device.
    ///
    /// # Safety
    /// `handle` is one.
    pub(crate) unsafe fn of(handle: vk::Device) -> Option<Arc<Self>> {
        // SAFETY: the caller's promise.
        get(&DEVICES, unsafe { key(handle.as_raw()) })
    }

    /// Forgets a device that ends.
    ///
    /// # Safety
    /// As for [`Self::of`].
    pub(crate) unsafe fn forget(handle: vk::Device) -> Option<Arc<Self>> {
        // SAFETY: the caller's promise.
        take(&DEVICES, unsafe { key(handle.as_raw()) })
    }
}
