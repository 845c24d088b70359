// SPDX-License-Identifier: MIT OR Apache-2.0
//! Thin wrappers over pyo3-ffi: the held interpreter lock, objects that are borrowed or owned, and raised errors.
//!
//! Every function here that touches Python asks for a [`Gil`] or for an object that was made with one, so code outside
//! the modules that are called by C cannot reach Python without the lock. Why not pyo3 itself: a pyo3 function cannot
//! carry a kernel of its own through `METH_FASTCALL`, and its closures take their arguments as a tuple and a dict.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

use pyo3_ffi as ffi;

/// Proof that this thread holds the interpreter's lock for `'a`; it cannot go to another thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gil<'a>(PhantomData<(&'a (), *mut ())>);

/// A Python error is set, and the caller's part is to return to Python.
#[derive(Debug)]
pub(crate) struct Raised;

/// Which exception to raise.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Runtime,
    Type,
    Value,
    Connection,
}

/// An object that somebody else keeps alive for `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object<'a>(NonNull<ffi::PyObject>, Gil<'a>);

/// A reference of our own; dropped, it is given back.
#[derive(Debug)]
pub(crate) struct Owned<'a>(NonNull<ffi::PyObject>, Gil<'a>);

/// A reference kept for as long as the process lives, for module state. It is never given back: the state outlives
/// the interpreter, and a reference given back after its end would crash.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept(NonNull<ffi::PyObject>);

// SAFETY: the pointer is only turned into an object again with a `Gil`.
unsafe impl Send for Kept {}
// SAFETY: as for Send.
unsafe impl Sync for Kept {}

impl<'a> Gil<'a> {
    /// # Safety
    /// The calling thread holds the interpreter's lock for all of `'a`.
    pub(crate) unsafe fn assume() -> Self {
        Self(PhantomData)
    }

    /// Runs `work` with the lock given up, so that other Python threads go on meanwhile. `Send` keeps every object and
    /// this token out of `work`.
    pub(crate) fn released<R>(self, work: impl FnOnce() -> R + Send) -> R {
        struct Restore(*mut ffi::PyThreadState);
        impl Drop for Restore {
            fn drop(&mut self) {
                // SAFETY: the state is the one that this thread gave up below, and it is given back once.
                unsafe { ffi::PyEval_RestoreThread(self.0) }
            }
        }
        // SAFETY: this thread holds the lock (the token), and takes it again in `drop`, also when `work` panics.
        let _restore = Restore(unsafe { ffi::PyEval_SaveThread() });
        work()
    }

