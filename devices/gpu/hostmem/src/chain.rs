// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chains of Vulkan's structures (`pNext`), and what the loader puts into them for layers.
#![allow(unsafe_code)]

use std::ffi::c_void;

use ash::vk;

/// What the loader tells a layer: where the next one is.
#[repr(C)]
pub(crate) struct LoaderInfo<L> {
    s_type: vk::StructureType,
    next: *const c_void,
    function: i32,
    /// A list of links; each layer takes the first.
    pub(crate) link: *mut L,
}

/// The next layer or the loader's end, for an instance.
#[repr(C)]
pub(crate) struct InstanceLink {
    pub(crate) next: *mut Self,
    pub(crate) get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    get_physical_device_proc_addr: *const c_void,
}

/// The next layer or the driver, for a device.
#[repr(C)]
pub(crate) struct DeviceLink {
    pub(crate) next: *mut Self,
    pub(crate) get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    pub(crate) get_device_proc_addr: vk::PFN_vkGetDeviceProcAddr,
}

/// The kind of [`LoaderInfo`] that has links.
const LINKS: i32 = 0;

/// The loader's links in a chain.
///
/// # Safety
/// `first` begins a chain as the loader gives it to a layer's function; `L` is the link of that function.
pub(crate) unsafe fn loader_info<L>(
    first: *const c_void,
    s_type: vk::StructureType,
) -> Option<*mut LoaderInfo<L>> {
    let mut at = first.cast::<vk::BaseInStructure<'_>>();
    while !at.is_null() {
        // SAFETY: the caller's promise: every link of a chain begins with these two fields.
        let base = unsafe { &*at };
        if base.s_type == s_type {
            let info = at.cast_mut().cast::<LoaderInfo<L>>();
            // SAFETY: a structure of this type is one of these.
            if unsafe { (*info).function } == LINKS {
                return Some(info);
            }
        }
        at = base.p_next;
    }
    None
}

/// Finds a structure in a chain.
///
/// # Safety
/// `first` begins a chain; `T` is the structure of this type.
pub(crate) unsafe fn find<T>(first: *const c_void, s_type: vk::StructureType) -> Option<*mut T> {
    let mut at = first.cast::<vk::BaseInStructure<'_>>();
    while !at.is_null() {
        // SAFETY: the caller's promise: every link of a chain begins with these two fields.
        let base = unsafe { &*at };
        if base.s_type == s_type {
            return Some(at.cast_mut().cast());
        }
        at = base.p_next;
    }
    None
}

/// A chain without some of its structures, for as long as this lives; then it is as it was.
#[derive(Debug)]
pub(crate) struct Without {
    first: *const c_void,
    /// What was changed, and what it was: the last change first.
    changed: Vec<(*mut vk::BaseOutStructure<'static>, *mut vk::BaseOutStructure<'static>)>,
}

impl Without {
    /// Takes the structures of these types out.
    ///
    /// # Safety
    /// `first` begins a chain that nobody else reads or changes as long as this lives.
    pub(crate) unsafe fn new(first: *const c_void, out: &[vk::StructureType]) -> Self {
        let mut without = Self { first, changed: Vec::new() };
        let mut before: *mut vk::BaseOutStructure<'static> = std::ptr::null_mut();
        let mut at = first.cast_mut().cast::<vk::BaseOutStructure<'static>>();
        while !at.is_null() {
            // SAFETY: the caller's promise.
            let (s_type, next) = unsafe { ((*at).s_type, (*at).p_next) };
            if !out.contains(&s_type) {
                before = at;
            } else if before.is_null() {
                without.first = next.cast_const().cast();
            } else {
                // SAFETY: the caller's promise; `before` is a link of the chain that stays.
                unsafe {
                    without.changed.insert(0, (before, (*before).p_next));
                    (*before).p_next = next;
                }
            }
            at = next;
        }
        without
    }

    /// Its first structure; null when none is left.
    pub(crate) fn first(&self) -> *const c_void {
        self.first
    }
}

impl Drop for Without {
    fn drop(&mut self) {
        for (link, next) in self.changed.drain(..) {
            // SAFETY: a link of the chain, which is still ours alone.
            unsafe { (*link).p_next = next };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(mut at: *const c_void) -> Vec<vk::StructureType> {
        let mut found = Vec::new();
        while !at.is_null() {
            // SAFETY: a chain of the tests.
            let base = unsafe { &*at.cast::<vk::BaseInStructure<'_>>() };
            found.push(base.s_type);
            at = base.p_next.cast();
        }
        found
    }

    #[test]
    fn a_chain_is_the_same_again_after_structures_were_taken_out() {
        use vk::StructureType as S;
        for out in [
            vec![S::EXPORT_MEMORY_ALLOCATE_INFO],
            vec![S::MEMORY_ALLOCATE_FLAGS_INFO],
            vec![S::MEMORY_DEDICATED_ALLOCATE_INFO],
            vec![S::EXPORT_MEMORY_ALLOCATE_INFO, S::MEMORY_ALLOCATE_FLAGS_INFO],
            vec![S::MEMORY_ALLOCATE_FLAGS_INFO, S::MEMORY_DEDICATED_ALLOCATE_INFO],
            vec![
                S::EXPORT_MEMORY_ALLOCATE_INFO,
                S::MEMORY_ALLOCATE_FLAGS_INFO,
                S::MEMORY_DEDICATED_ALLOCATE_INFO,
            ],
            vec![],
        ] {
            let mut dedicated = vk::MemoryDedicatedAllocateInfo::default();
            let mut flags = vk::MemoryAllocateFlagsInfo::default();
            let mut export = vk::ExportMemoryAllocateInfo::default();
            flags.p_next = (&raw mut dedicated).cast();
            export.p_next = (&raw mut flags).cast();
            let first: *const c_void = (&raw mut export).cast();
            let all = types(first);
            // SAFETY: a chain of the tests.
            let without = unsafe { Without::new(first, &out) };
            let left: Vec<_> = all.iter().copied().filter(|s_type| !out.contains(s_type)).collect();
            assert_eq!(types(without.first()), left, "{out:?}");
            drop(without);
            assert_eq!(types(first), all, "{out:?}");
            // SAFETY: as above.
            let found =
                unsafe { find::<vk::MemoryAllocateFlagsInfo<'_>>(first, S::MEMORY_ALLOCATE_FLAGS_INFO) };
            assert_eq!(found, Some(&raw mut flags));
        }
    }
}
