// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts the RPC server that ggml itself has, for the benchmark to compare with: Debian ships it as a plug-in
//! without a program.
//!
//! usage: upstream_rpc_server HOST:PORT THREADS

#![allow(unsafe_code)]

use std::error::Error;
use std::ffi::{CString, c_char, c_void};

use libloading::Library;

type StartServer =
    unsafe extern "C" fn(*const c_char, *const c_char, usize, usize, *mut *mut c_void) -> *mut c_void;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(endpoint), Some(threads)) = (args.next(), args.next()) else {
        return Err("usage: upstream_rpc_server HOST:PORT THREADS".into());
    };
    let endpoint = CString::new(endpoint)?;
    let threads: usize = threads.parse()?;
    // SAFETY: the library's constructors are ggml's own and need nothing of us.
    let (_base, ggml) = unsafe { (Library::new("libggml-base.so.0")?, Library::new("libggml.so.0")?) };
    // SAFETY: the signatures are those of ggml's public headers ggml-backend.h and ggml-rpc.h; strings and the
    // device list outlive the calls, and start_server only returns when the server has ended.
    unsafe {
        ggml.get::<unsafe extern "C" fn()>(b"ggml_backend_load_all\0")?();
        let by_name =
            ggml.get::<unsafe extern "C" fn(*const c_char) -> *mut c_void>(b"ggml_backend_reg_by_name\0")?;
        let registry = by_name(c"RPC".as_ptr());
        if registry.is_null() {
            return Err("ggml's RPC plug-in is not installed (libggml0-backend-rpc)".into());
        }
        let device_by_name =
            ggml.get::<unsafe extern "C" fn(*const c_char) -> *mut c_void>(b"ggml_backend_dev_by_name\0")?;
        let mut cpu = device_by_name(c"CPU".as_ptr());
        type Address = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
        let address = match ggml.get::<Address>(b"ggml_backend_reg_get_proc_address\0") {
            Ok(found) => found,
            Err(_) => _base.get::<Address>(b"ggml_backend_reg_get_proc_address\0")?,
        };
        let start = address(registry, c"ggml_backend_rpc_start_server".as_ptr());
        if start.is_null() || cpu.is_null() {
            return Err("ggml's RPC plug-in has no server, or there is no CPU backend".into());
        }
        let start: StartServer = std::mem::transmute(start);
        start(endpoint.as_ptr(), std::ptr::null(), threads, 1, &raw mut cpu);
    }
    Ok(())
}