    pub(crate) fn none(self) -> Owned<'a> {
        // SAFETY: None is an object that lives for ever, so not null.
        Object(unsafe { NonNull::new_unchecked(ffi::Py_None()) }, self).owned()
    }

    pub(crate) fn boolean(self, value: bool) -> Object<'a> {
        // SAFETY: True and False are objects that live for ever.
        let pointer = unsafe { if value { ffi::Py_True() } else { ffi::Py_False() } };
        // SAFETY: as above, and not null.
        Object(unsafe { NonNull::new_unchecked(pointer) }, self)
    }

    pub(crate) fn integer(self, value: u64) -> Result<Owned<'a>, Raised> {
        // SAFETY: a new reference, or null with an error set.
        unsafe { Owned::take(self, ffi::PyLong_FromUnsignedLongLong(value)) }
    }

    pub(crate) fn text(self, value: &str) -> Result<Owned<'a>, Raised> {
        // SAFETY: pointer and length are of one str, which Python copies.
        unsafe {
            Owned::take(self, ffi::PyUnicode_FromStringAndSize(value.as_ptr().cast(), signed(value.len())))
        }
    }

    /// A tuple of `items`.
    pub(crate) fn tuple(self, items: impl ExactSizeIterator<Item = Owned<'a>>) -> Result<Owned<'a>, Raised> {
        // SAFETY: a new tuple, or null with an error set.
        let tuple = unsafe { Owned::take(self, ffi::PyTuple_New(signed(items.len())))? };
        for (index, item) in items.enumerate() {
            // SAFETY: SetItem takes the reference over; nobody else knows the tuple yet.
            unsafe { ffi::PyTuple_SetItem(tuple.0.as_ptr(), signed(index), item.into_pointer().as_ptr()) };
        }
        Ok(tuple)
    }

    /// A list of `items`.
    pub(crate) fn list(self, items: impl ExactSizeIterator<Item = Owned<'a>>) -> Result<Owned<'a>, Raised> {
        // SAFETY: a new list, or null with an error set.
        let list = unsafe { Owned::take(self, ffi::PyList_New(signed(items.len())))? };
        for (index, item) in items.enumerate() {
            // SAFETY: SetItem takes the reference over; nobody else knows the list yet.
            unsafe { ffi::PyList_SetItem(list.0.as_ptr(), signed(index), item.into_pointer().as_ptr()) };
        }
        Ok(list)
    }

    pub(crate) fn dict(self) -> Result<Owned<'a>, Raised> {
        // SAFETY: a new dict, or null with an error set.
        unsafe { Owned::take(self, ffi::PyDict_New()) }
    }

    /// A capsule around a pointer; with a name and what to call with the capsule when it goes.
    pub(crate) fn capsule(
        self,
        pointer: *mut c_void,
        named: Option<(&'static CStr, ffi::PyCapsule_Destructor)>,
    ) -> Result<Owned<'a>, Raised> {
        let (name, destructor) = match named {
            Some((name, destructor)) => (name.as_ptr(), Some(destructor)),
            None => (std::ptr::null(), None),
        };
        // SAFETY: the name lives for ever; a new reference or null with an error set.
        unsafe { Owned::take(self, ffi::PyCapsule_New(pointer, name, destructor)) }
    }

    /// A Python function of one argument, bound to `bound`.
    pub(crate) fn function(
        self,
        definition: &'static ffi::PyMethodDef,
        bound: Object<'_>,
    ) -> Result<Owned<'a>, Raised> {
        let definition = std::ptr::from_ref(definition).cast_mut();
        // SAFETY: Python only reads the definition, which lives for ever, and takes a reference of `bound` of its own.
        unsafe {
            Owned::take(self, ffi::PyCFunction_NewEx(definition, bound.pointer(), std::ptr::null_mut()))
        }
    }

    /// Lets handlers of signals that came run; an error that one raises is set.
    pub(crate) fn check_signals(self) -> Result<(), Raised> {
        // SAFETY: always allowed with the lock held.
        if unsafe { ffi::PyErr_CheckSignals() } == 0 { Ok(()) } else { Err(Raised) }
    }

    pub(crate) fn has_error(self) -> bool {
        // SAFETY: always allowed with the lock held.
        unsafe { !ffi::PyErr_Occurred().is_null() }
    }

    pub(crate) fn import(self, module: &CStr) -> Result<Owned<'a>, Raised> {
        // SAFETY: a C string; a new reference or null with an error set.
        unsafe { Owned::take(self, ffi::PyImport_ImportModule(module.as_ptr())) }
    }

    /// A string that Python keeps one copy of, for names of attributes.
    pub(crate) fn interned(self, text: &CStr) -> Result<Kept, Raised> {
        // SAFETY: a C string; a new reference or null with an error set.
        let owned = unsafe { Owned::take(self, ffi::PyUnicode_InternFromString(text.as_ptr()))? };
        Ok(owned.object().keep())
    }

    /// An int that holds the address of what lives for ever.
    pub(crate) fn pointer_to<T>(self, target: &'static T) -> Result<Owned<'a>, Raised> {
        // SAFETY: any address is a number; a new reference or null with an error set.
        unsafe { Owned::take(self, ffi::PyLong_FromVoidPtr(std::ptr::from_ref(target).cast_mut().cast())) }
    }

    /// What [`Gil::pointer_to`] made an int of.
    ///
    /// # Safety
    /// `number` is an object that `pointer_to` made of a `T`.
    pub(crate) unsafe fn pointed_to<T>(self, number: *mut ffi::PyObject) -> Result<&'static T, Raised> {
        // SAFETY: the caller's promise; Python checks the type.
        unsafe { ffi::PyLong_AsVoidPtr(number).cast::<T>().as_ref().ok_or(Raised) }
    }

    /// Sets a Python error.
    pub(crate) fn raise(self, kind: Kind, message: &str) -> Raised {
        let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
        // SAFETY: the exceptions are objects that live for ever, the text is a C string that Python copies.
        unsafe {
            let exception = match kind {
                Kind::Runtime => ffi::PyExc_RuntimeError,
                Kind::Type => ffi::PyExc_TypeError,
                Kind::Value => ffi::PyExc_ValueError,
                Kind::Connection => ffi::PyExc_ConnectionError,
            };
            ffi::PyErr_SetString(exception, text.as_ptr());
        }
        Raised
    }

    /// Forgets the error that is set, if any; true if there was one.
    pub(crate) fn forget_error(self) -> bool {
        let was = self.has_error();
        if was {
            // SAFETY: always allowed with the lock held.
            unsafe { ffi::PyErr_Clear() };
        }
        was
    }
}

