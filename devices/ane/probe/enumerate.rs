// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a library of ONNX Runtime can compute with. Only ever called in the short-lived child.
//!
//! ONNX Runtime says which providers it was built with, not which of them work here: OpenVINO is asked for its devices
//! through its own C interface, which lies beside the library; the others are given a small model to compile, which
//! shows whether the drivers that they need are there.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use libloading::Library;

use super::Found;
use crate::ane::control::Provider;
use crate::ane::ort::{ModelBytes, Ort, ProviderSetup, Session, SessionSetup};
use crate::text::with_causes;

/// Every provider that has engines of its own.
const PROVIDERS: [Provider; 6] = [
    Provider::Cpu,
    Provider::OpenVino,
    Provider::Cuda,
    Provider::TensorRt,
    Provider::MiGraphX,
    Provider::CoreMl,
];

/// The library's version and what can compute with it.
pub(super) fn devices(library: &Path) -> Result<(String, Vec<Found>), String> {
    let ort = Ort::open(library).map_err(|error| with_causes(&error))?;
    let folder = std::fs::canonicalize(library).ok().and_then(|path| path.parent().map(Path::to_owned));
    let folder = folder.unwrap_or_default();
    let mut devices = Vec::new();
    for provider in PROVIDERS {
        if !ort.providers().iter().any(|name| name == provider.ort_name()) {
            continue;
        }
        let found = match provider {
            Provider::Cpu | Provider::CoreMl => Ok(vec![plain(provider)]),
            Provider::OpenVino => openvino_devices(&folder),
            Provider::Cuda | Provider::TensorRt | Provider::MiGraphX => {
                makes_a_session(&ort, provider).map(|()| vec![plain(provider)])
            }
        };
        match found {
            Ok(found) => devices.extend(found),
            Err(reason) => eprintln!("{provider} is left out: {reason}"),
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

/// Whether a provider finds its libraries, its driver and a device: it compiles a model of one node. Its library is not
/// loaded directly: its constructors need what ONNX Runtime gives it first.
fn makes_a_session(ort: &Arc<Ort>, provider: Provider) -> Result<(), String> {
    let provider = ProviderSetup { provider, options: BTreeMap::new() };
    let setup = SessionSetup { provider, threads: 1, cache_dir: None };
    let model = ModelBytes { proto: &identity(), weights: &[], inputs: &[], outputs: &[] };
    Session::new(ort, &setup, model).map(|_| ()).map_err(|error| with_causes(&error))
}

/// A ModelProto that gives one number back.
fn identity() -> Vec<u8> {
    // Every length here is below 128, and so is a varint of one byte.
    let field = |number: u8, bytes: &[u8]| {
        [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap_or(0)], bytes].concat()
    };
    // TypeProto{tensor_type: {elem_type: FLOAT, shape: {dim: {dim_value: 1}}}}
    let shape = field(2, &field(1, &[1 << 3, 1]));
    let kind = field(1, &[&[1 << 3, 1][..], &shape].concat());
    let value = |name: &[u8]| [field(1, name), field(2, &kind)].concat();
    let node = [field(1, b"x"), field(2, b"y"), field(4, b"Identity")].concat();
    let graph =
        [field(1, &node), field(2, b"probe"), field(11, &value(b"x")), field(12, &value(b"y"))].concat();
    // ir_version 8; OperatorSetIdProto{version: 13}
    [vec![1 << 3, 8], field(7, &graph), field(8, &[2 << 3, 13])].concat()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_that_tries_a_provider_compiles_where_there_is_one() {
        let named = std::env::var_os("LIGHTER_TEST_ORT");
        let folder = named.iter().flat_map(std::env::split_paths).next();
        let library = folder.and_then(|folder| {
            let entries = std::fs::read_dir(folder.join("onnxruntime/capi")).ok()?;
            entries.flatten().map(|entry| entry.path()).find(|path| {
                path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"libonnxruntime.so"))
            })
        });
        let Some(library) = library else {
            eprintln!("NOT RUN: LIGHTER_TEST_ORT names no ONNX Runtime (tools/wheels ort-1.32)");
            return;
        };
        let ort = Ort::open(&library).unwrap();
        assert_eq!(makes_a_session(&ort, Provider::Cpu), Ok(()));
        let reason = makes_a_session(&ort, Provider::Cuda).unwrap_err();
        assert!(reason.contains("CUDA"), "{reason}");
    }
}
