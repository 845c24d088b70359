// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which GPUs an instance has: all, or the one that the layer is told.
#![allow(unsafe_code)]

use std::sync::Arc;

use ash::vk;

use crate::settings::{Settings, Uuid};
use crate::table::Instance;

/// A GPU's UUID.
///
/// # Safety
/// `device` is a physical device of the instance.
pub(crate) unsafe fn uuid(instance: &Instance, device: vk::PhysicalDevice) -> Option<Uuid> {
    let mut ids = vk::PhysicalDeviceIDProperties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut ids);
    // SAFETY: the caller's promise; the structures are live.
    unsafe { (instance.properties?)(device, &raw mut properties) };
    Some(ids.device_uuid)
}

/// Whether a GPU is shown.
unsafe fn is_shown(instance: &Instance, device: vk::PhysicalDevice) -> bool {
    // SAFETY: the caller's promise: a physical device of the instance.
    Settings::get().devices.is_none()
        || unsafe { uuid(instance, device) }.is_some_and(|uuid| Settings::get().shows(&uuid))
}

/// Calls one of Vulkan's enumerations twice: for how many, and for them.
pub(crate) fn enumerate<T: Clone + Default>(
    call: impl Fn(*mut u32, *mut T) -> vk::Result,
) -> Result<Vec<T>, vk::Result> {
    loop {
        let mut count = 0;
        let first = call(&raw mut count, std::ptr::null_mut());
        if first != vk::Result::SUCCESS {
            return Err(first);
        }
        let mut all = vec![T::default(); usize::try_from(count).unwrap_or_default()];
        match call(&raw mut count, all.as_mut_ptr()) {
            vk::Result::SUCCESS => {
                all.truncate(usize::try_from(count).unwrap_or_default());
                return Ok(all);
            }
            // One more has come meanwhile.
            vk::Result::INCOMPLETE => {}
            error => return Err(error),
        }
    }
}

/// Answers one of Vulkan's enumerations.
///
/// # Safety
/// `count` and `out` are those of the caller: room for as many, or null.
pub(crate) unsafe fn give<T: Clone>(all: &[T], count: *mut u32, out: *mut T) -> vk::Result {
    let total = u32::try_from(all.len()).unwrap_or(u32::MAX);
    if out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *count = total };
        return vk::Result::SUCCESS;
    }
    // SAFETY: the caller's promise.
    let room = unsafe { *count };
    for (index, one) in all.iter().take(usize::try_from(room).unwrap_or_default()).enumerate() {
        // SAFETY: within the room; what is written over needs no drop.
        unsafe { out.add(index).write(one.clone()) };
    }
    // SAFETY: the caller's promise.
    unsafe { *count = room.min(total) };
    if room < total { vk::Result::INCOMPLETE } else { vk::Result::SUCCESS }
}

pub(crate) unsafe extern "system" fn physical_devices(
    instance: vk::Instance,
    count: *mut u32,
    out: *mut vk::PhysicalDevice,
) -> vk::Result {
    // SAFETY: the loader's promise.
    let Some((known, next)) = (unsafe { Instance::of(instance) }).and_then(|known| {
        let next = known.physical_devices?;
        Some((known, next))
    }) else {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    };
    if Settings::get().devices.is_none() {
        // SAFETY: what the loader has given us.
        return unsafe { next(instance, count, out) };
    }
    // SAFETY: pointers of `enumerate`.
    let all = enumerate(|count, out| unsafe { next(instance, count, out) });
    match all {
        Ok(mut all) => {
            // SAFETY: they are this instance's.
            all.retain(|device| unsafe { is_shown(&known, *device) });
            // SAFETY: the loader's promise.
            unsafe { give(&all, count, out) }
        }
        Err(error) => error,
    }
}

pub(crate) unsafe extern "system" fn groups(
    instance: vk::Instance,
    count: *mut u32,
    out: *mut vk::PhysicalDeviceGroupProperties<'_>,
) -> vk::Result {
    // SAFETY: the loader's promise.
    let known: Option<Arc<Instance>> = unsafe { Instance::of(instance) };
    let Some((known, next)) = known.and_then(|known| {
        let next = known.groups?;
        Some((known, next))
    }) else {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    };
    if Settings::get().devices.is_none() {
        // SAFETY: what the loader has given us.
        return unsafe { next(instance, count, out.cast()) };
    }
    let all = enumerate(|count, out: *mut vk::PhysicalDeviceGroupProperties<'static>| {
        // SAFETY: pointers of `enumerate`.
        unsafe { next(instance, count, out) }
    });
    match all {
        Ok(all) => {
            let mut shown = Vec::new();
            for mut group in all {
                let members = usize::try_from(group.physical_device_count).unwrap_or_default();
                let mut kept: Vec<_> = group.physical_devices.iter().take(members).copied().collect();
                // SAFETY: they are this instance's.
                kept.retain(|device| unsafe { is_shown(&known, *device) });
                if kept.is_empty() {
                    continue;
                }
                group.physical_device_count = u32::try_from(kept.len()).unwrap_or_default();
                group.physical_devices = [vk::PhysicalDevice::null(); vk::MAX_DEVICE_GROUP_SIZE];
                for (to, device) in group.physical_devices.iter_mut().zip(kept) {
                    *to = device;
                }
                shown.push(group);
            }
            // SAFETY: the loader's promise.
            unsafe { give(&shown, count, out.cast()) }
        }
        Err(error) => error,
    }
}
