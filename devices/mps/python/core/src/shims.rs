// SPDX-License-Identifier: MIT OR Apache-2.0
//! torch's C functions, found in the libtorch_cpu that the process has loaded already, and safe calls of them.
//!
//! They are what torch calls the AOTInductor shims: plain C, the same in every torch from 2.6 on, so that one build of
//! this library fits them all. A handle is a pointer to a C++ `at::Tensor`, which is one pointer to the tensor's
//! implementation, the very number that a Python tensor's `_cdata` is. What newer torches have besides is optional here
//! and makes new tensors cheaper (see `tensors.rs`). A function that is missing is an error that names it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

/// torch's number of the mps device type, and of the CPU's.
pub(crate) const DEVICE_MPS: i32 = 13;
pub(crate) const DEVICE_CPU: i32 = 0;

type Handle = *mut c_void;
type Read<T> = unsafe extern "C" fn(Handle, *mut T) -> i32;
type Deleter = extern "C" fn(*mut c_void, *mut c_void);
type Reinterpret = unsafe extern "C" fn(Handle, i64, *const i64, *const i64, i64, *mut Handle) -> i32;
type CreateFromBlob =
    unsafe extern "C" fn(*mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut Handle) -> i32;
type FromBlob = unsafe extern "C" fn(
    *mut c_void,
    i64,
    *const i64,
    *const i64,
    i64,
    i32,
    i32,
    i32,
    *mut Handle,
    i32,
    *const u8,
    i64,
    Deleter,
    *mut c_void,
) -> i32;
type ToPython = unsafe extern "C" fn(Handle, *mut c_void, *mut *mut c_void) -> i32;

/// Why torch's functions cannot be used.
#[derive(Debug)]
pub(crate) enum LoadError {
    NotLoaded(PathBuf),
    Missing { library: PathBuf, function: &'static CStr },
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotLoaded(path) => write!(out, "{} is not loaded; import torch first", path.display()),
            Self::Missing { library, function } => write!(
                out,
                "{} has no {}; torch 2.6 or newer is needed",
                library.display(),
                function.to_string_lossy()
            ),
        }
    }
}

/// The functions in use.
#[derive(Debug)]
pub(crate) struct Shims {
    data_ptr: Read<*mut c_void>,
    dtype: Read<i32>,
    device_type: Read<i32>,
    dim: Read<i64>,
    sizes: Read<*const i64>,
    strides: Read<*const i64>,
    storage_offset: Read<i64>,
    storage_size: Read<i64>,
    reinterpret: Reinterpret,
    create_from_blob: CreateFromBlob,
    delete: unsafe extern "C" fn(Handle) -> i32,
    from_blob: Option<FromBlob>,
    to_python: Option<ToPython>,
}

/// A tensor that a Python object keeps alive for `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor<'a>(*mut c_void, PhantomData<&'a ()>);

/// What a call's key and slots need to know of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metadata<'a> {
    pub(crate) device: i32,
    pub(crate) dtype: i32,
    pub(crate) sizes: &'a [i64],
    pub(crate) strides: &'a [i64],
    /// Where its first element is; 0 for a tensor without elements.
    pub(crate) data: u64,
}

/// A new tensor, which belongs to C++ until it is given to Python.
#[derive(Debug)]
pub(crate) struct Fresh<'s> {
    handle: Handle,
    shims: &'s Shims,
}

/// What a new tensor is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blueprint<'a> {
    pub(crate) sizes: &'a [i64],
    pub(crate) strides: &'a [i64],
    pub(crate) dtype: i32,
    pub(crate) address: u64,
}

impl Shims {
    /// Looks in the library folder of torch, else among all that the process has mapped (a distribution's torch lies
    /// elsewhere).
    pub(crate) fn load(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join("libtorch_cpu.so");
        let (library, path) = match open_loaded(&path) {
            Some(library) => (library, path),
            None => mapped_torch()
                .and_then(|other| Some((open_loaded(&other)?, other)))
                .ok_or(LoadError::NotLoaded(path))?,
        };
        let found = Self::find(&library).map_err(|function| LoadError::Missing { library: path, function });
        // torch stays loaded for as long as the process lives, and so must our hold on it.
        std::mem::forget(library);
        found
    }

