// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ONNX Runtime learns of this library: its name, and one device of type NPU that is not on any bus.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::ffi::{CStr, c_char, c_void};
use core::ptr::{null, null_mut};
use core::sync::atomic::AtomicBool;

use ort_sys::{
    OrtAllocator, OrtEpDevice, OrtHardwareDevice, OrtKeyValuePairs, OrtLogger, OrtMemoryInfo,
    OrtSessionOptions,
};

use crate::ep::Provider;
use crate::ort::Ort;
use crate::ort::tables::{Ep, Factory, NPU, Returned, TABLES_VERSION};

/// The provider's name, which programs ask for.
pub(crate) const NAME: &CStr = c"LighterANE";
const VENDOR: &CStr = c"Lighter";
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"0.0.0",
};
/// No vendor on a bus has it.
const VENDOR_ID: u32 = 0x4c54;
const DEVICE_ID: u32 = 1;

/// The table, and what is behind it.
#[repr(C)]
pub(crate) struct OwnFactory {
    table: Factory,
    pub(crate) ort: Ort,
    /// That the service does not answer is said once.
    pub(crate) has_said_away: AtomicBool,
}

impl OwnFactory {
    /// A factory for the runtime, which gives it back by [`release`].
    pub(crate) fn make(ort: Ort) -> *mut Factory {
        let table = Factory {
            version: TABLES_VERSION,
            name,
            vendor,
            supported_devices,
            create_ep,
            release_ep,
            vendor_id,
            own_version,
            validate_compiled_model: None,
            create_allocator,
            release_allocator,
            create_data_transfer,
            is_stream_aware,
            create_sync_stream,
        };
        Box::into_raw(Box::new(Self { table, ort, has_said_away: AtomicBool::new(false) })).cast()
    }

    /// # Safety
    /// A factory of this library's that lives as long as the lifetime says.
    unsafe fn of<'a>(factory: *const Factory) -> &'a Self {
        // SAFETY: the caller's promise; the table stands first.
        unsafe { &*factory.cast() }
    }
}

/// # Safety
/// A factory from [`OwnFactory::make`] that nobody uses any more.
pub(crate) unsafe fn release(factory: *mut Factory) {
    if !factory.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(factory.cast::<OwnFactory>()) });
    }
}

unsafe extern "C" fn name(_: *const Factory) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn vendor(_: *const Factory) -> *const c_char {
    VENDOR.as_ptr()
}

unsafe extern "C" fn own_version(_: *const Factory) -> *const c_char {
    VERSION.as_ptr()
}

unsafe extern "C" fn vendor_id(_: *const Factory) -> u32 {
    VENDOR_ID
}

unsafe extern "C" fn supported_devices(
    factory: *mut Factory,
    _: *const *const OrtHardwareDevice,
    _: usize,
    devices: *mut *mut OrtEpDevice,
    room: usize,
    count: *mut usize,
) -> Returned {
    // SAFETY: the runtime's call: a factory of this library's, room for so many devices, and a place for their number.
    // The runtime owns the device of the provider, which keeps a copy of the virtual hardware's.
    unsafe {
        count.write(0);
        if room == 0 {
            return null_mut();
        }
        let ep = OwnFactory::of(factory).ort.ep();
        let mut hardware = null_mut();
        let status = (ep.create_hardware_device)(
            NPU,
            VENDOR_ID,
            DEVICE_ID,
            VENDOR.as_ptr(),
            null(),
            &raw mut hardware,
        );
        if !status.is_null() {
            return status;
        }
        let status = (ep.create_ep_device)(factory, hardware, null(), null(), devices);
        if status.is_null() {
            count.write(1);
        }
        status
    }
}

unsafe extern "C" fn create_ep(
    factory: *mut Factory,
    _: *const *const OrtHardwareDevice,
    _: *const *const OrtKeyValuePairs,
    _: usize,
    options: *const OrtSessionOptions,
    _: *const OrtLogger,
    ep: *mut *mut Ep,
) -> Returned {
    // SAFETY: the runtime's call: a factory of this library's, options that live through it, and a place for the answer.
    unsafe {
        match Provider::make(OwnFactory::of(factory), options) {
            Ok(made) => {
                ep.write(made);
                null_mut()
            }
            Err(status) => status,
        }
    }
}

unsafe extern "C" fn release_ep(_: *mut Factory, ep: *mut Ep) {
    // SAFETY: the runtime's call: a provider from `create_ep` that it no longer uses.
    unsafe { crate::ep::release(ep) };
}

unsafe extern "C" fn create_allocator(
    _: *mut Factory,
    _: *const OrtMemoryInfo,
    _: *const OrtKeyValuePairs,
    allocator: *mut *mut OrtAllocator,
) -> Returned {
    // SAFETY: the runtime's call: a place for the answer, where null stands for its own allocator.
    unsafe { allocator.write(null_mut()) };
    null_mut()
}

unsafe extern "C" fn release_allocator(_: *mut Factory, _: *mut OrtAllocator) {}

unsafe extern "C" fn create_data_transfer(_: *mut Factory, transfer: *mut *mut c_void) -> Returned {
    // SAFETY: the runtime's call: a place for the answer, where null stands for none.
    unsafe { transfer.write(null_mut()) };
    null_mut()
}

unsafe extern "C" fn is_stream_aware(_: *const Factory) -> bool {
    false
}

unsafe extern "C" fn create_sync_stream(
    _: *mut Factory,
    _: *const c_void,
    _: *const OrtKeyValuePairs,
    stream: *mut *mut c_void,
) -> Returned {
    // SAFETY: the runtime's call: a place for the answer, where null stands for none.
    unsafe { stream.write(null_mut()) };
    null_mut()
}
