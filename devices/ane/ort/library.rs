// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens ONNX Runtime and keeps what all sessions share: its table of functions, one environment, one allocator.
//!
//! The version is read first, from the part of the table that never changes: asking for a newer table than the
//! library has would make it complain on standard error.
//!
//! Released builds since 1.29 report models and machine to their maker unless the environment forbids it, and keep a
//! file about it in the user's home. It is forbidden here, before the library is loaded.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Once};

use libloading::Library;
use lighter_frames::OrtVersion;
use ort_sys::{
    OrtAllocatorType, OrtApi, OrtApiBase, OrtEnv, OrtLoggingLevel, OrtMemType, OrtMemoryInfo, OrtStatusPtr,
};

use super::OrtError;
use crate::ane::control::Provider;

/// Oldest ONNX Runtime (1.x) whose table has what is used here: external data in memory.
pub const OLDEST_MINOR: u16 = 18;
/// The table that is asked for; later ones only append to it.
const API_LEVEL: u32 = 18;

/// A loaded ONNX Runtime. It stays loaded for the life of the process, as its own threads expect.
pub struct Ort {
    pub(super) api: &'static OrtApi,
    pub(super) env: NonNull<OrtEnv>,
    pub(super) memory: NonNull<OrtMemoryInfo>,
    path: PathBuf,
    version: String,
    providers: Vec<String>,
}

// SAFETY: ONNX Runtime's table, environment and memory info are made for use by any thread, and never change.
unsafe impl Send for Ort {}
// SAFETY: as for `Send`.
unsafe impl Sync for Ort {}

impl fmt::Debug for Ort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ort")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Ort {
    /// Loads the library at `path`.
    ///
    /// # Errors
    /// When it cannot be loaded, is not ONNX Runtime, or is too old.
    pub fn open(path: &Path) -> Result<Arc<Self>, OrtError> {
        forbid_telemetry();
        let base = base_of(path)?;
        // SAFETY: the function takes nothing and returns a terminated string that is never freed.
        let version = unsafe { text_of((base.GetVersionString)()) };
        let refuse = || OrtError::Version { path: path.to_owned(), found: version.clone() };
        let parsed = OrtVersion::parse(&version).ok_or_else(refuse)?;
        if (parsed.major, parsed.minor) < (1, OLDEST_MINOR) || parsed.major != 1 {
            return Err(refuse());
        }
        // SAFETY: no preconditions; the level is one that this version has.
        let api = unsafe { (base.GetApi)(API_LEVEL) };
        // SAFETY: null, or a table of at least this level that lives as long as the library, which is never unloaded.
        let api: &'static OrtApi = unsafe { api.as_ref() }.ok_or_else(refuse)?;
        let env = environment(api)?;
        let memory = processor_memory(api)?;
        let providers = providers_of(api)?;
        Ok(Arc::new(Self { api, env, memory, path: path.to_owned(), version, providers }))
    }

    /// Its version, such as `1.32.0`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Where it was loaded from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The providers that it was built with, by its own names.
    #[must_use]
    pub fn providers(&self) -> &[String] {
        &self.providers
    }

    /// Makes sure that the library has a provider.
    ///
    /// # Errors
    /// When it has not.
    pub fn require(&self, provider: Provider) -> Result<(), OrtError> {
        let name = provider.ort_name();
        if self.providers.iter().any(|there| there == name) {
            return Ok(());
        }
        let (path, available) = (self.path.clone(), self.providers.clone());
        Err(OrtError::NoProvider { path, provider: name, available })
    }

    /// Turns a status into a result and frees it.
    pub(super) fn check(&self, what: &'static str, status: OrtStatusPtr) -> Result<(), OrtError> {
        check(self.api, what, status)
    }
}

/// Keeps ONNX Runtime from reporting to its maker.
fn forbid_telemetry() {
    static FORBIDDEN: Once = Once::new();
    // SAFETY: only code in C reads the environment without the standard library's lock. What does that here is ONNX
    // Runtime and its providers, none of which is loaded before the first call of `Ort::open` is past this.
    FORBIDDEN.call_once(|| unsafe { std::env::set_var("ORT_DISABLE_TELEMETRY", "1") });
}

