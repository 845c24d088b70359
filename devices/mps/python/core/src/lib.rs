// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter_mps._core`: the hot path of the mps device's client, between torch's dispatcher and the socket.
//!
//! Python loads it as an extension module of the stable ABI (CPython 3.10 and newer); it is linked to neither torch nor
//! libpython, and finds torch's C functions in the process. `lighter_mps.hot` does the same in Python and is what these
//! functions are held to: for the same calls both put the same bytes on the stream.
//!
//! ```text
//! torch's dispatcher ─► kernel ─► key ─► plan ─► tensors ─► stream ─► socket
//!                          └─────► miss (Python)              ▲
//! Python: append, flush, new_tensor … ────────────────────────┘
//! ```
//!
//! What it refuses: a process without torch 2.6 or newer, a second `configure`, plans that do not fit their calls. It keeps
//! no Python reference of a caller beyond a call but those given to `configure`. Running out of memory ends the process, as
//! it does in Rust everywhere.
#![allow(unsafe_code)]

mod call;
mod core;
mod dlpack;
mod factories;
mod finalizer;
mod glibc;
mod guarded;
mod kernel;
mod key;
mod module;
mod numbers;
mod plan;
mod python;
mod shims;
mod socket;
mod stream;
mod tensors;
mod thunks;
mod views;

use pyo3_ffi as ffi;

/// What Python calls when the module is imported.
///
/// # Safety
/// Python calls it, with the interpreter's lock held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PyInit__core() -> *mut ffi::PyObject {
    // SAFETY: Python calls this with the lock held.
    unsafe { call::answer(call::module) }
}
