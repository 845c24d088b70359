// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run of a compiled node: its inputs, and places for its outputs.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ptr::{NonNull, null, null_mut};

use ort_sys::{OrtKernelContext, OrtValue};

use super::tensor::{View, place, view};
use super::{Ort, Status};

/// A run, for the length of a call.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    ort: Ort,
    raw: NonNull<OrtKernelContext>,
    call: PhantomData<&'a OrtKernelContext>,
}

impl<'a> Context<'a> {
    /// # Safety
    /// A context that the runtime has passed in, for at most as long as its call.
    pub(crate) unsafe fn new(ort: Ort, raw: *mut OrtKernelContext) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { ort, raw, call: PhantomData })
    }

    /// The inputs as the runtime's own values.
    pub(crate) fn values(&self) -> Result<Vec<*const OrtValue>, Status> {
        let api = self.ort.api();
        let mut count = 0;
        // SAFETY: a context of this call and places for the answers, which the runtime owns.
        unsafe {
            self.ort.check((api.KernelContext_GetInputCount)(self.raw.as_ptr(), &raw mut count))?;
            let mut values = alloc::vec![null(); count];
            for (index, value) in values.iter_mut().enumerate() {
                self.ort.check((api.KernelContext_GetInput)(self.raw.as_ptr(), index, value))?;
            }
            Ok(values)
        }
    }

    /// The inputs; `None` for one that is left out.
    pub(crate) fn inputs(&self) -> Result<Vec<Option<View<'a>>>, Status> {
        let values = self.values()?;
        // SAFETY: tensors that the runtime keeps as they are for the length of this call.
        values
            .into_iter()
            .map(|value| (!value.is_null()).then(|| unsafe { view(self.ort, value) }).transpose())
            .collect()
    }

    /// The place for an output of this shape, with the type that the graph declares; `None` when nobody wants it.
    pub(crate) fn output(&self, index: usize, dims: &[i64]) -> Result<Option<&'a mut [u8]>, Status> {
        let mut value = null_mut();
        // SAFETY: a context of this call, dimensions that live through it, and a place for the answer, which the runtime
        // owns and nobody looks at before the run is over.
        unsafe {
            let api = self.ort.api();
            let (dims, rank) = (dims.as_ptr(), dims.len());
            self.ort.check((api.KernelContext_GetOutput)(
                self.raw.as_ptr(),
                index,
                dims,
                rank,
                &raw mut value,
            ))?;
            if value.is_null() { Ok(None) } else { place(self.ort, value).map(Some) }
        }
    }
}
