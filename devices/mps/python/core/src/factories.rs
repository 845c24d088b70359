// SPDX-License-Identifier: MIT OR Apache-2.0
//! New tensors without content, and copies on the device: the frequent cases natively, all else by the given function.
//!
//! `empty(fallback)`, `empty_strided(fallback)` and `copy(fallback, kernel)` each give a callable for torch's dispatcher
//! that is called like the operator. A fallback is called with the very arguments, also where there is no connection yet.
#![allow(unsafe_code)]

use pyo3_ffi as ffi;

use crate::call::{Call, Definition, answer};
use crate::core::{Core, STREAM, core};
use crate::kernel::no_number;
use crate::key::Reader;
use crate::plan::Layout;
use crate::python::{Gil, Kept, Object, Owned, Raised};
use crate::views::checked_contiguous_strides;

/// A callable's own part.
#[derive(Debug)]
struct Wrapped {
    form: Form,
    fallback: Kept,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Empty,
    EmptyStrided,
    /// With the kernel of `copy_` for two tensors on the device.
    Copy(Kept),
}

static DEFINITION: Definition = Definition::fast(c"factory", called);

/// `empty(fallback) -> callable` for aten::empty.memory_format.
pub(crate) fn empty<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    wrap(gil, call, Form::Empty)
}

/// `empty_strided(fallback) -> callable` for aten::empty_strided.
pub(crate) fn empty_strided<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    wrap(gil, call, Form::EmptyStrided)
}

/// `copy(fallback, kernel) -> callable` for aten::copy_.
pub(crate) fn copy<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    wrap(gil, call, Form::Copy(call.required(1, "kernel")?.keep()))
}

fn wrap<'a>(gil: Gil<'a>, call: &Call<'a>, form: Form) -> Result<Owned<'a>, Raised> {
    let fallback = call.required(0, "fallback")?.keep();
    let wrapped: &'static Wrapped = Box::leak(Box::new(Wrapped { form, fallback }));
    let bound = gil.pointer_to(wrapped)?;
    gil.function(&DEFINITION, bound.object())
}

unsafe extern "C" fn called(
    bound: *mut ffi::PyObject,
    arguments: *const *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
    names: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: Python calls its functions with the lock held, and with arguments as the vectorcall protocol says; what the
    // function is bound to was made by `wrap`, which leaked it.
    unsafe {
        answer(|gil| {
            let wrapped: &'static Wrapped = gil.pointed_to(bound)?;
            wrapped.call(gil, &Call::new(gil, arguments, count, names))
        })
    }
}

impl Wrapped {
    fn call<'a>(&self, gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
        let core = core(gil)?;
        if let Form::Copy(kernel) = self.form {
            return match pair_on_device(core, call) {
                Some((target, source)) => kernel.object(gil).call(&[target, source]),
                None => self.fall_back(gil, call),
            };
        }
        match self.layout(gil, core, call) {
            Some(layout) if STREAM.has_socket() => allocate(gil, core, &layout),
            _ => {
                gil.forget_error();
                self.fall_back(gil, call)
            }
        }
    }

    fn fall_back<'a>(&self, gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
        let positional = gil.tuple(call.positional().map(Object::owned).collect::<Vec<_>>().into_iter())?;
        let keywords = gil.dict()?;
        for (name, argument) in call.keywords() {
            keywords.object().set_entry(name, argument)?;
        }
        self.fallback.object(gil).call_with(positional.object(), keywords.object())
    }

    /// What is asked for, where it is one of the frequent cases.
    fn layout(&self, gil: Gil<'_>, core: &Core, call: &Call<'_>) -> Option<Layout> {
        let sizes = call.optional(0, "size")?.integers().ok()?;
        let (strides, first_option) = match self.form {
            Form::EmptyStrided => (call.optional(1, "stride")?.integers().ok()?, 2),
            _ => (checked_contiguous_strides(&sizes)?, 1),
        };
        let option = |index: usize, name| {
            call.optional(first_option + index, name).filter(|given: &Object<'_>| !given.is_none())
        };
        let strided = option(1, "layout").is_none_or(|layout| layout.is(core.known.strided.object(gil)));
        let pinned = option(3, "pin_memory").is_some_and(|pin| !pin.is(gil.boolean(false)));
        let plain = option(4, "memory_format")
            .is_none_or(|format| core.known.plain_formats.iter().any(|plain| format.is(plain.object(gil))));
        if !strided || pinned || !plain || sizes.iter().chain(&strides).any(|value| *value < 0) {
            return None;
        }
        let dtype = match option(0, "dtype") {
            Some(dtype) => core.known.dtype_code(dtype)?,
            None => {
                let default = core.known.default_dtype.object(gil).call(&[]).ok()?;
                core.known.dtype_code(default.object())?
            }
        };
        let layout = Layout { sizes, strides, dtype };
        (layout.sizes.len() == layout.strides.len() && layout.checked_bytes().is_some()).then_some(layout)
    }
}

/// Target and source where both are plain tensors on the device, with nothing left to be done to their elements.
fn pair_on_device<'a>(core: &'static Core, call: &Call<'a>) -> Option<(Object<'a>, Object<'a>)> {
    let reader = Reader { known: &core.known, shims: &core.shims, lazy: true };
    let (target, source) = (call.optional(0, "self")?, call.optional(1, "src")?);
    (reader.is_plain_on_device(target) && reader.is_plain_on_device(source)).then_some((target, source))
}

fn allocate<'a>(gil: Gil<'a>, core: &'static Core, layout: &Layout) -> Result<Owned<'a>, Raised> {
    let bytes = layout.bytes();
    let number = STREAM.take_number(bytes).ok_or_else(|| no_number(gil))?;
    let tensor = core.maker.make(gil, &core.shims, number, &layout.sizes, &layout.strides, layout.dtype);
    // Also where no tensor was made: its storage may have been, and then a FREE comes.
    let [dtype, ..] = layout.dtype.to_le_bytes();
    if STREAM.alloc(number, bytes, dtype) {
        core.flush_when_due(gil)?;
    }
    tensor
}