    fn find(library: &Library) -> Result<Self, &'static CStr> {
        /// The function of that name, whatever its type is.
        ///
        /// # Safety
        /// `F` is the C function's type.
        unsafe fn get<F: Copy>(library: &Library, name: &'static CStr) -> Result<F, &'static CStr> {
            // SAFETY: the caller's promise; torch is never unloaded.
            unsafe { library.get::<F>(name.to_bytes_with_nul()).map(|symbol| *symbol).map_err(|_| name) }
        }
        // SAFETY: the types are those of torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h, whose
        // functions keep their types over versions by torch's own promise.
        unsafe {
            Ok(Self {
                data_ptr: get(library, c"aoti_torch_get_data_ptr")?,
                dtype: get(library, c"aoti_torch_get_dtype")?,
                device_type: get(library, c"aoti_torch_get_device_type")?,
                dim: get(library, c"aoti_torch_get_dim")?,
                sizes: get(library, c"aoti_torch_get_sizes")?,
                strides: get(library, c"aoti_torch_get_strides")?,
                storage_offset: get(library, c"aoti_torch_get_storage_offset")?,
                storage_size: get(library, c"aoti_torch_get_storage_size")?,
                reinterpret: get(library, c"aoti_torch__reinterpret_tensor")?,
                create_from_blob: get(library, c"aoti_torch_create_tensor_from_blob")?,
                delete: get(library, c"aoti_torch_delete_tensor_object")?,
                from_blob: get(library, c"torch_from_blob").ok(),
                to_python: get(library, c"torch_tensor_to_pyobject").ok(),
            })
        }
    }

    pub(crate) fn has_from_blob(&self) -> bool {
        self.from_blob.is_some()
    }

    pub(crate) fn has_to_python(&self) -> bool {
        self.to_python.is_some()
    }

    fn read<T: Copy>(function: Read<T>, tensor: &Tensor<'_>, empty: T) -> Option<T> {
        let mut value = empty;
        // SAFETY: the handle points to one pointer to a living tensor implementation, as an `at::Tensor` is laid out.
        let status = unsafe { function((&raw const tensor.0).cast_mut().cast(), &mut value) };
        (status == 0).then_some(value)
    }

    /// None where torch says no: a tensor without strides, or with symbolic sizes.
    pub(crate) fn metadata<'a>(&self, tensor: &Tensor<'a>) -> Option<Metadata<'a>> {
        let device = Self::read(self.device_type, tensor, 0)?;
        let dtype = Self::read(self.dtype, tensor, 0)?;
        let dim = usize::try_from(Self::read(self.dim, tensor, 0)?).ok()?;
        let sizes = Self::read(self.sizes, tensor, std::ptr::null())?;
        let strides = Self::read(self.strides, tensor, std::ptr::null())?;
        let data = Self::read(self.data_ptr, tensor, std::ptr::null_mut())?;
        // SAFETY: both arrays have `dim` entries and belong to the tensor, which lives for 'a and whose shape only code
        // with the interpreter's lock changes.
        let (sizes, strides) = unsafe { (array(sizes, dim), array(strides, dim)) };
        Some(Metadata { device, dtype, sizes, strides, data: data as u64 })
    }

    pub(crate) fn device_and_dtype(&self, tensor: &Tensor<'_>) -> Option<(i32, i32)> {
        Some((Self::read(self.device_type, tensor, 0)?, self.dtype(tensor)?))
    }

    pub(crate) fn dtype(&self, tensor: &Tensor<'_>) -> Option<i32> {
        Self::read(self.dtype, tensor, 0)
    }

    pub(crate) fn data(&self, tensor: &Tensor<'_>) -> Option<u64> {
        Some(Self::read(self.data_ptr, tensor, std::ptr::null_mut())? as u64)
    }

    /// In elements of the tensor's type.
    pub(crate) fn storage_offset(&self, tensor: &Tensor<'_>) -> Option<i64> {
        Self::read(self.storage_offset, tensor, 0)
    }

    pub(crate) fn storage_bytes(&self, tensor: &Tensor<'_>) -> Option<i64> {
        Self::read(self.storage_size, tensor, 0)
    }

    /// Another tensor on the same storage; `offset` counts from the tensor's own.
    pub(crate) fn reinterpret(
        &self,
        tensor: &Tensor<'_>,
        sizes: &[i64],
        strides: &[i64],
        offset: i64,
    ) -> Option<Fresh<'_>> {
        let dim = same_length(sizes, strides)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: as in `read`; both arrays have `dim` entries.
        let status = unsafe {
            let tensor = (&raw const tensor.0).cast_mut().cast();
            (self.reinterpret)(tensor, dim, sizes.as_ptr(), strides.as_ptr(), offset, &mut handle)
        };
        (status == 0 && !handle.is_null()).then_some(Fresh { handle, shims: self })
    }

    /// A new tensor whose storage calls `deleter` with the address when it goes; None where torch has no such function.
    pub(crate) fn with_deleter(&self, plan: Blueprint<'_>, deleter: Deleter) -> Option<Fresh<'_>> {
        let from_blob = self.from_blob?;
        let dim = same_length(plan.sizes, plan.strides)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: both arrays have `dim` entries; torch never follows the address of another device's tensor; no opaque
        // metadata comes along; the deleter is a function of this library, which is never unloaded.
        let status = unsafe {
            from_blob(
                address(plan.address),
                dim,
                plan.sizes.as_ptr(),
                plan.strides.as_ptr(),
                0,
                plan.dtype,
                DEVICE_MPS,
                0,
                &mut handle,
                0,
                std::ptr::null(),
                0,
                deleter,
                std::ptr::null_mut(),
            )
        };
        (status == 0 && !handle.is_null()).then_some(Fresh { handle, shims: self })
    }

    /// A new tensor whose storage says nothing when it goes.
    pub(crate) fn without_deleter(&self, plan: Blueprint<'_>) -> Option<Fresh<'_>> {
        let dim = same_length(plan.sizes, plan.strides)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: as in `with_deleter`.
        let status = unsafe {
            (self.create_from_blob)(
                address(plan.address),
                dim,
                plan.sizes.as_ptr(),
                plan.strides.as_ptr(),
                0,
                plan.dtype,
                DEVICE_MPS,
                0,
                &mut handle,
            )
        };
        (status == 0 && !handle.is_null()).then_some(Fresh { handle, shims: self })
    }
}

impl Tensor<'_> {
    /// # Safety
    /// `implementation` is the `_cdata` of a Python tensor that lives for the result's lifetime.
    pub(crate) unsafe fn new(implementation: *mut c_void) -> Option<Self> {
        (!implementation.is_null()).then_some(Self(implementation, PhantomData))
    }
}

