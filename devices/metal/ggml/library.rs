// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loading ggml: its libraries, its backends, its tables of operations and types.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;

use super::backend::Device;
use super::raw::{Functions, InitParams, OBJECT_BYTES, Opaque, Tensor};
use crate::metal::rpc::{LATEST_OPS, LATEST_UNARY_OPS, Op};

/// The last operation in every ggml so far; the names are read up to it.
const LAST_OP: &str = "GLU";
/// The last unary operation since ggml 0.9.5.
const LAST_UNARY_OP: &str = "TRUNC";
/// Reading names stops here whatever they are.
const MOST_NAMES: usize = 160;
/// How many types each ggml has, by the second part of its version; reading past them is not allowed.
const TYPES_SINCE: [(u32, u32); 3] = [(17, 43), (10, 42), (0, 40)];

/// Why ggml could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The dynamic loader refused a library.
    #[error("cannot load {path}: is libggml installed for this engine?", path = path.display())]
    Library {
        /// Which.
        path: PathBuf,
        /// What the loader said.
        #[source]
        source: libloading::Error,
    },
    /// A function is missing.
    #[error("{path} has no {function}: this needs ggml 0.10 or later", path = path.display())]
    Function {
        /// The library.
        path: PathBuf,
        /// The function.
        function: &'static str,
    },
    /// Tensors have another layout.
    #[error(
        "tensors of ggml {version} are not laid out as this build expects ({what}): update lighter, or use \
         ggml 0.27"
    )]
    Layout {
        /// ggml's version.
        version: String,
        /// What differs.
        what: &'static str,
    },
    /// A path cannot be given to C.
    #[error("path {path} holds a zero byte", path = path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
}

/// How a type stores its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Elements in a block.
    pub block: u64,
    /// Bytes of a block.
    pub bytes: u64,
    /// Stored in blocks with scales.
    pub quantized: bool,
}

/// A loaded ggml.
#[derive(Debug)]
pub struct Ggml {
    pub(super) f: Functions,
    version: String,
    kinds: Vec<Option<Kind>>,
    ops: Vec<Option<c_int>>,
    unary: Vec<Option<i32>>,
    // The functions point into these, so they are never unloaded before.
    _libraries: [Library; 2],
}

unsafe extern "C" fn on_abort(message: *const c_char) {
    // SAFETY: ggml gives a terminated string that lives during the call.
    let text = unsafe { text_of(message) };
    // The process ends after this; the logger's locks may be held, so the note goes to stderr directly.
    let note = format!("metal worker: ggml gave up: {text}\n");
    let _ = rustix::io::write(rustix::stdio::stderr(), note.as_bytes());
}

