// SPDX-License-Identifier: MIT OR Apache-2.0
//! New tensors by DLPack, for the torches that take device type Metal but have no `torch_from_blob`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use crate::numbers::{FREED, Number};
use crate::python::{Gil, Kept, Owned, Raised};

/// The name of a capsule whose tensor nobody has taken over.
const DLTENSOR: &CStr = c"dltensor";
/// DLPack's number for Metal.
const METAL: i32 = 8;

/// DLDataType.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// DLManagedTensor, as dlpack.h has it, and after it what it points to.
#[repr(C)]
struct Managed {
    data: *mut c_void,
    device_type: i32,
    device_index: i32,
    dim: i32,
    element: Element,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    number: Number,
    /// Sizes, then strides.
    extents: Box<[i64]>,
}

/// torch's number of a type in DLPack's words, or None where it has none.
pub(crate) fn element(dtype: i32) -> Option<Element> {
    let (code, bits) = match dtype {
        0 => (1, 8),
        1 => (0, 8),
        2 => (0, 16),
        3 => (0, 32),
        4 => (0, 64),
        5 => (2, 16),
        6 => (2, 32),
        7 => (2, 64),
        8 => (5, 32),
        9 => (5, 64),
        10 => (5, 128),
        11 => (6, 8),
        15 => (4, 16),
        27 => (1, 16),
        28 => (1, 32),
        29 => (1, 64),
        _ => return None,
    };
    Some(Element { code, bits, lanes: 1 })
}

/// A tensor of that number, made by `torch._C._from_dlpack`.
pub(crate) fn make<'a>(
    gil: Gil<'a>,
    adopt: Kept,
    element: Element,
    number: Number,
    sizes: &[i64],
    strides: &[i64],
) -> Result<Owned<'a>, Raised> {
    let extents: Box<[i64]> = sizes.iter().chain(strides).copied().collect();
    let shape = extents.as_ptr();
    let managed = Box::into_raw(Box::new(Managed {
        data: std::ptr::with_exposed_provenance_mut(usize::try_from(number.address()).unwrap_or(0)),
        device_type: METAL,
        device_index: 0,
        dim: i32::try_from(sizes.len()).unwrap_or(i32::MAX),
        element,
        shape,
        strides: shape.wrapping_add(sizes.len()),
        byte_offset: 0,
        context: std::ptr::null_mut(),
        deleter: Some(deleter),
        number,
        extents,
    }));
    // torch renames the capsule when it takes the tensor over; one that still has its name was not taken.
    let capsule = gil.capsule(managed.cast(), Some((DLTENSOR, discard)))?;
    adopt.object(gil).call(&[capsule.object()])
}

/// What torch calls when the storage goes.
unsafe extern "C" fn deleter(managed: *mut Managed) {
    // SAFETY: torch calls it once, with what `make` leaked.
    let managed = unsafe { Box::from_raw(managed) };
    drop(managed.extents);
    FREED.push(managed.number);
}

/// What Python calls when a capsule goes: frees what torch did not take.
unsafe extern "C" fn discard(capsule: *mut pyo3_ffi::PyObject) {
    let name: *const c_char = DLTENSOR.as_ptr();
    // SAFETY: a capsule that Python is about to free; the pointer is asked for only under the name that `make` gave it, which
    // means that it is still ours. The number is not told to anybody: no tensor ever had it.
    unsafe {
        if pyo3_ffi::PyCapsule_IsValid(capsule, name) != 0 {
            let managed = pyo3_ffi::PyCapsule_GetPointer(capsule, name).cast::<Managed>();
            drop(Box::from_raw(managed));
        }
    }
}
