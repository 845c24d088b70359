// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading a node's attributes.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::ffi::{CStr, c_void};
use core::marker::PhantomData;
use core::ptr::{NonNull, null, null_mut};

use ort_sys::{OrtOpAttr, OrtOpAttrType};

use super::tensor::Constant;
use super::{Ort, Status, text};

/// An attribute of a node.
#[derive(Clone, Copy)]
pub(crate) struct Attribute<'a> {
    ort: Ort,
    raw: NonNull<OrtOpAttr>,
    call: PhantomData<&'a OrtOpAttr>,
}

/// What an attribute can be and this library can write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Int,
    Ints,
    Float,
    Floats,
    Text,
    Texts,
    Tensor,
}

impl Kind {
    const ALL: [(i32, Self); 7] = [
        (1, Self::Int),
        (2, Self::Ints),
        (3, Self::Float),
        (4, Self::Floats),
        (5, Self::Text),
        (6, Self::Texts),
        (8, Self::Tensor),
    ];

    /// The runtime's type of this kind.
    const fn raw(self) -> OrtOpAttrType {
        match self {
            Self::Int => OrtOpAttrType::ORT_OP_ATTR_INT,
            Self::Ints => OrtOpAttrType::ORT_OP_ATTR_INTS,
            Self::Float => OrtOpAttrType::ORT_OP_ATTR_FLOAT,
            Self::Floats => OrtOpAttrType::ORT_OP_ATTR_FLOATS,
            Self::Text => OrtOpAttrType::ORT_OP_ATTR_STRING,
            Self::Texts => OrtOpAttrType::ORT_OP_ATTR_STRINGS,
            Self::Tensor => OrtOpAttrType::ORT_OP_ATTR_TENSOR,
        }
    }
}

impl<'a> Attribute<'a> {
    pub(crate) fn of(ort: Ort, raw: *const OrtOpAttr) -> Option<Self> {
        NonNull::new(raw.cast_mut()).map(|raw| Self { ort, raw, call: PhantomData })
    }

    /// Its name.
    pub(crate) fn name(&self) -> Result<&'a CStr, Status> {
        let mut name = null();
        // SAFETY: an attribute of this call and a place for the answer, which lives as long as the node.
        unsafe {
            self.ort.check((self.ort.api().OpAttr_GetName)(self.raw.as_ptr(), &raw mut name))?;
            Ok(text(name).unwrap_or_default())
        }
    }

    /// What it is; `None` for graphs and whatever this library does not know.
    pub(crate) fn kind(&self) -> Result<Option<Kind>, Status> {
        let mut number = 0_i32;
        // SAFETY: an attribute of this call; the runtime writes a number of 32 bits where its enumeration is asked for.
        let status = unsafe { (self.ort.api().OpAttr_GetType)(self.raw.as_ptr(), (&raw mut number).cast()) };
        self.ort.check(status)?;
        Ok(Kind::ALL.into_iter().find(|(of_kind, _)| *of_kind == number).map(|(_, kind)| kind))
    }

    /// Reads up to so many elements of the kind's own type; gives the length in bytes.
    ///
    /// # Safety
    /// Plain numbers as the kind has them.
    unsafe fn read<T: Copy + Default>(&self, kind: Kind) -> Result<Vec<T>, Status> {
        let read = |data: *mut c_void, bytes: usize, needed: &mut usize| {
            // SAFETY: an attribute of this call, and room for so many bytes.
            unsafe { (self.ort.api().ReadOpAttr)(self.raw.as_ptr(), kind.raw(), data, bytes, needed) }
        };
        let mut needed = 0;
        // Without room the call says how much it needs, as an error or not.
        drop(self.ort.check(read(null_mut(), 0, &mut needed)));
        let mut values = alloc::vec![T::default(); needed.div_ceil(size_of::<T>())];
        if needed > 0 {
            self.ort.check(read(values.as_mut_ptr().cast(), needed, &mut needed))?;
        }
        values.truncate(needed.div_ceil(size_of::<T>()));
        Ok(values)
    }

    pub(crate) fn ints(&self, kind: Kind) -> Result<Vec<i64>, Status> {
        // SAFETY: numbers of 64 bits.
        unsafe { self.read(kind) }
    }

    pub(crate) fn floats(&self, kind: Kind) -> Result<Vec<f32>, Status> {
        // SAFETY: numbers of 32 bits.
        unsafe { self.read(kind) }
    }

    /// One text, or several with a zero byte after each.
    pub(crate) fn bytes(&self, kind: Kind) -> Result<Vec<u8>, Status> {
        // SAFETY: bytes.
        unsafe { self.read(kind) }
    }

    /// The tensor in it.
    pub(crate) fn tensor(&self) -> Result<Option<Constant<'a>>, Status> {
        let mut value = null_mut();
        // SAFETY: an attribute of this call and a place for the answer, which is the caller's to give back.
        unsafe {
            let api = self.ort.api();
            self.ort.check((api.OpAttr_GetTensorAttributeAsOrtValue)(self.raw.as_ptr(), &raw mut value))?;
            Ok(NonNull::new(value).map(|value| Constant::owned(self.ort, value)))
        }
    }
}
