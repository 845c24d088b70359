// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a library of ONNX Runtime can compute with. Only ever called in the short-lived child.
//!
//! ONNX Runtime says which providers it was built with, not which of them work here: OpenVINO is asked for its devices
//! through its own C interface, which lies beside the library; the others' libraries are loaded to see whether the
//! drivers that they need are there.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::null_mut;

use libloading::Library;
use libloading::os::unix::{Library as GlobalLibrary, RTLD_GLOBAL, RTLD_LAZY};

use super::Found;
use crate::ane::control::Provider;
use crate::ane::ort::Ort;
use crate::ask::with_causes;

/// Every provider that has engines of its own, and its library beside ONNX Runtime's where it has one.
const PROVIDERS: [(Provider, Option<&str>); 6] = [
    (Provider::Cpu, None),
    (Provider::OpenVino, Some("libonnxruntime_providers_openvino.so")),
    (Provider::Cuda, Some("libonnxruntime_providers_cuda.so")),
    (Provider::TensorRt, Some("libonnxruntime_providers_tensorrt.so")),
    (Provider::MiGraphX, Some("libonnxruntime_providers_migraphx.so")),
    (Provider::CoreMl, None),
];

/// The library's version and what can compute with it.
pub(super) fn devices(library: &Path) -> Result<(String, Vec<Found>), String> {
    let ort = Ort::open(library).map_err(|error| with_causes(&error))?;
    let folder = std::fs::canonicalize(library).ok().and_then(|path| path.parent().map(Path::to_owned));
    let folder = folder.unwrap_or_default();
    let mut devices = Vec::new();
    for (provider, file) in PROVIDERS {
        if !ort.providers().iter().any(|name| name == provider.ort_name()) {
            continue;
        }
        match (provider, file) {
            (Provider::OpenVino, _) => match openvino_devices(&folder) {
                Ok(found) => devices.extend(found),
                Err(reason) => eprintln!("OpenVINO is left out: {reason}"),
            },
            (_, Some(file)) => match can_be_loaded(&folder, file) {
                Ok(()) => devices.push(plain(provider)),
                Err(reason) => eprintln!("{provider} is left out: {reason}"),
            },
            (_, None) => devices.push(plain(provider)),
        }
    }
    Ok((ort.version().to_owned(), devices))
}

fn plain(provider: Provider) -> Found {
    let description = match provider {
        Provider::Cpu => processor().unwrap_or_default(),
        _ => String::new(),
    };
    Found { provider, device: String::new(), description }
}

fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Whether a provider's library finds the drivers that it needs.
fn can_be_loaded(folder: &Path, file: &str) -> Result<(), String> {
    let open = |name: &str| {
        // SAFETY: loading runs the libraries' constructors, which is what this short-lived process is for.
        unsafe { GlobalLibrary::open(Some(folder.join(name)), RTLD_LAZY | RTLD_GLOBAL) }
            .map(ManuallyDrop::new)
            .map_err(|error| with_causes(&error))
    };
    open("libonnxruntime_providers_shared.so")?;
    open(file).map(|_| ())
}

/// The list in OpenVINO's C interface.
#[repr(C)]
struct DeviceList {
    names: *mut *mut c_char,
    count: usize,
}

type Core = *mut c_void;
type CreateCore = unsafe extern "C" fn(*mut Core) -> c_int;
type ListDevices = unsafe extern "C" fn(Core, *mut DeviceList) -> c_int;
type GetProperty = unsafe extern "C" fn(Core, *const c_char, *const c_char, *mut *mut c_char) -> c_int;

fn openvino_devices(folder: &Path) -> Result<Vec<Found>, String> {
    let path = folder.join("libopenvino_c.so");
    // SAFETY: loading runs the library's constructors, which is what this short-lived process is for.
    let library = unsafe { Library::new(&path) }
        .map(ManuallyDrop::new)
        .map_err(|error| format!("{}: {}", path.display(), with_causes(&error)))?;
    let missing = |error: libloading::Error| error.to_string();
    // SAFETY: these functions have these types in OpenVINO's C interface since its version 2022.2.
    let (create, list, property) = unsafe {
        (
            library.get::<CreateCore>(b"ov_core_create\0").map_err(missing)?,
            library.get::<ListDevices>(b"ov_core_get_available_devices\0").map_err(missing)?,
            library.get::<GetProperty>(b"ov_core_get_property\0").map_err(missing)?,
        )
    };
    let mut core: Core = null_mut();
    // SAFETY: the place for the result is ours. The core is never freed: the process ends soon.
    let status = unsafe { create(&raw mut core) };
    if status != 0 || core.is_null() {
        return Err(format!("its core cannot be made (status {status})"));
    }
    let mut found = DeviceList { names: null_mut(), count: 0 };
    // SAFETY: the core is live, the place for the result is ours.
    let status = unsafe { list(core, &raw mut found) };
    if status != 0 || found.names.is_null() {
        return Err(format!("its devices cannot be listed (status {status})"));
    }
    let mut devices = Vec::new();
    for at in 0..found.count {
        // SAFETY: the call gave an array of `count` terminated strings, which are never freed.
        let name = unsafe { CStr::from_ptr(*found.names.add(at)) }.to_string_lossy().into_owned();
        let description = CString::new(name.as_str()).ok().and_then(|device| {
            let mut value = null_mut();
            // SAFETY: core and texts live during the call, the place for the result is ours.
            let status =
                unsafe { property(core, device.as_ptr(), c"FULL_DEVICE_NAME".as_ptr(), &raw mut value) };
            // SAFETY: not null and without an error it is a terminated string, which is never freed.
            (status == 0 && !value.is_null())
                .then(|| unsafe { CStr::from_ptr(value) }.to_string_lossy().into_owned())
        });
        devices.push(Found {
            provider: Provider::OpenVino,
            device: name,
            description: description.unwrap_or_default(),
        });
    }
    Ok(devices)
}
