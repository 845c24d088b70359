// SPDX-License-Identifier: MIT OR Apache-2.0
//! Python tensors: reading their C++ side, and making new ones on the device in the way that the installed torch has.
//!
//! | torch | made by | its end is told by |
//! | --- | --- | --- |
//! | 2.14 and newer | `torch_from_blob`, `torch_tensor_to_pyobject` | the storage's deleter |
//! | 2.11 to 2.13 | `torch_from_blob`, `_aoti.alloc_tensor_by_stealing_from_void_ptr` | the storage's deleter |
//! | 2.9 and 2.10 | `_from_dlpack` with device type Metal | DLPack's deleter |
//! | 2.6 to 2.8 | `aoti_torch_create_tensor_from_blob`, the same stealing | a weak reference to the storage |
//!
//! They are plain `torch.Tensor`s whose storage address is the number that the host knows them by. Types that DLPack cannot
//! name go the last way in every torch that uses DLPack.
#![allow(unsafe_code)]

use crate::dlpack;
use crate::finalizer;
use crate::key::Known;
use crate::numbers::{Number, deleter};
use crate::python::{Gil, Kept, Kind, Object, Owned, Raised};
use crate::shims::{Blueprint, Fresh, Shims, Tensor};

/// How new tensors are made.
#[derive(Debug)]
pub(crate) enum Maker {
    /// By C functions alone.
    Direct,
    /// `torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr` gives a C++ tensor to Python.
    Steal(Kept),
    Dlpack {
        adopt: Kept,
        rest: finalizer::Maker,
    },
    Finalizer(finalizer::Maker),
}

/// The C++ side of an object that is a tensor.
pub(crate) fn of_object<'a>(known: &Known, object: Object<'a>) -> Option<Tensor<'a>> {
    let Ok(address) = object.attribute(known.cdata) else {
        object.gil().forget_error();
        return None;
    };
    let implementation = address.object().as_address()?;
    // SAFETY: `_cdata` of a tensor is its implementation's address, which lives as long as the Python tensor does.
    unsafe { Tensor::new(implementation.as_ptr()) }
}

impl Maker {
    /// The best that this torch has.
    pub(crate) fn choose(gil: Gil<'_>, shims: &Shims) -> Result<Self, Raised> {
        if shims.has_from_blob() && shims.has_to_python() {
            return Ok(Self::Direct);
        }
        let private = gil.import(c"torch._C")?;
        let aoti = private.object().attribute_named(c"_aoti")?;
        let steal = aoti.object().attribute_named(c"alloc_tensor_by_stealing_from_void_ptr")?.object().keep();
        if shims.has_from_blob() {
            return Ok(Self::Steal(steal));
        }
        let rest = finalizer::Maker::new(gil, steal)?;
        if dlpack_takes_metal(gil)? {
            let adopt = private.object().attribute_named(c"_from_dlpack")?.object().keep();
            return Ok(Self::Dlpack { adopt, rest });
        }
        Ok(Self::Finalizer(rest))
    }

    /// A new tensor with that number.
    pub(crate) fn make<'a>(
        &self,
        gil: Gil<'a>,
        shims: &Shims,
        number: Number,
        sizes: &[i64],
        strides: &[i64],
        dtype: i32,
    ) -> Result<Owned<'a>, Raised> {
        let plan = Blueprint { sizes, strides, dtype, address: number.address() };
        match self {
            Self::Direct => {
                let fresh = shims.with_deleter(plan, deleter).ok_or_else(|| refused(gil, plan))?;
                direct(gil, &fresh).unwrap_or_else(|| Err(refused(gil, plan)))
            }
            Self::Steal(steal) => {
                let fresh = shims.with_deleter(plan, deleter).ok_or_else(|| refused(gil, plan))?;
                stolen(gil, *steal, fresh)
            }
            Self::Dlpack { adopt, rest } => match dlpack::element(dtype) {
                Some(element) => dlpack::make(gil, *adopt, element, number, sizes, strides),
                None => rest.make(gil, shims, number, plan),
            },
            Self::Finalizer(maker) => maker.make(gil, shims, number, plan),
        }
    }

    /// Gives a C++ tensor that shares another's storage to Python.
    pub(crate) fn adopt<'a>(&self, gil: Gil<'a>, fresh: Fresh<'_>) -> Result<Owned<'a>, Raised> {
        if let Some(object) = direct(gil, &fresh) {
            return object;
        }
        match self {
            Self::Direct => Err(gil.raise(Kind::Runtime, "lighter_mps: torch gave no Python tensor")),
            Self::Steal(steal) => stolen(gil, *steal, fresh),
            Self::Dlpack { rest, .. } => rest.adopt(gil, fresh),
            Self::Finalizer(maker) => maker.adopt(gil, fresh),
        }
    }
}

