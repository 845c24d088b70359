// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions that Python calls: their definitions, their arguments, and the way back.
//!
//! All of them use the vectorcall protocol with keywords, so that there is one way to read arguments.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3_ffi as ffi;

use crate::module::FUNCTIONS;
use crate::python::{Gil, Kind, Object, Owned, Raised};

/// How Python knows a function.
#[repr(transparent)]
pub(crate) struct Definition(ffi::PyMethodDef);

// SAFETY: Python only reads it.
unsafe impl Sync for Definition {}

impl Definition {
    /// A function that takes positional and keyword arguments.
    pub(crate) const fn fast(name: &'static CStr, function: ffi::PyCFunctionFastWithKeywords) -> Self {
        Self(ffi::PyMethodDef {
            ml_name: name.as_ptr(),
            ml_meth: ffi::PyMethodDefPointer { PyCFunctionFastWithKeywords: function },
            ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
            ml_doc: std::ptr::null(),
        })
    }

    /// A function of exactly one argument.
    pub(crate) const fn one(name: &'static CStr, function: ffi::PyCFunction) -> Self {
        Self(ffi::PyMethodDef {
            ml_name: name.as_ptr(),
            ml_meth: ffi::PyMethodDefPointer { PyCFunction: function },
            ml_flags: ffi::METH_O,
            ml_doc: std::ptr::null(),
        })
    }
}

impl Deref for Definition {
    type Target = ffi::PyMethodDef;

    fn deref(&self) -> &ffi::PyMethodDef {
        &self.0
    }
}

/// The arguments of one call.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    gil: Gil<'a>,
    /// Positional ones, then those by keyword.
    arguments: &'a [*mut ffi::PyObject],
    positional: usize,
    names: Option<Object<'a>>,
}

impl<'a> Call<'a> {
    /// # Safety
    /// The three are what Python gave a vectorcall function, and stay as they are for `'a`.
    pub(crate) unsafe fn new(
        gil: Gil<'a>,
        arguments: *const *mut ffi::PyObject,
        count: ffi::Py_ssize_t,
        names: *mut ffi::PyObject,
    ) -> Self {
        // SAFETY: the tuple of names, if there is one, lives for the call.
        let names = unsafe { Object::new(gil, names) };
        let positional = usize::try_from(count).unwrap_or(0);
        let all = positional.saturating_add(names.and_then(Object::sequence_length).unwrap_or(0));
        let arguments = if arguments.is_null() || all == 0 {
            &[][..]
        } else {
            // SAFETY: as many living objects as there are positions and names, by the protocol.
            unsafe { std::slice::from_raw_parts(arguments, all) }
        };
        Self { gil, arguments, positional, names }
    }

    pub(crate) fn positional_count(&self) -> usize {
        self.positional
    }

    /// The argument with that index, keywords counted after positions.
    pub(crate) fn argument(&self, index: usize) -> Option<Object<'a>> {
        self.arguments.get(index).and_then(|pointer| self.object(*pointer))
    }

    fn object(&self, pointer: *mut ffi::PyObject) -> Option<Object<'a>> {
        // SAFETY: the caller of the function holds its arguments for the whole call.
        unsafe { Object::new(self.gil, pointer) }
    }

    pub(crate) fn positional(&self) -> impl Iterator<Item = Object<'a>> {
        self.arguments.iter().take(self.positional).filter_map(|pointer| self.object(*pointer))
    }

    pub(crate) fn keywords(&self) -> impl Iterator<Item = (Object<'a>, Object<'a>)> {
        let values = self.arguments.iter().skip(self.positional);
        values.enumerate().filter_map(|(index, value)| {
            let name = self.names?.borrowed_item_of_tuple(index)?;
            Some((name, self.object(*value)?))
        })
    }

    /// An argument by position or name, if it was given.
    pub(crate) fn optional(&self, index: usize, name: &str) -> Option<Object<'a>> {
        if index < self.positional {
            return self.argument(index);
        }
        self.keywords()
            .find(|(given, _)| given.as_text().is_ok_and(|given| given == name.as_bytes()))
            .map(|(_, value)| value)
    }

    /// An argument by position or name; a TypeError names it where it is missing.
    pub(crate) fn required(&self, index: usize, name: &str) -> Result<Object<'a>, Raised> {
        self.optional(index, name).ok_or_else(|| {
            self.gil.raise(Kind::Type, &format!("lighter_mps._core: the argument {name} is missing"))
        })
    }
}

/// Runs the Rust side of a function that Python called, and gives it a new reference, or null with an error set. A panic
/// (which would be a mistake of ours) becomes a RuntimeError where panics unwind.
///
/// # Safety
/// The calling thread holds the interpreter's lock, as every caller of a Python function does.
pub(crate) unsafe fn answer(
    work: impl for<'a> FnOnce(Gil<'a>) -> Result<Owned<'a>, Raised>,
) -> *mut ffi::PyObject {
    // SAFETY: the caller's promise.
    let gil = unsafe { Gil::assume() };
    match catch_unwind(AssertUnwindSafe(|| work(gil).map(Owned::into_pointer))) {
        Ok(Ok(object)) => object.as_ptr(),
        Ok(Err(Raised)) => {
            if !gil.has_error() {
                gil.raise(Kind::Runtime, "lighter_mps._core: a call failed and said nothing");
            }
            std::ptr::null_mut()
        }
        Err(_) => {
            gil.raise(
                Kind::Runtime,
                "lighter_mps._core: internal error; LIGHTER_MPS_CORE=0 does without this library",
            );
            std::ptr::null_mut()
        }
    }
}

/// The module, made of its functions.
pub(crate) fn module(gil: Gil<'_>) -> Result<Owned<'_>, Raised> {
    // Python keeps and changes both for as long as the process lives.
    let mut methods: Vec<ffi::PyMethodDef> = FUNCTIONS.iter().map(|function| function.0).collect();
    methods.push(ffi::PyMethodDef::zeroed());
    let definition = Box::leak(Box::new(ffi::PyModuleDef {
        m_base: ffi::PyModuleDef_HEAD_INIT,
        m_name: c"_core".as_ptr(),
        m_doc: c"The hot path of lighter_mps in native code; lighter_mps.hot is the same in Python.".as_ptr(),
        m_size: -1,
        m_methods: methods.leak().as_mut_ptr(),
        m_slots: std::ptr::null_mut(),
        m_traverse: None,
        m_clear: None,
        m_free: None,
    }));
    // SAFETY: the definition and its null-ended methods live for ever; a new reference or null with an error set.
    let module = unsafe { Owned::take(gil, ffi::PyModule_Create(definition))? };
    module.object().set_attribute(c"OWN_FLUSHER", gil.boolean(true))?;
    Ok(module)
}
