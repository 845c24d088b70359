// SPDX-License-Identifier: MIT OR Apache-2.0
//! An ONNX Runtime plug-in that runs a container's models on the host's engine.
//!
//! ONNX Runtime 1.24 or newer loads it (`register_execution_provider_library`) and finds the provider `LighterANE`, which
//! offers itself as an NPU. It claims what the host can run of a graph, writes that as a model of its own, hands it to the
//! device's service over the unix socket in the container, and sends each run there. What the host does not do, the
//! container's own runtime does: a session that worked without the device works with it.
//!
//! ```text
//! factory ── ep ── claim (partition, work)        which nodes
//!             │
//!             ├── model (proto) ── package        a model in a sealed file in memory
//!             │
//!             └── compiled ── host ──► the device's service
//!                     └── local                   the container's own session
//! ```
//!
//! Built with `panic = "abort"` it is free of the standard library and of every link to a C library, so that it loads
//! into any image's program: `bare` has what a library then still needs, `sys` speaks to the kernel. It starts no
//! threads, handles no signals, and keeps nothing from before a fork.
#![cfg_attr(panic = "abort", no_std)]
// Built for the tests, most is only reached from the two functions that ONNX Runtime calls.
#![cfg_attr(not(panic = "abort"), allow(rustdoc::private_intra_doc_links))]

extern crate alloc;

mod bare;
mod claim;
mod compiled;
mod ep;
mod factory;
mod host;
mod local;
mod log;
mod model;
mod ort;
mod package;
mod partition;
mod process;
mod proto;
mod settings;
mod sys;
mod work;

use core::ffi::{c_char, c_void};
use core::ptr::null_mut;

use ort_sys::{OrtApiBase, OrtLogger};

/// ONNX Runtime's entry point of a plug-in: makes the one factory that there is. An error for a runtime before 1.24.
///
/// # Safety
/// To be called by ONNX Runtime, with its own base and places for its answers.
#[allow(unsafe_code, reason = "ONNX Runtime looks for this very name")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn CreateEpFactories(
    _registered_name: *const c_char,
    base: *const OrtApiBase,
    _logger: *const OrtLogger,
    factories: *mut *mut c_void,
    room: usize,
    count: *mut usize,
) -> *mut ort_sys::OrtStatus {
    // SAFETY: the caller's promise.
    unsafe {
        count.write(0);
        let ort = match ort::Ort::of(base) {
            Ok(ort) => ort,
            Err(status) => return status,
        };
        if room == 0 {
            return ort.fail(c"lighter-ane: no room for a factory");
        }
        factories.write(factory::OwnFactory::make(ort).cast());
        count.write(1);
    }
    null_mut()
}

/// Takes a factory back.
///
/// # Safety
/// To be called by ONNX Runtime, with a factory of [`CreateEpFactories`] that it no longer uses.
#[allow(unsafe_code, reason = "ONNX Runtime looks for this very name")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ReleaseEpFactory(factory: *mut c_void) -> *mut ort_sys::OrtStatus {
    // SAFETY: the caller's promise.
    unsafe { factory::release(factory.cast()) };
    null_mut()
}
