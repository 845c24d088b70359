// SPDX-License-Identifier: MIT OR Apache-2.0
//! State that the interpreter's lock guards.
//!
//! Calls of kernels come from any thread but one at a time, because each holds the interpreter's lock: a mutex of our own
//! would only cost. [`Guarded::with`] asks for the proof that the lock is held. Its closure must be short and never call
//! Python, which could give the lock up or call a kernel again; if one did, the second borrow panics and nothing is
//! corrupted.
#![allow(unsafe_code)]

use std::cell::RefCell;

use crate::python::Gil;

/// A value that only the thread with the interpreter's lock reaches.
#[derive(Debug, Default)]
pub(crate) struct Guarded<T>(RefCell<T>);

// SAFETY: every access needs a `Gil`, which only one thread has at a time, and no borrow lives longer than `with`, in which
// the lock is not given up. T goes from thread to thread by that, hence Send.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(RefCell::new(value))
    }

    pub(crate) fn with<R>(&self, _gil: Gil<'_>, use_it: impl FnOnce(&mut T) -> R) -> R {
        use_it(&mut self.0.borrow_mut())
    }
}