/// Python's sizes are signed; no slice in memory is longer than they can say.
pub(crate) fn signed(length: usize) -> ffi::Py_ssize_t {
    ffi::Py_ssize_t::try_from(length).unwrap_or(ffi::Py_ssize_t::MAX)
}

impl<'a> Object<'a> {
    /// # Safety
    /// `pointer` is null or an object that lives for `'a`.
    pub(crate) unsafe fn new(gil: Gil<'a>, pointer: *mut ffi::PyObject) -> Option<Self> {
        Some(Self(NonNull::new(pointer)?, gil))
    }

    pub(crate) fn gil(self) -> Gil<'a> {
        self.1
    }

    pub(crate) fn pointer(self) -> *mut ffi::PyObject {
        self.0.as_ptr()
    }

    pub(crate) fn kind(self) -> *mut ffi::PyTypeObject {
        // SAFETY: a living object has a type.
        unsafe { ffi::Py_TYPE(self.pointer()) }
    }

    pub(crate) fn is_none(self) -> bool {
        // SAFETY: only compares addresses.
        unsafe { ffi::Py_IsNone(self.pointer()) != 0 }
    }

    pub(crate) fn is(self, other: Object<'_>) -> bool {
        self.0 == other.0
    }

    pub(crate) fn owned(self) -> Owned<'a> {
        // SAFETY: a living object.
        unsafe { ffi::Py_INCREF(self.pointer()) };
        Owned(self.0, self.1)
    }

    pub(crate) fn keep(self) -> Kept {
        Kept(self.owned().into_pointer())
    }

    pub(crate) fn attribute(self, name: Kept) -> Result<Owned<'a>, Raised> {
        // SAFETY: two living objects; a new reference or null with an error set.
        unsafe { Owned::take(self.1, ffi::PyObject_GetAttr(self.pointer(), name.0.as_ptr())) }
    }

    pub(crate) fn attribute_named(self, name: &CStr) -> Result<Owned<'a>, Raised> {
        // SAFETY: a living object and a C string; a new reference or null with an error set.
        unsafe { Owned::take(self.1, ffi::PyObject_GetAttrString(self.pointer(), name.as_ptr())) }
    }

    /// Calls it with up to five arguments.
    pub(crate) fn call(self, arguments: &[Object<'_>]) -> Result<Owned<'a>, Raised> {
        let none = std::ptr::null_mut::<ffi::PyObject>();
        let at = |index: usize| arguments.get(index).map_or(none, |argument| argument.pointer());
        // SAFETY: living objects, and the list that the call reads ends with a null whatever its length is.
        unsafe {
            Owned::take(
                self.1,
                ffi::PyObject_CallFunctionObjArgs(self.pointer(), at(0), at(1), at(2), at(3), at(4), none),
            )
        }
    }

    /// Calls it with a tuple of positional and a dict of keyword arguments.
    pub(crate) fn call_with(self, positional: Object<'_>, keywords: Object<'_>) -> Result<Owned<'a>, Raised> {
        // SAFETY: living objects; Python checks that they are a tuple and a dict.
        unsafe {
            Owned::take(self.1, ffi::PyObject_Call(self.pointer(), positional.pointer(), keywords.pointer()))
        }
    }

    /// Calls a method without arguments.
    pub(crate) fn call_method(self, name: &CStr) -> Result<Owned<'a>, Raised> {
        let method = self.attribute_named(name)?;
        let result = method.object().call(&[])?;
        Ok(result.in_gil(self.1))
    }

    /// Calls a method with one argument.
    pub(crate) fn call_method_with(self, name: &CStr, argument: Object<'_>) -> Result<Owned<'a>, Raised> {
        let method = self.attribute_named(name)?;
        let result = method.object().call(&[argument])?;
        Ok(result.in_gil(self.1))
    }

    /// The text of a str, for as long as the str lives.
    pub(crate) fn as_text(self) -> Result<&'a [u8], Raised> {
        let mut length = 0;
        // SAFETY: Python checks the type; the bytes belong to the str, which lives for 'a.
        unsafe {
            let data = ffi::PyUnicode_AsUTF8AndSize(self.pointer(), &mut length);
            if data.is_null() {
                return Err(Raised);
            }
            Ok(std::slice::from_raw_parts(data.cast(), usize::try_from(length).unwrap_or(0)))
        }
    }

    /// The content of bytes or a bytearray, given to `read`, which must not call Python: that could change it.
    pub(crate) fn with_bytes<R>(self, read: impl FnOnce(&[u8]) -> R) -> Result<R, Raised> {
        // SAFETY: the type is checked before its functions are used; the memory is read only inside `read`, while the lock
        // is held and nothing else runs that could resize a bytearray.
        unsafe {
            let (data, length) = if ffi::PyBytes_Check(self.pointer()) != 0 {
                (ffi::PyBytes_AsString(self.pointer()), ffi::PyBytes_Size(self.pointer()))
            } else if ffi::PyByteArray_Check(self.pointer()) != 0 {
                (ffi::PyByteArray_AsString(self.pointer()), ffi::PyByteArray_Size(self.pointer()))
            } else {
                return Err(self.1.raise(Kind::Type, "a message must be bytes or a bytearray"));
            };
            if data.is_null() {
                return Err(Raised);
            }
            Ok(read(std::slice::from_raw_parts(data.cast(), usize::try_from(length).unwrap_or(0))))
        }
    }

    /// An int's value; an error (overflow, another type) is set when there is none.
    pub(crate) fn as_integer(self) -> Result<i64, Raised> {
        // SAFETY: Python checks the type and says by an error when there is no value.
        let value = unsafe { ffi::PyLong_AsLongLong(self.pointer()) };
        // SAFETY: only asks whether an error is set.
        if value == -1 && unsafe { !ffi::PyErr_Occurred().is_null() } {
            return Err(Raised);
        }
        Ok(value)
    }

    /// The address that an int holds; None, with no error set, when there is none.
    pub(crate) fn as_address(self) -> Option<NonNull<c_void>> {
        // SAFETY: Python checks the type.
        let address = NonNull::new(unsafe { ffi::PyLong_AsVoidPtr(self.pointer()) });
        if address.is_none() {
            self.1.forget_error();
        }
        address
    }

    /// A float's value; only asked of floats.
    pub(crate) fn as_float(self) -> f64 {
        // SAFETY: Python checks the type.
        unsafe { ffi::PyFloat_AsDouble(self.pointer()) }
    }

    pub(crate) fn is_text(self) -> bool {
        // SAFETY: a living object.
        unsafe { ffi::PyUnicode_Check(self.pointer()) != 0 }
    }

    pub(crate) fn is_list(self) -> bool {
        // SAFETY: a living object; exactly a list, as torch passes them.
        unsafe { ffi::PyList_CheckExact(self.pointer()) != 0 }
    }

    /// Takes the object out of the garbage collector's sight; its end by its references stays as it is.
    pub(crate) fn hide_from_collector(self) {
        // SAFETY: a living object of a type that the collector knows; to hide one that is hidden does nothing.
        unsafe { ffi::PyObject_GC_UnTrack(self.pointer().cast()) }
    }

    /// A weak reference that calls `callback` when the object goes.
    pub(crate) fn weak_reference(self, callback: Object<'_>) -> Result<Owned<'a>, Raised> {
        // SAFETY: two living objects; a new reference or null with an error set.
        unsafe { Owned::take(self.1, ffi::PyWeakref_NewRef(self.pointer(), callback.pointer())) }
    }

    pub(crate) fn set_attribute(self, name: &CStr, value: Object<'_>) -> Result<(), Raised> {
        // SAFETY: living objects and a C string.
        let status = unsafe { ffi::PyObject_SetAttrString(self.pointer(), name.as_ptr(), value.pointer()) };
        if status == 0 { Ok(()) } else { Err(Raised) }
    }

    /// Sets an entry of a dict.
    pub(crate) fn set_entry(self, key: Object<'_>, value: Object<'_>) -> Result<(), Raised> {
        // SAFETY: living objects; Python checks that this is a dict, and takes references of its own.
        if unsafe { ffi::PyDict_SetItem(self.pointer(), key.pointer(), value.pointer()) } == 0 {
            Ok(())
        } else {
            Err(Raised)
        }
    }

    pub(crate) fn is_true(self) -> bool {
        self.is(self.1.boolean(true))
    }

    /// Length of a list or tuple (also of a subclass, as torch.Size is), or None for anything else.
    pub(crate) fn sequence_length(self) -> Option<usize> {
        // SAFETY: the type is checked before its function is used.
        let length = unsafe {
            if ffi::PyList_Check(self.pointer()) != 0 {
                ffi::PyList_Size(self.pointer())
            } else if ffi::PyTuple_Check(self.pointer()) != 0 {
                ffi::PyTuple_Size(self.pointer())
            } else {
                return None;
            }
        };
        usize::try_from(length).ok()
    }

    /// An item of a list or tuple, with a reference of our own: the list may change while the item is in use.
    pub(crate) fn item(self, index: usize) -> Option<Owned<'a>> {
        let index = signed(index);
        // SAFETY: the type is checked before its function is used, which checks the index.
        unsafe {
            let item = if ffi::PyList_Check(self.pointer()) != 0 {
                ffi::PyList_GetItem(self.pointer(), index)
            } else if ffi::PyTuple_Check(self.pointer()) != 0 {
                ffi::PyTuple_GetItem(self.pointer(), index)
            } else {
                return None;
            };
            match Object::new(self.1, item) {
                Some(object) => Some(object.owned()),
                None => {
                    self.1.forget_error();
                    None
                }
            }
        }
    }

    /// An item of a tuple, which cannot change, and so holds it for as long as the tuple lives.
    pub(crate) fn borrowed_item_of_tuple(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the type is checked before its function is used, which checks the index.
        let item = unsafe {
            if ffi::PyTuple_Check(self.pointer()) == 0 {
                return None;
            }
            Object::new(self.1, ffi::PyTuple_GetItem(self.pointer(), signed(index)))
        };
        if item.is_none() {
            self.1.forget_error();
        }
        item
    }

    /// The items of a list or tuple.
    pub(crate) fn items(self) -> Result<Vec<Owned<'a>>, Raised> {
        let Some(length) = self.sequence_length() else {
            return Err(self.1.raise(Kind::Type, "lighter_mps: a list or tuple is wanted"));
        };
        let changed = || self.1.raise(Kind::Runtime, "lighter_mps: a list changed while it was read");
        (0..length).map(|index| self.item(index).ok_or_else(changed)).collect()
    }

    /// The integers of a list or tuple.
    pub(crate) fn integers(self) -> Result<Vec<i64>, Raised> {
        self.items()?.iter().map(|item| item.object().as_integer()).collect()
    }
}