fn base_of(path: &Path) -> Result<&'static OrtApiBase, OrtError> {
    // SAFETY: loading runs the library's constructors. The path comes from the service's configuration, and this
    // process exists to run that library.
    let library =
        unsafe { Library::new(path) }.map_err(|source| OrtError::Load { path: path.to_owned(), source })?;
    // Its threads and static destructors do not bear an unload.
    let library = ManuallyDrop::new(library);
    let not_ort = || OrtError::NotOrt { path: path.to_owned() };
    // SAFETY: the symbol has this type in every ONNX Runtime.
    let entry =
        unsafe { library.get::<unsafe extern "system" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0") }
            .map_err(|_| not_ort())?;
    // SAFETY: no preconditions; the result is null or static in a library that is never unloaded.
    unsafe { entry().as_ref() }.ok_or_else(not_ort)
}

/// A C string as text; empty where there is none.
///
/// # Safety
/// `text` is null or a terminated string that lives during the call.
pub(super) unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Text for C.
pub(super) fn c_text(what: &'static str, text: &str) -> Result<CString, OrtError> {
    CString::new(text).map_err(|_| OrtError::Text { what, text: text.to_owned() })
}

fn check(api: &OrtApi, what: &'static str, status: OrtStatusPtr) -> Result<(), OrtError> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: a status that is not null is the caller's, to be read and then freed once.
    let text = unsafe {
        let text = text_of((api.GetErrorMessage)(status.0));
        (api.ReleaseStatus)(status.0);
        text
    };
    Err(OrtError::Refused { what, text })
}

/// A result that must be there after a call without an error.
pub(super) fn made<T>(what: &'static str, pointer: *mut T) -> Result<NonNull<T>, OrtError> {
    NonNull::new(pointer).ok_or_else(|| OrtError::Refused { what, text: "it gave nothing back".to_owned() })
}

fn environment(api: &OrtApi) -> Result<NonNull<OrtEnv>, OrtError> {
    let what = "environment";
    let mut env = null_mut();
    // Errors come back as statuses; in the log a container could repeat each of them at will.
    let level = OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL;
    // SAFETY: the name is terminated, the place for the result is ours. Without global thread pools: each session
    // has its own, which goes with it.
    check(api, what, unsafe { (api.CreateEnv)(level, c"ane".as_ptr(), &raw mut env) })?;
    let env = made(what, env)?;
    // SAFETY: the environment is alive.
    check(api, "end of telemetry", unsafe { (api.DisableTelemetryEvents)(env.as_ptr()) })?;
    Ok(env)
}

fn processor_memory(api: &OrtApi) -> Result<NonNull<OrtMemoryInfo>, OrtError> {
    let what = "memory of the processor";
    let mut memory = null_mut();
    let (kind, place) = (OrtAllocatorType::OrtDeviceAllocator, OrtMemType::OrtMemTypeDefault);
    // SAFETY: the place for the result is ours.
    check(api, what, unsafe { (api.CreateCpuMemoryInfo)(kind, place, &raw mut memory) })?;
    made(what, memory)
}

fn providers_of(api: &OrtApi) -> Result<Vec<String>, OrtError> {
    let what = "list of providers";
    let (mut names, mut count) = (null_mut(), 0);
    // SAFETY: the places for the results are ours.
    check(api, what, unsafe { (api.GetAvailableProviders)(&raw mut names, &raw mut count) })?;
    let length = usize::try_from(count).unwrap_or(0);
    // SAFETY: the call gave an array of `count` terminated strings, which live until they are released below.
    let providers = (0..length).map(|at| unsafe { text_of(*names.add(at)) }).collect();
    // SAFETY: array and count are the ones that the call gave.
    check(api, what, unsafe { (api.ReleaseAvailableProviders)(names, count) })?;
    Ok(providers)
}
