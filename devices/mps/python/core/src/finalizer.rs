// SPDX-License-Identifier: MIT OR Apache-2.0
//! New tensors for the torches whose C functions take no deleter: a weak reference to the Python storage tells its end.
//!
//! torch keeps a storage's Python object as long as the C++ storage lives, so its end is the storage's.
#![allow(unsafe_code)]

use rustc_hash::FxHashMap;

use crate::call::{Definition, answer};
use crate::guarded::Guarded;
use crate::numbers::{FREED, Number};
use crate::python::{Gil, Kept, Object, Owned, Raised};
use crate::shims::{Blueprint, Fresh, Shims};
use crate::tensors::{Steal, refused};

/// Weak references must live to call back; each lives here until it has.
static WATCHED: Guarded<FxHashMap<u64, Kept>> =
    Guarded::new(FxHashMap::with_hasher(rustc_hash::FxBuildHasher));

static DEFINITION: Definition = Definition::one(c"storage_gone", storage_gone);

/// Makes tensors and watches their storages.
#[derive(Debug)]
pub(crate) struct Maker {
    steal: Steal,
    untyped_storage: Kept,
}

impl Maker {
    pub(crate) fn new(gil: Gil<'_>, steal: Steal) -> Result<Self, Raised> {
        Ok(Self { steal, untyped_storage: gil.interned(c"untyped_storage")? })
    }

    pub(crate) fn make<'a>(
        &self,
        gil: Gil<'a>,
        shims: &Shims,
        number: Number,
        plan: Blueprint<'_>,
    ) -> Result<Owned<'a>, Raised> {
        let fresh = shims.without_deleter(plan).ok_or_else(|| refused(gil, plan))?;
        let tensor = self.steal.give(gil, fresh)?;
        self.watch(gil, tensor.object(), number)?;
        Ok(tensor)
    }

    fn watch(&self, gil: Gil<'_>, tensor: Object<'_>, number: Number) -> Result<(), Raised> {
        let method = tensor.attribute(self.untyped_storage)?;
        let storage = method.object().call(&[])?;
        // Torch's storage object is kept alive by C++ without the collector knowing; one that it breaks up as garbage would
        // seem gone while tensors still use it.
        storage.object().hide_from_collector();
        let told = gil.integer(number.value())?;
        let callback = gil.function(&DEFINITION, told.object())?;
        let watch = storage.object().weak_reference(callback.object())?.object().keep();
        WATCHED.with(gil, |watched| watched.insert(number.value(), watch));
        Ok(())
    }

    pub(crate) fn adopt<'a>(&self, gil: Gil<'a>, fresh: Fresh<'_>) -> Result<Owned<'a>, Raised> {
        self.steal.give(gil, fresh)
    }
}

/// The weak reference's callback; its own object is the number.
unsafe extern "C" fn storage_gone(
    number: *mut pyo3_ffi::PyObject,
    _reference: *mut pyo3_ffi::PyObject,
) -> *mut pyo3_ffi::PyObject {
    // SAFETY: Python calls its functions with the lock held.
    unsafe {
        answer(|gil| {
            let number = Object::new(gil, number).ok_or(Raised)?.as_integer()?;
            if let Some(number) = u64::try_from(number).ok().and_then(Number::new) {
                let watch = WATCHED.with(gil, |watched| watched.remove(&number.value()));
                FREED.push(number);
                if let Some(watch) = watch {
                    watch.give_back(gil);
                }
            }
            Ok(gil.none())
        })
    }
}