impl<'a> Owned<'a> {
    /// # Safety
    /// `pointer` is a new reference that nobody else gives back, or null with a Python error set.
    pub(crate) unsafe fn take(gil: Gil<'a>, pointer: *mut ffi::PyObject) -> Result<Self, Raised> {
        NonNull::new(pointer).map(|pointer| Self(pointer, gil)).ok_or(Raised)
    }

    pub(crate) fn object(&self) -> Object<'_> {
        Object(self.0, Gil(PhantomData))
    }

    /// The same reference under another proof that the lock is held.
    pub(crate) fn in_gil(self, gil: Gil<'_>) -> Owned<'_> {
        Owned(self.into_pointer(), gil)
    }

    pub(crate) fn into_pointer(self) -> NonNull<ffi::PyObject> {
        let pointer = self.0;
        std::mem::forget(self);
        pointer
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours and given back once; objects cannot leave the thread that holds the lock.
        unsafe { ffi::Py_DECREF(self.0.as_ptr()) }
    }
}

impl Kept {
    pub(crate) fn object(self, gil: Gil<'_>) -> Object<'_> {
        Object(self.0, gil)
    }

    pub(crate) fn address(self) -> *mut ffi::PyObject {
        self.0.as_ptr()
    }

    /// Ends the keeping after all.
    pub(crate) fn give_back(self, gil: Gil<'_>) {
        drop(Owned(self.0, gil));
    }
}