impl Metadata<'_> {
    /// The eight bytes or the one byte of a CPU tensor with a single element, for what `size` says.
    pub(crate) fn element<const SIZE: usize>(&self) -> Option<[u8; SIZE]> {
        if self.device != DEVICE_CPU || !self.sizes.is_empty() || self.data == 0 {
            return None;
        }
        // SAFETY: a CPU tensor without dimensions has one element in readable memory, and callers ask for as many bytes as
        // its type has.
        Some(unsafe { address(self.data).cast::<[u8; SIZE]>().read_unaligned() })
    }
}

impl Fresh<'_> {
    pub(crate) fn handle(&self) -> *mut c_void {
        self.handle
    }

    /// Gives it to C++ code that deletes the handle.
    pub(crate) fn into_handle(self) -> *mut c_void {
        let handle = self.handle;
        std::mem::forget(self);
        handle
    }

    /// A new reference of a Python tensor, or null with a Python error set, or None where torch has no such function. The
    /// caller holds the interpreter's lock.
    pub(crate) fn to_python(&self) -> Option<*mut c_void> {
        let to_python = self.shims.to_python?;
        let mut object = std::ptr::null_mut();
        // SAFETY: a living handle; null asks for a plain tensor.
        let status = unsafe { to_python(self.handle, std::ptr::null_mut(), &mut object) };
        Some(if status == 0 { object } else { std::ptr::null_mut() })
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and is deleted once.
        unsafe { (self.shims.delete)(self.handle) };
    }
}

fn same_length(sizes: &[i64], strides: &[i64]) -> Option<i64> {
    (sizes.len() == strides.len()).then(|| i64::try_from(sizes.len()).ok()).flatten()
}

fn address(value: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(value).unwrap_or(0))
}

/// # Safety
/// `data` points to `length` integers that live for `'a`, or `length` is 0.
unsafe fn array<'a>(data: *const i64, length: usize) -> &'a [i64] {
    if data.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, length) }
}

/// The library if the process has it already.
fn open_loaded(path: &Path) -> Option<Library> {
    // SAFETY: NOLOAD runs no code of the library.
    unsafe { Library::open(Some(path), libc::RTLD_LAZY | libc::RTLD_NOLOAD).ok() }
}

/// Where the process has libtorch_cpu from.
fn mapped_torch() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.contains("/libtorch_cpu.so"))?;
    Some(PathBuf::from(line.get(line.find('/')?..)?))
}
