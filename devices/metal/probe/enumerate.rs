// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads ggml into this process and lists its devices. Only the probe's child calls this.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

use super::{GgmlClass, GgmlDevice};
use crate::metal::config::Libraries;

/// Why ggml could not be asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnumerateError {
    /// A library does not load.
    #[error("{}", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// What the loader said.
        #[source]
        source: libloading::Error,
    },
    /// A function is not there.
    #[error("function {name} of ggml")]
    Function {
        /// Its name.
        name: &'static str,
        /// What the loader said.
        #[source]
        source: libloading::Error,
    },
    /// The path cannot be given to C.
    #[error("path {path:?} has a zero byte in it")]
    Path {
        /// The path.
        path: PathBuf,
    },
}

/// A `ggml_backend_dev_t`.
type Dev = *mut c_void;

/// The head of `ggml_backend_dev_props`, and room for what newer versions add behind it.
#[repr(C)]
struct Props {
    name: *const c_char,
    description: *const c_char,
    memory_free: usize,
    memory_total: usize,
    class: c_int,
    device_id: *const c_char,
    rest: [u64; 32],
}

/// Versions before this one have no `device_id` in their properties.
const FIRST_WITH_DEVICE_ID: (u32, u32) = (0, 10);

/// ggml's version and devices.
pub(super) fn devices(libraries: &Libraries) -> Result<(String, Vec<GgmlDevice>), EnumerateError> {
    let base = load(&libraries.base)?;
    let registry = load(&libraries.registry)?;
    // SAFETY: the signatures are those of ggml's public headers, unchanged in all versions that have them.
    let (load_all, load_from, count, get, name, description, class, memory, version) = unsafe {
        (
            function::<unsafe extern "C" fn()>(&registry, "ggml_backend_load_all")?,
            function::<unsafe extern "C" fn(*const c_char)>(&registry, "ggml_backend_load_all_from_path")?,
            function::<unsafe extern "C" fn() -> usize>(&registry, "ggml_backend_dev_count")?,
            function::<unsafe extern "C" fn(usize) -> Dev>(&registry, "ggml_backend_dev_get")?,
            function::<unsafe extern "C" fn(Dev) -> *const c_char>(&base, "ggml_backend_dev_name")?,
            function::<unsafe extern "C" fn(Dev) -> *const c_char>(&base, "ggml_backend_dev_description")?,
            function::<unsafe extern "C" fn(Dev) -> c_int>(&base, "ggml_backend_dev_type")?,
            function::<unsafe extern "C" fn(Dev, *mut usize, *mut usize)>(&base, "ggml_backend_dev_memory")?,
            // Absent in old versions.
            function::<unsafe extern "C" fn() -> *const c_char>(&base, "ggml_version").ok(),
        )
    };
    // SAFETY: as above.
    let props =
        unsafe { function::<unsafe extern "C" fn(Dev, *mut Props)>(&base, "ggml_backend_dev_get_props") }
            .ok();
    match &libraries.backends_dir {
        Some(folder) => {
            let folder = c_path(folder)?;
            // SAFETY: a NUL-terminated string that lives through the call.
            unsafe { load_from(folder.as_ptr()) };
        }
        // SAFETY: takes nothing.
        None => unsafe { load_all() },
    }
    // SAFETY: returns a static string.
    let version = version.and_then(|version| unsafe { text(version()) });
    let has_device_id = version.as_deref().and_then(major_minor).is_some_and(|v| v >= FIRST_WITH_DEVICE_ID);
    // SAFETY: takes nothing.
    let count = unsafe { count() };
    let mut found = Vec::new();
    for index in 0..count {
        // SAFETY: below the count; devices are never removed.
        let dev = unsafe { get(index) };
        let (mut free, mut total) = (0, 0);
        // SAFETY: `dev` is a device of the registry; the pointers are to live integers.
        unsafe { memory(dev, &raw mut free, &raw mut total) };
        // SAFETY: `dev` is a device; its strings live as long as it does.
        let (name, description, class) = unsafe { (text(name(dev)), text(description(dev)), class(dev)) };
        found.push(GgmlDevice {
            name: name.unwrap_or_default(),
            description: description.unwrap_or_default(),
            class: match class {
                0 => GgmlClass::Cpu,
                1 => GgmlClass::Gpu,
                2 => GgmlClass::IntegratedGpu,
                _ => GgmlClass::Accelerator,
            },
            memory_bytes: u64::try_from(total).ok().filter(|bytes| *bytes > 0),
            address: props.as_ref().filter(|_| has_device_id).and_then(|props| device_id(props, dev)),
        });
    }
    // The process ends next; drivers do not like to be unloaded.
    std::mem::forget((base, registry));
    Ok((version.unwrap_or_else(|| "unknown".to_owned()), found))
}

fn device_id(props: &Symbol<unsafe extern "C" fn(Dev, *mut Props)>, dev: Dev) -> Option<String> {
    let mut space = Props {
        name: std::ptr::null(),
        description: std::ptr::null(),
        memory_free: 0,
        memory_total: 0,
        class: 0,
        device_id: std::ptr::null(),
        rest: [0; 32],
    };
    // SAFETY: `dev` is a device; `space` is larger than the properties of any known version.
    unsafe { props(dev, &raw mut space) };
    // SAFETY: null, or a string that lives as long as the device.
    unsafe { text(space.device_id) }
}

fn load(path: &Path) -> Result<Library, EnumerateError> {
    // SAFETY: runs the library's initialisers. That is the purpose of this process, and the library is the
    // host's own.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|source| EnumerateError::Load { path: path.to_owned(), source })
}

/// # Safety
/// `T` must be the type of the function.
unsafe fn function<T>(library: &Library, name: &'static str) -> Result<Symbol<T>, EnumerateError> {
    // SAFETY: the caller's promise.
    unsafe { library.get(name) }.map_err(|source| EnumerateError::Function { name, source })
}

/// # Safety
/// Null, or a string that ends in a zero byte.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

fn c_path(path: &Path) -> Result<CString, EnumerateError> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| EnumerateError::Path { path: path.to_owned() })
}

fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
