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
    Steal(Steal),
    Dlpack {
        adopt: Kept,
        rest: finalizer::Maker,
    },
    Finalizer(finalizer::Maker),
}

/// `torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr`, which gives a C++ tensor to Python.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steal {
    function: Kept,
    /// Despite its name it leaves the handle to its caller in the torches that were looked at, who must delete it then; one
    /// that does not would delete it twice, so this is found out by trying.
    keeps_handle: bool,
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
    /// The best that this torch has, or the `asked` one: "direct", "steal", "dlpack" or "finalizer".
    pub(crate) fn choose(
        gil: Gil<'_>,
        known: &Known,
        shims: &Shims,
        asked: Option<&[u8]>,
    ) -> Result<Self, Raised> {
        let wanted = |name: &[u8]| asked.is_none_or(|asked| asked == name);
        if wanted(b"direct") && shims.has_from_blob() && shims.has_to_python() {
            return Ok(Self::Direct);
        }
        let private = gil.import(c"torch._C")?;
        let aoti = private.object().attribute_named(c"_aoti")?;
        let function =
            aoti.object().attribute_named(c"alloc_tensor_by_stealing_from_void_ptr")?.object().keep();
        let steal = Steal::try_out(gil, known, shims, function)?;
        if wanted(b"steal") && shims.has_from_blob() {
            return Ok(Self::Steal(steal));
        }
        let rest = finalizer::Maker::new(gil, steal)?;
        if wanted(b"dlpack") && dlpack_takes_metal(gil)? {
            let adopt = private.object().attribute_named(c"_from_dlpack")?.object().keep();
            return Ok(Self::Dlpack { adopt, rest });
        }
        if wanted(b"finalizer") {
            return Ok(Self::Finalizer(rest));
        }
        Err(gil.raise(Kind::Value, "lighter_mps._core: this torch has no such way to make tensors"))
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
                steal.give(gil, fresh)
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
            Self::Steal(steal) => steal.give(gil, fresh),
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

impl Steal {
    /// Gives Python a C++ tensor of its own and asks how many hold it: if the handle still does, it is ours to delete.
    fn try_out(gil: Gil<'_>, known: &Known, shims: &Shims, function: Kept) -> Result<Self, Raised> {
        let torch = gil.import(c"torch")?;
        let probe = torch.object().call_method_with(c"empty", gil.integer(0)?.object())?;
        let fresh = of_object(known, probe.object())
            .and_then(|tensor| shims.reinterpret(&tensor, &[0], &[1], 0))
            .ok_or_else(|| gil.raise(Kind::Runtime, "lighter_mps: torch made no view of an empty tensor"))?;
        let handle = fresh.into_handle();
        let capsule = gil.capsule(handle, None)?;
        let tensor = function.object(gil).call(&[capsule.object()])?;
        let holders = tensor.object().call_method(c"_use_count")?.object().as_integer()?;
        // The one of the trial is left where it is: a few bytes, once.
        Ok(Self { function, keeps_handle: holders > 1 })
    }

    pub(crate) fn give<'a>(&self, gil: Gil<'a>, fresh: Fresh<'_>) -> Result<Owned<'a>, Raised> {
        let capsule = gil.capsule(fresh.handle(), None)?;
        let result = self.function.object(gil).call(&[capsule.object()]);
        if !self.keeps_handle {
            fresh.into_handle();
        }
        result
    }
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