/// None where torch has no function for it.
fn direct<'a>(gil: Gil<'a>, fresh: &Fresh<'_>) -> Option<Result<Owned<'a>, Raised>> {
    let object = fresh.to_python()?;
    if object.is_null() && !gil.has_error() {
        return Some(Err(gil.raise(Kind::Runtime, "lighter_mps: torch gave no Python tensor")));
    }
    // SAFETY: a new reference, or null with an error set.
    Some(unsafe { Owned::take(gil, object.cast()) })
}

/// Gives a C++ tensor to Python by torch's own function for that.
pub(crate) fn stolen<'a>(gil: Gil<'a>, steal: Kept, fresh: Fresh<'_>) -> Result<Owned<'a>, Raised> {
    // The function takes the handle over whether or not it makes an object of it.
    let handle = gil.capsule(fresh.into_handle(), None)?;
    steal.object(gil).call(&[handle.object()])
}

pub(crate) fn refused(gil: Gil<'_>, plan: Blueprint<'_>) -> Raised {
    let Blueprint { sizes, strides, dtype, .. } = plan;
    gil.raise(
        Kind::Runtime,
        &format!("lighter_mps: torch made no tensor of sizes {sizes:?}, strides {strides:?}, type {dtype}"),
    )
}

/// Whether `_from_dlpack` knows device type Metal: since 2.9.
fn dlpack_takes_metal(gil: Gil<'_>) -> Result<bool, Raised> {
    let torch = gil.import(c"torch")?;
    let version = torch.object().attribute_named(c"__version__")?;
    let mut numbers = version
        .object()
        .as_text()?
        .split(|byte| *byte == b'.')
        .map(|part| std::str::from_utf8(part).ok().and_then(|part| part.parse::<u32>().ok()));
    Ok(match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= (2, 9),
        _ => false,
    })
}

/// Bytes of one element of a type, by torch's number for it.
pub(crate) fn element_bytes(dtype: i32) -> Option<u64> {
    Some(match dtype {
        0 | 1 | 11 | 23 | 24 | 25 | 26 | 44 => 1,
        2 | 5 | 15 | 27 => 2,
        3 | 6 | 8 | 28 => 4,
        4 | 7 | 9 | 29 => 8,
        10 => 16,
        _ => return None,
    })
}

/// Elements from the first to the last that a tensor of this shape reaches; None where they cannot be counted.
pub(crate) fn span(sizes: &[i64], strides: &[i64]) -> Option<u64> {
    let mut reach = 1i64;
    for (size, stride) in sizes.iter().zip(strides) {
        if *size == 0 {
            return Some(0);
        }
        reach = reach.checked_add(size.checked_sub(1)?.checked_mul(*stride)?)?;
    }
    u64::try_from(reach).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_counts_what_a_shape_reaches() {
        assert_eq!(span(&[], &[]), Some(1));
        assert_eq!(span(&[2, 3], &[3, 1]), Some(6));
        assert_eq!(span(&[2, 3], &[0, 1]), Some(3));
        assert_eq!(span(&[2, 0], &[3, 1]), Some(0));
        assert_eq!(span(&[i64::MAX, 3], &[i64::MAX, 1]), None);
        assert_eq!(span(&[3], &[-1]), None);
    }
}
