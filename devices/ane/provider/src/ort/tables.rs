// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tables between ONNX Runtime and a plug-in provider, as its public header lays them out.
//!
//! `ort-sys` has the rest of the interface and not these. Tables only grow at their end from one version to the next.
//! This library's own end where version 23 ended and say so, and then a newer runtime looks no further; of the runtime's
//! table only the front is described.

use core::ffi::{c_char, c_void};

use ort_sys::{
    OrtAllocator, OrtEpDevice, OrtGraph, OrtHardwareDevice, OrtKernelContext, OrtKeyValuePairs, OrtLogger,
    OrtMemoryInfo, OrtNode, OrtSessionOptions, OrtStatus,
};

/// The version at which this library's tables end.
pub(crate) const TABLES_VERSION: u32 = 23;
/// A device's type: NPU.
pub(crate) const NPU: i32 = 2;

/// What functions give back: null, or an error.
pub(crate) type Returned = *mut OrtStatus;
/// A function that is left out.
pub(crate) type Absent = Option<unsafe extern "C" fn()>;
/// A function of the runtime that is not called here.
type Unused = *const c_void;

/// What a provider says it can take.
#[repr(C)]
pub(crate) struct GraphSupportInfo {
    _private: [u8; 0],
}

/// Of one compiled node.
#[repr(C)]
pub(crate) struct NodeComputeContext {
    _private: [u8; 0],
}

/// How nodes become one.
#[repr(C)]
pub(crate) struct FusionOptions {
    pub(crate) version: u32,
    pub(crate) drop_constant_initializers: bool,
}

/// The runtime's functions for providers.
#[repr(C)]
pub(crate) struct EpApi {
    pub(crate) create_ep_device: unsafe extern "C" fn(
        *const Factory,
        *const OrtHardwareDevice,
        *const OrtKeyValuePairs,
        *const OrtKeyValuePairs,
        *mut *mut OrtEpDevice,
    ) -> Returned,
    release_ep_device: Unused,
    pub(crate) add_nodes_to_fuse: unsafe extern "C" fn(
        *mut GraphSupportInfo,
        *const *const OrtNode,
        usize,
        *const FusionOptions,
    ) -> Returned,
    unused: [Unused; 13],
    pub(crate) create_hardware_device: unsafe extern "C" fn(
        i32,
        u32,
        u32,
        *const c_char,
        *const OrtKeyValuePairs,
        *mut *mut OrtHardwareDevice,
    ) -> Returned,
    pub(crate) release_hardware_device: unsafe extern "C" fn(*mut OrtHardwareDevice),
}

const _: () = assert!(core::mem::offset_of!(EpApi, create_hardware_device) == 16 * size_of::<usize>());

/// This library's functions about itself.
#[repr(C)]
pub(crate) struct Factory {
    pub(crate) version: u32,
    pub(crate) name: unsafe extern "C" fn(*const Factory) -> *const c_char,
    pub(crate) vendor: unsafe extern "C" fn(*const Factory) -> *const c_char,
    pub(crate) supported_devices: unsafe extern "C" fn(
        *mut Factory,
        *const *const OrtHardwareDevice,
        usize,
        *mut *mut OrtEpDevice,
        usize,
        *mut usize,
    ) -> Returned,
    pub(crate) create_ep: unsafe extern "C" fn(
        *mut Factory,
        *const *const OrtHardwareDevice,
        *const *const OrtKeyValuePairs,
        usize,
        *const OrtSessionOptions,
        *const OrtLogger,
        *mut *mut Ep,
    ) -> Returned,
    pub(crate) release_ep: unsafe extern "C" fn(*mut Factory, *mut Ep),
    pub(crate) vendor_id: unsafe extern "C" fn(*const Factory) -> u32,
    pub(crate) own_version: unsafe extern "C" fn(*const Factory) -> *const c_char,
    pub(crate) validate_compiled_model: Absent,
    pub(crate) create_allocator: unsafe extern "C" fn(
        *mut Factory,
        *const OrtMemoryInfo,
        *const OrtKeyValuePairs,
        *mut *mut OrtAllocator,
    ) -> Returned,
    pub(crate) release_allocator: unsafe extern "C" fn(*mut Factory, *mut OrtAllocator),
    pub(crate) create_data_transfer: unsafe extern "C" fn(*mut Factory, *mut *mut c_void) -> Returned,
    pub(crate) is_stream_aware: unsafe extern "C" fn(*const Factory) -> bool,
    pub(crate) create_sync_stream: unsafe extern "C" fn(
        *mut Factory,
        *const c_void,
        *const OrtKeyValuePairs,
        *mut *mut c_void,
    ) -> Returned,
}

/// The functions of a provider in one session.
#[repr(C)]
pub(crate) struct Ep {
    pub(crate) version: u32,
    pub(crate) name: unsafe extern "C" fn(*const Ep) -> *const c_char,
    pub(crate) capability: unsafe extern "C" fn(*mut Ep, *const OrtGraph, *mut GraphSupportInfo) -> Returned,
    pub(crate) compile: unsafe extern "C" fn(
        *mut Ep,
        *const *const OrtGraph,
        *const *const OrtNode,
        usize,
        *mut *mut NodeComputeInfo,
        *mut *mut OrtNode,
    ) -> Returned,
    pub(crate) release_compiled: unsafe extern "C" fn(*mut Ep, *mut *mut NodeComputeInfo, usize),
    /// Layout, its conversion, dynamic options, start and end of a run, allocator, stream, compatibility.
    pub(crate) absent: [Absent; 8],
}

/// The functions of one compiled node.
#[repr(C)]
pub(crate) struct NodeComputeInfo {
    pub(crate) version: u32,
    pub(crate) create_state:
        unsafe extern "C" fn(*mut NodeComputeInfo, *mut NodeComputeContext, *mut *mut c_void) -> Returned,
    pub(crate) compute:
        unsafe extern "C" fn(*mut NodeComputeInfo, *mut c_void, *mut OrtKernelContext) -> Returned,
    pub(crate) release_state: unsafe extern "C" fn(*mut NodeComputeInfo, *mut c_void),
}
