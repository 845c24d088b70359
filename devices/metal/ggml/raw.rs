// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C declarations: functions by name, and the structs that cross the border by layout.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use libloading::Library;

/// A pointer to something of ggml's that is never looked into.
pub(super) type Opaque = *mut c_void;

/// `struct ggml_tensor`.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Tensor {
    pub(super) kind: c_int,
    pub(super) buffer: Opaque,
    pub(super) ne: [i64; 4],
    pub(super) nb: [usize; 4],
    pub(super) op: c_int,
    pub(super) params: [i32; 16],
    pub(super) flags: i32,
    pub(super) src: [*mut Tensor; 10],
    pub(super) view_src: *mut Tensor,
    pub(super) view_offset: usize,
    pub(super) data: Opaque,
    pub(super) name: [u8; 64],
    pub(super) extra: Opaque,
    pub(super) padding: [u8; 8],
}

/// Bytes that ggml puts before each tensor of a context.
pub(super) const OBJECT_BYTES: usize = 32;

/// `struct ggml_init_params`.
#[repr(C)]
pub(super) struct InitParams {
    pub(super) mem_size: usize,
    pub(super) mem_buffer: Opaque,
    pub(super) no_alloc: bool,
}

/// `ggml_backend_set_n_threads_t`.
pub(super) type SetThreads = unsafe extern "C" fn(Opaque, c_int);
/// `ggml_abort_callback_t`.
pub(super) type OnAbort = unsafe extern "C" fn(*const c_char);
/// `ggml_log_callback`.
pub(super) type OnLog = unsafe extern "C" fn(c_int, *const c_char, Opaque);

macro_rules! functions {
    (
        required { $(fn $name:ident($($arg:ty),*) $(-> $out:ty)?;)* }
        optional { $(fn $oname:ident($($oarg:ty),*) $(-> $oout:ty)?;)* }
    ) => {
        /// The functions.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $out)?,)*
            $(pub(super) $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oout)?>,)*
        }

        impl Functions {
            /// Looks all of them up, in the first library that has each.
            ///
            /// # Errors
            /// The name of the first that no library has.
            ///
            /// # Safety
            /// The libraries must be ggml's and stay loaded as long as the result is used.
            pub(super) unsafe fn load(libraries: [&Library; 2]) -> Result<Self, &'static str> {
                fn find<T: Copy>(libraries: [&Library; 2], name: &str) -> Option<T> {
                    // SAFETY: the caller vouches for the libraries; the types stand in one place, beside the
                    // names, and follow ggml's headers.
                    libraries.iter().find_map(|library| unsafe { library.get::<T>(name.as_bytes()) }.ok().map(|s| *s))
                }
                Ok(Self {
                    $($name: find(libraries, stringify!($name)).ok_or(stringify!($name))?,)*
                    $($oname: find(libraries, stringify!($oname)),)*
                })
            }
        }
    };
}

functions! {
    required {
        fn ggml_version() -> *const c_char;
        fn ggml_set_abort_callback(OnAbort) -> Opaque;
        fn ggml_log_set(OnLog, Opaque);
        fn ggml_op_name(c_int) -> *const c_char;
        fn ggml_unary_op_name(c_int) -> *const c_char;
        fn ggml_blck_size(c_int) -> i64;
        fn ggml_type_size(c_int) -> usize;
        fn ggml_is_quantized(c_int) -> bool;
        fn ggml_tensor_overhead() -> usize;
        fn ggml_graph_overhead_custom(usize, bool) -> usize;
        fn ggml_init(InitParams) -> Opaque;
        fn ggml_free(Opaque);
        fn ggml_new_tensor_4d(Opaque, c_int, i64, i64, i64, i64) -> *mut Tensor;
        fn ggml_new_graph_custom(Opaque, usize, bool) -> Opaque;
        fn ggml_build_forward_expand(Opaque, *mut Tensor);
        fn ggml_backend_load_all();
        fn ggml_backend_load_all_from_path(*const c_char);
        fn ggml_backend_dev_count() -> usize;
        fn ggml_backend_dev_get(usize) -> Opaque;
        fn ggml_backend_dev_name(Opaque) -> *const c_char;
        fn ggml_backend_dev_description(Opaque) -> *const c_char;
        fn ggml_backend_dev_type(Opaque) -> c_int;
        fn ggml_backend_dev_memory(Opaque, *mut usize, *mut usize);
        fn ggml_backend_dev_backend_reg(Opaque) -> Opaque;
        fn ggml_backend_dev_init(Opaque, *const c_char) -> Opaque;
        fn ggml_backend_dev_buffer_type(Opaque) -> Opaque;
        fn ggml_backend_dev_supports_op(Opaque, *const Tensor) -> bool;
        fn ggml_backend_reg_get_proc_address(Opaque, *const c_char) -> Opaque;
        fn ggml_backend_free(Opaque);
        fn ggml_backend_graph_compute_async(Opaque, Opaque) -> c_int;
        fn ggml_backend_synchronize(Opaque);
        fn ggml_backend_buft_alloc_buffer(Opaque, usize) -> Opaque;
        fn ggml_backend_buft_get_alignment(Opaque) -> usize;
        fn ggml_backend_buft_get_max_size(Opaque) -> usize;
        fn ggml_backend_buft_is_host(Opaque) -> bool;
        fn ggml_backend_cpu_buffer_from_ptr(Opaque, usize) -> Opaque;
        fn ggml_backend_buffer_get_base(Opaque) -> Opaque;
        fn ggml_backend_buffer_get_size(Opaque) -> usize;
        fn ggml_backend_buffer_free(Opaque);
        fn ggml_backend_buffer_clear(Opaque, u8);
        fn ggml_backend_buffer_init_tensor(Opaque, *mut Tensor) -> c_int;
        fn ggml_backend_tensor_set(*mut Tensor, *const c_void, usize, usize);
        fn ggml_backend_tensor_get(*const Tensor, *mut c_void, usize, usize);
        fn ggml_backend_tensor_memset(*mut Tensor, u8, usize, usize);
        fn ggml_backend_tensor_copy(*const Tensor, *mut Tensor);
    }
    optional {
        // Debian calls this one internal and may drop it; without it a tensor takes its own bytes.
        fn ggml_backend_buft_get_alloc_size(Opaque, *const Tensor) -> usize;
    }
}