unsafe extern "C" fn on_log(level: c_int, message: *const c_char, _: Opaque) {
    // SAFETY: as for `on_abort`.
    let text = unsafe { text_of(message) };
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    // ggml_log_level: 3 warns, 4 is an error, 5 goes on with the line before.
    match level {
        4 => tracing::warn!(target: "ggml", "{text}"),
        3 => tracing::info!(target: "ggml", "{text}"),
        _ => tracing::debug!(target: "ggml", "{text}"),
    }
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

fn open(path: &Path) -> Result<Library, LoadError> {
    // SAFETY: loading runs the library's constructors. The path comes from the service's configuration, and
    // this process exists to run that library.
    unsafe { Library::new(path) }.map_err(|source| LoadError::Library { path: path.to_owned(), source })
}

impl Ggml {
    /// Loads the two libraries and the backends.
    ///
    /// # Errors
    /// When a library or function is missing, or tensors have another layout.
    pub fn open(base: &Path, registry: &Path, backends: Option<&Path>) -> Result<Arc<Self>, LoadError> {
        let libraries = [open(base)?, open(registry)?];
        // SAFETY: they are ggml's by configuration, and are kept beside the functions.
        let functions = unsafe { Functions::load([&libraries[0], &libraries[1]]) };
        let f = functions.map_err(|function| LoadError::Function { path: base.to_owned(), function })?;
        // SAFETY: no preconditions; the callbacks are static.
        let version = unsafe {
            (f.ggml_set_abort_callback)(on_abort);
            (f.ggml_log_set)(on_log, std::ptr::null_mut());
            text_of((f.ggml_version)())
        };
        check_layout(&f).map_err(|what| LoadError::Layout { version: version.clone(), what })?;
        let (kinds, ops, unary) = (kinds(&f, &version), op_numbers(&f), unary_numbers(&f));
        match backends {
            None => {
                // SAFETY: no preconditions.
                unsafe { (f.ggml_backend_load_all)() }
            }
            Some(folder) => {
                let folder = CString::new(folder.as_os_str().as_bytes())
                    .map_err(|_| LoadError::Path { path: folder.to_owned() })?;
                // SAFETY: a terminated string that lives during the call.
                unsafe { (f.ggml_backend_load_all_from_path)(folder.as_ptr()) }
            }
        }
        Ok(Arc::new(Self { f, version, kinds, ops, unary, _libraries: libraries }))
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// How a type stores its elements; `None` for a type that this ggml does not have.
    #[must_use]
    pub fn kind(&self, kind: u32) -> Option<Kind> {
        *self.kinds.get(usize::try_from(kind).ok()?)?
    }

    /// This ggml's number of an operation, if it has it.
    #[must_use]
    pub fn op_number(&self, op: Op) -> Option<i32> {
        *self.ops.get(op as usize)?
    }

    /// This ggml's number of a unary operation, if it has it.
    #[must_use]
    pub fn unary_number(&self, name: &str) -> Option<i32> {
        *self.unary.get(LATEST_UNARY_OPS.iter().position(|other| *other == name)?)?
    }

    /// All devices that its backends offer.
    #[must_use]
    pub fn devices(self: &Arc<Self>) -> Vec<Device> {
        // SAFETY: no preconditions.
        let count = unsafe { (self.f.ggml_backend_dev_count)() };
        (0..count)
            .map(|index| {
                // SAFETY: the index is below the count, and devices are never removed.
                Device::new(Arc::clone(self), unsafe { (self.f.ggml_backend_dev_get)(index) })
            })
            .collect()
    }
}

/// Makes one tensor and looks whether its fields lie where [`Tensor`] has them.
fn check_layout(f: &Functions) -> Result<(), &'static str> {
    // SAFETY: no preconditions.
    let overhead = unsafe { (f.ggml_tensor_overhead)() };
    if overhead != OBJECT_BYTES + size_of::<Tensor>() {
        return Err("size");
    }
    let params = InitParams { mem_size: 2 * overhead, mem_buffer: std::ptr::null_mut(), no_alloc: true };
    // SAFETY: the context has room for the one tensor, which is looked at only before it is freed; its size
    // has been found equal, so all fields lie within it.
    unsafe {
        let context = (f.ggml_init)(params);
        if context.is_null() {
            return Err("no context");
        }
        let tensor = (f.ggml_new_tensor_4d)(context, 1, 2, 3, 4, 5);
        let fits = tensor.as_ref().is_some_and(|tensor| {
            tensor.kind == 1
                && tensor.ne == [2, 3, 4, 5]
                && tensor.nb == [2, 4, 12, 48]
                && tensor.buffer.is_null()
                && tensor.op == 0
                && tensor.data.is_null()
                && tensor.src.iter().all(|src| src.is_null())
        });
        (f.ggml_free)(context);
        if fits { Ok(()) } else { Err("fields") }
    }
}

fn kinds(f: &Functions, version: &str) -> Vec<Option<Kind>> {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let minor = if parts.next() >= Some(1) { u32::MAX } else { parts.next().unwrap_or(0) };
    let count = TYPES_SINCE.iter().find(|(since, _)| minor >= *since).map_or(0, |(_, count)| *count);
    (0..count)
        .map(|kind| {
            let kind = c_int::try_from(kind).ok()?;
            // SAFETY: the number is below the version's count of types.
            let (block, bytes, quantized) =
                unsafe { ((f.ggml_blck_size)(kind), (f.ggml_type_size)(kind), (f.ggml_is_quantized)(kind)) };
            let block = u64::try_from(block).ok()?;
            (block > 0 && bytes > 0).then_some(Kind { block, bytes: bytes as u64, quantized })
        })
        .collect()
}

fn names_until(last: &str, name: impl Fn(c_int) -> String) -> Vec<String> {
    let mut names = Vec::new();
    for number in 0..MOST_NAMES {
        let name = c_int::try_from(number).map(&name).unwrap_or_default();
        let ends = name == last;
        names.push(name);
        if ends {
            break;
        }
    }
    names
}

fn op_numbers(f: &Functions) -> Vec<Option<c_int>> {
    // SAFETY: numbers up to the last operation's are valid, and reading ends there.
    let names = names_until(LAST_OP, |number| unsafe { text_of((f.ggml_op_name)(number)) });
    LATEST_OPS.iter().map(|op| position(&names, op.name())).collect()
}

fn unary_numbers(f: &Functions) -> Vec<Option<i32>> {
    // SAFETY: as for the operations.
    let names = names_until(LAST_UNARY_OP, |number| unsafe { text_of((f.ggml_unary_op_name)(number)) });
    LATEST_UNARY_OPS.iter().map(|name| position(&names, name)).collect()
}

fn position(names: &[String], name: &str) -> Option<i32> {
    names.iter().position(|other| other == name).and_then(|number| i32::try_from(number).ok())
}
