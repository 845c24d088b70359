// SPDX-License-Identifier: MIT OR Apache-2.0
//! A ggml backend plug-in that shows the metal device to a program whose ggml has no RPC client of its own.
//!
//! The container's `GGML_BACKEND_PATH` names it; ggml loads it after its own plug-ins and calls
//! [`ggml_backend_init`]. It has no backend in it: it loads the `libggml-rpc-VERSION.so` beside itself whose
//! version is that of the program's ggml, and hands on the backend that it makes of the device's endpoint.
//!
//! Without the device's endpoint, or without a library that fits, it says why in one line on standard error and
//! adds nothing: the program computes as it would without the device. A llama.cpp connects by itself
//! (`LLAMA_ARG_RPC`), so one with a client of its own is left alone, in silence, and one without gets the client only.
//!
//! Built with `panic = "abort"` it is free of the standard library, of allocation, and of every link to a C
//! library (see `build.rs`).
#![cfg_attr(panic = "abort", no_std)]

mod attach;
mod endpoint;
mod foreign;
mod line;

use core::ffi::c_void;

pub use endpoint::Endpoint;
pub use line::Line;

/// ggml's entry point of a backend plug-in: the backend to register, or null for none.
#[allow(unsafe_code, reason = "ggml looks for this very name")]
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut c_void {
    match attach::attach() {
        Ok(backend) => backend.as_ptr(),
        Err(reason) => {
            foreign::write_to_stderr(reason.bytes());
            core::ptr::null_mut()
        }
    }
}

#[cfg(panic = "abort")]
#[panic_handler]
fn panicked(_: &core::panic::PanicInfo<'_>) -> ! {
    foreign::abort_program()
}
