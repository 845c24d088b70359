// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data of a tensor that ONNX Runtime holds.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ptr::{NonNull, null, null_mut};
use core::slice;

use lighter_frames::Element;
use ort_sys::OrtValue;

use super::{Ort, Status};

/// Element type, dimensions and data of a tensor. `element` is `None` for a type that does not travel, whose data are
/// then not looked at: they may be no plain bytes.
pub(crate) struct View<'a> {
    pub(crate) element: Option<Element>,
    pub(crate) number: i32,
    pub(crate) dims: &'a [i64],
    pub(crate) data: &'a [u8],
}

/// # Safety
/// A tensor that lives as long as the lifetime says, and that nobody writes to meanwhile.
pub(crate) unsafe fn view<'a>(ort: Ort, value: *const OrtValue) -> Result<View<'a>, Status> {
    let api = ort.api();
    let (mut number, mut dims, mut rank) = (0_i32, null(), 0);
    let (mut bytes, mut data) = (0, null());
    // SAFETY: the caller's promise, and places for the answers, which the tensor owns; the runtime writes a number of 32
    // bits where its enumeration is asked for.
    unsafe {
        let element = (&raw mut number).cast();
        ort.check((api.GetTensorElementTypeAndShapeDataReference)(
            value,
            element,
            &raw mut dims,
            &raw mut rank,
        ))?;
        let dims = if dims.is_null() { &[] } else { slice::from_raw_parts(dims, rank) };
        let element = Element::from_number(number);
        if element.is_none() {
            return Ok(View { element, number, dims, data: &[] });
        }
        ort.check((api.GetTensorSizeInBytes)(value, &raw mut bytes))?;
        ort.check((api.GetTensorData)(value, &raw mut data))?;
        let data = if data.is_null() { &[] } else { slice::from_raw_parts(data.cast(), bytes) };
        Ok(View { element, number, dims, data })
    }
}

/// The place for a tensor's data.
///
/// # Safety
/// A tensor of plain bytes that lives as long as the lifetime says, and that nobody else looks at meanwhile.
pub(crate) unsafe fn place<'a>(ort: Ort, value: *mut OrtValue) -> Result<&'a mut [u8], Status> {
    let (mut bytes, mut data) = (0, null_mut());
    // SAFETY: the caller's promise, and places for the answers, which the tensor owns.
    unsafe {
        ort.check((ort.api().GetTensorSizeInBytes)(value, &raw mut bytes))?;
        ort.check((ort.api().GetTensorMutableData)(value, &raw mut data))?;
        Ok(if data.is_null() { &mut [] } else { slice::from_raw_parts_mut(data.cast(), bytes) })
    }
}

/// A tensor that does not change: an initialiser or an attribute.
pub(crate) struct Constant<'a> {
    ort: Ort,
    value: NonNull<OrtValue>,
    is_owned: bool,
    call: PhantomData<&'a OrtValue>,
}

impl Constant<'_> {
    /// # Safety
    /// A tensor that the graph owns, for as long as the lifetime says.
    pub(crate) unsafe fn borrowed(ort: Ort, value: NonNull<OrtValue>) -> Result<Self, Status> {
        Ok(Self { ort, value, is_owned: false, call: PhantomData })
    }

    /// # Safety
    /// A tensor that the caller has been given, and gives to this.
    pub(crate) unsafe fn owned(ort: Ort, value: NonNull<OrtValue>) -> Self {
        Self { ort, value, is_owned: true, call: PhantomData }
    }

    /// What is in it.
    pub(crate) fn view(&self) -> Result<View<'_>, Status> {
        // SAFETY: a constant that lives at least as long as this.
        unsafe { view(self.ort, self.value.as_ptr()) }
    }
}

impl Drop for Constant<'_> {
    fn drop(&mut self) {
        if self.is_owned {
            // SAFETY: this library's own tensor, given back once.
            unsafe { (self.ort.api().ReleaseValue)(self.value.as_ptr()) };
        }
    }
}

/// Tensors that a session has made; given back when dropped.
pub(crate) struct Outputs {
    ort: Ort,
    values: Vec<*mut OrtValue>,
}

impl Outputs {
    /// Room for so many.
    pub(crate) fn new(ort: Ort, count: usize) -> Self {
        Self { ort, values: alloc::vec![null_mut(); count] }
    }

    pub(crate) fn places(&mut self) -> &mut [*mut OrtValue] {
        &mut self.values
    }

    /// What is in them; `None` for one that was not made.
    pub(crate) fn views(&self) -> impl Iterator<Item = Option<Result<View<'_>, Status>>> {
        // SAFETY: tensors that live as long as this, whose session is done with them.
        self.values.iter().map(|value| (!value.is_null()).then(|| unsafe { view(self.ort, *value) }))
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        for value in self.values.iter().filter(|value| !value.is_null()) {
            // SAFETY: this library's own tensors, each given back once.
            unsafe { (self.ort.api().ReleaseValue)(*value) };
        }
    }
}
