// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session of the container's own, on its own processor, for when the host cannot help.
#![allow(unsafe_code)]

use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::{CStr, c_char};
use core::ptr::{null, null_mut};

use ort_sys::{OrtEnv, OrtLoggingLevel, OrtSession, OrtSessionOptions, OrtValue};

use super::tensor::Outputs;
use super::{Ort, Status};

/// A session; given back when dropped.
pub(crate) struct Session {
    ort: Ort,
    raw: *mut OrtSession,
    env: Env,
    inputs: Vec<CString>,
    outputs: Vec<CString>,
}

// SAFETY: the runtime's sessions may be run by several threads at a time.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

/// The runtime's environment, of which there is one; counted by the runtime.
struct Env {
    ort: Ort,
    raw: *mut OrtEnv,
}

impl Drop for Env {
    fn drop(&mut self) {
        // SAFETY: given back once.
        unsafe { (self.ort.api().ReleaseEnv)(self.raw) };
    }
}

struct Options {
    ort: Ort,
    raw: *mut OrtSessionOptions,
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: given back once.
        unsafe { (self.ort.api().ReleaseSessionOptions)(self.raw) };
    }
}

/// A model for a session of the container's own.
pub(crate) struct Source<'a> {
    /// The whole ModelProto, inputs included.
    pub(crate) proto: &'a [u8],
    /// The location in it that stands for the weights, and the weights.
    pub(crate) weights: Option<(&'a CStr, &'a [u8])>,
    pub(crate) inputs: Vec<CString>,
    pub(crate) outputs: Vec<CString>,
    /// One thread only: in a child of a fork, which should not start more.
    pub(crate) is_single_threaded: bool,
}

impl Session {
    /// Makes a session.
    pub(crate) fn new(ort: Ort, source: &Source<'_>) -> Result<Self, Status> {
        let api = ort.api();
        let level = OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR;
        let env = Env { ort, raw: null_mut() };
        let mut session = Self {
            ort,
            raw: null_mut(),
            env,
            inputs: source.inputs.clone(),
            outputs: source.outputs.clone(),
        };
        // SAFETY: places for the answers; names and bytes live through the calls, and the runtime copies what it keeps.
        unsafe {
            ort.check((api.CreateEnv)(level, c"lighter-ane".as_ptr(), &raw mut session.env.raw))?;
            let options = Self::options(ort, source)?;
            let (proto, bytes) = (source.proto.as_ptr().cast(), source.proto.len());
            ort.check((api.CreateSessionFromArray)(
                session.env.raw,
                proto,
                bytes,
                options.raw,
                &raw mut session.raw,
            ))?;
        }
        Ok(session)
    }

    fn options(ort: Ort, source: &Source<'_>) -> Result<Options, Status> {
        let api = ort.api();
        let mut options = Options { ort, raw: null_mut() };
        // SAFETY: as in `new`.
        unsafe {
            ort.check((api.CreateSessionOptions)(&raw mut options.raw))?;
            let spinning = c"session.intra_op.allow_spinning".as_ptr();
            ort.check((api.AddSessionConfigEntry)(options.raw, spinning, c"0".as_ptr()))?;
            if source.is_single_threaded {
                ort.check((api.SetIntraOpNumThreads)(options.raw, 1))?;
            }
            if let Some((location, weights)) = source.weights {
                let (location, bytes) = (location.as_ptr(), weights.len());
                let weights = weights.as_ptr().cast_mut().cast::<c_char>();
                let add = api.AddExternalInitializersFromMemory;
                ort.check(add(options.raw, &raw const location, &raw const weights, &raw const bytes, 1))?;
            }
        }
        Ok(options)
    }

    /// Runs it with the inputs in order.
    pub(crate) fn run(&self, inputs: &[*const OrtValue]) -> Result<Outputs, Status> {
        let pointers = |names: &[CString]| names.iter().map(|name| name.as_ptr()).collect::<Vec<_>>();
        let (input_names, output_names) = (pointers(&self.inputs), pointers(&self.outputs));
        let mut outputs = Outputs::new(self.ort, output_names.len());
        let count = inputs.len().min(input_names.len());
        // SAFETY: a session that lives; as many names as values, which live through the call; places for the answers.
        let status = unsafe {
            (self.ort.api().Run)(
                self.raw,
                null(),
                input_names.as_ptr(),
                inputs.as_ptr(),
                count,
                output_names.as_ptr(),
                output_names.len(),
                outputs.places().as_mut_ptr(),
            )
        };
        self.ort.check(status)?;
        Ok(outputs)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: given back once, before its environment; null is left alone.
        unsafe { (self.ort.api().ReleaseSession)(self.raw) };
    }
}
