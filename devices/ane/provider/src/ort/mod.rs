// SPDX-License-Identifier: MIT OR Apache-2.0
//! ONNX Runtime's C interface as this library uses it: the tables that it fills in, and safe words for the calls.
//!
//! Everything here borrows from ONNX Runtime for the length of a call into this library and says so by lifetimes.
//! Numbers of enumerations are read as plain numbers: a newer runtime may have more of them.
#![allow(unsafe_code)]

pub(crate) mod attribute;
pub(crate) mod context;
pub(crate) mod graph;
pub(crate) mod options;
pub(crate) mod session;
pub(crate) mod tables;
pub(crate) mod tensor;

mod status;

use core::ffi::{CStr, c_char};
use core::ptr::NonNull;

use lighter_frames::OrtVersion;
use ort_sys::{OrtApi, OrtApiBase, OrtErrorCode, OrtStatus, OrtStatusPtr};

pub(crate) use status::Status;

use tables::EpApi;

/// The oldest interface that has all that is needed: virtual devices, and subgraphs that know their parents.
pub(crate) const API_VERSION: u32 = 24;
/// An interface old enough to make an error for a runtime that is too old.
const OLD_API_VERSION: u32 = 11;

/// The runtime that called this library.
#[derive(Clone, Copy)]
pub(crate) struct Ort {
    api: &'static OrtApi,
    ep: &'static EpApi,
    version: OrtVersion,
}

impl Ort {
    /// The interface of a runtime that is new enough, or an error in the runtime's own words.
    ///
    /// # Safety
    /// The base that a runtime has passed in; it lives as long as the runtime does.
    pub(crate) unsafe fn of(base: *const OrtApiBase) -> Result<Self, *mut OrtStatus> {
        // SAFETY: the caller's promise; the text is a constant of the runtime.
        let version = unsafe { text(((*base).GetVersionString)()) }.unwrap_or_default();
        let Some(version) = version.to_str().ok().and_then(OrtVersion::parse) else {
            // SAFETY: the caller's promise.
            return Err(unsafe { too_old(base) });
        };
        // Asking for an interface that is not there would print a line of its own.
        if (version.major, u32::from(version.minor)) < (1, API_VERSION) {
            // SAFETY: the caller's promise.
            return Err(unsafe { too_old(base) });
        }
        // SAFETY: the caller's promise; tables are constants of the runtime.
        let api = unsafe { ((*base).GetApi)(API_VERSION).as_ref() };
        // SAFETY: as above; this library's table is a part of the runtime's from its start.
        let found = api.and_then(|api| unsafe { Some((api, (api.GetEpApi)().cast::<EpApi>().as_ref()?)) });
        match found {
            Some((api, ep)) => Ok(Self { api, ep, version }),
            // SAFETY: the caller's promise.
            None => Err(unsafe { too_old(base) }),
        }
    }

    pub(crate) const fn api(&self) -> &'static OrtApi {
        self.api
    }

    pub(crate) const fn ep(&self) -> &'static EpApi {
        self.ep
    }

    pub(crate) const fn version(&self) -> OrtVersion {
        self.version
    }

    /// What a call gave back.
    pub(crate) fn check(&self, status: OrtStatusPtr) -> Result<(), Status> {
        match NonNull::new(status.0) {
            None => Ok(()),
            Some(status) => Err(Status::new(self.api, status)),
        }
    }

    /// An error of this library's for the runtime.
    pub(crate) fn fail(&self, message: &CStr) -> *mut OrtStatus {
        // SAFETY: a text that ends in a zero byte; the runtime copies it.
        unsafe { (self.api.CreateStatus)(OrtErrorCode::ORT_EP_FAIL, message.as_ptr()) }.0
    }
}

/// # Safety
/// As [`Ort::of`].
unsafe fn too_old(base: *const OrtApiBase) -> *mut OrtStatus {
    let message = c"lighter-ane: LighterANE needs ONNX Runtime 1.24 or newer; install a newer onnxruntime in the container";
    // SAFETY: the caller's promise; a runtime without the table cannot be told anything, and goes on without devices.
    unsafe {
        let old = ((*base).GetApi)(OLD_API_VERSION).as_ref();
        old.map_or(core::ptr::null_mut(), |old| {
            (old.CreateStatus)(OrtErrorCode::ORT_NOT_IMPLEMENTED, message.as_ptr()).0
        })
    }
}

/// # Safety
/// Null, or a text that ends in a zero byte and stays where it is for as long as the lifetime says.
pub(crate) unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}
