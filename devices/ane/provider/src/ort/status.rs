// SPDX-License-Identifier: MIT OR Apache-2.0
//! An error of ONNX Runtime's: kept to be handed on, or read and given back.
#![allow(unsafe_code)]

use alloc::string::String;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

use ort_sys::{OrtApi, OrtStatus};

/// The runtime's error; given back when dropped.
pub(crate) struct Status {
    api: &'static OrtApi,
    status: NonNull<OrtStatus>,
}

impl Status {
    pub(crate) const fn new(api: &'static OrtApi, status: NonNull<OrtStatus>) -> Self {
        Self { api, status }
    }

    /// For the runtime, which gives it back itself.
    pub(crate) fn into_raw(self) -> *mut OrtStatus {
        ManuallyDrop::new(self).status.as_ptr()
    }

    /// What it says.
    pub(crate) fn message(&self) -> String {
        // SAFETY: a status that lives, and its text as long as it.
        let text = unsafe { super::text((self.api.GetErrorMessage)(self.status.as_ptr())) };
        String::from_utf8_lossy(text.unwrap_or_default().to_bytes()).into_owned()
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: given back once.
        unsafe { (self.api.ReleaseStatus)(self.status.as_ptr()) };
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}
