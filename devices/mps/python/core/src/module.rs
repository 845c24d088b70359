// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of `lighter_mps._core`, with the names and meanings that `lighter_mps.hot` has.
#![allow(unsafe_code)]

use pyo3_ffi as ffi;

use crate::call::{Call, Definition, answer};
use crate::core::{Core, STREAM, Settings, core};
use crate::numbers::{ADDRESS_BITS, FREED};
use crate::plan::Layout;
use crate::python::{Gil, Kind, Object, Owned, Raised};
use crate::thunks::THUNKS;
use crate::{factories, kernel, tensors, views};

/// One function of the module: its Python name, and what answers.
macro_rules! function {
    ($name:ident, $python:expr, $work:expr) => {
        static $name: Definition = {
            unsafe extern "C" fn called(
                _module: *mut ffi::PyObject,
                arguments: *const *mut ffi::PyObject,
                count: ffi::Py_ssize_t,
                names: *mut ffi::PyObject,
            ) -> *mut ffi::PyObject {
                // SAFETY: Python calls its functions with the lock held, and with arguments as the protocol says.
                unsafe { answer(|gil| $work(gil, &Call::new(gil, arguments, count, names))) }
            }
            Definition::fast($python, called)
        };
    };
}

function!(CONFIGURE, c"configure", configure);
function!(SET_SOCKET, c"set_socket", set_socket);
function!(APPEND, c"append", append);
function!(PENDING, c"pending", pending);
function!(FLUSH, c"flush", flush);
function!(NEW_TENSOR, c"new_tensor", new_tensor);
function!(ADDRESS, c"address", address);
function!(NUMBER, c"number", number);
function!(AS_STRIDED, c"as_strided", views::as_strided);
function!(VIEW, c"view", views::view);
function!(EMPTY, c"empty", factories::empty);
function!(EMPTY_STRIDED, c"empty_strided", factories::empty_strided);
function!(COPY, c"copy", factories::copy);
function!(FREE_COUNT, c"free_count", free_count);
function!(COUNTERS, c"counters", counters);
function!(FORGET_PLANS, c"forget_plans", forget_plans);
function!(CLOSE, c"close", close);
function!(KERNEL, c"kernel", kernel::make);
function!(THUNK_ADDRESSES, c"thunk_addresses", thunk_addresses);

/// All of them.
pub(crate) static FUNCTIONS: [&Definition; 19] = [
    &CONFIGURE,
    &SET_SOCKET,
    &APPEND,
    &PENDING,
    &FLUSH,
    &NEW_TENSOR,
    &ADDRESS,
    &NUMBER,
    &AS_STRIDED,
    &VIEW,
    &EMPTY,
    &EMPTY_STRIDED,
    &COPY,
    &FREE_COUNT,
    &COUNTERS,
    &FORGET_PLANS,
    &CLOSE,
    &KERNEL,
    &THUNK_ADDRESSES,
];

fn configure<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let settings = Settings {
        torch_lib_dir: call.required(0, "torch_lib_dir")?,
        tensor: call.required(1, "tensor_type")?,
        parameter: call.required(2, "parameter_type")?,
        miss: call.required(3, "miss")?,
        sync_call: call.required(4, "sync_call")?,
        no_socket: call.required(5, "no_socket")?,
        flush_bytes: match call.optional(6, "flush_bytes") {
            Some(bytes) => bytes.as_integer()?,
            None => 2048,
        },
        maker: call.optional(7, "maker").filter(|maker| !maker.is_none()).map(Object::as_text).transpose()?,
    };
    Core::configure(gil, &settings)?;
    Ok(gil.none())
}

fn set_socket<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let socket = call.required(0, "descriptor")?.as_integer()?;
    let socket = i32::try_from(socket)
        .map_err(|_| gil.raise(Kind::Value, &format!("lighter_mps._core: {socket} is no descriptor")))?;
    gil.released(|| STREAM.set_socket(socket));
    Ok(gil.none())
}

fn append<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    call.required(0, "data")?.with_bytes(|messages| STREAM.append(messages))?;
    Ok(gil.none())
}

fn pending<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    gil.integer(STREAM.pending() as u64)
}

fn flush<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    core(gil)?.flush(gil)?;
    Ok(gil.none())
}

fn new_tensor<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let core = core(gil)?;
    let dtype = call.required(2, "dtype_code")?.as_integer()?;
    let layout = Layout {
        sizes: call.required(0, "sizes")?.integers()?,
        strides: call.required(1, "strides")?.integers()?,
        dtype: i32::try_from(dtype)
            .map_err(|_| gil.raise(Kind::Value, "lighter_mps._core: unknown dtype code"))?,
    };
    let number = STREAM.take_number(layout.bytes()).ok_or_else(|| kernel::no_number(gil))?;
    core.maker.make(gil, &core.shims, number, &layout.sizes, &layout.strides, layout.dtype)
}

fn address<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    gil.integer(data_of(gil, call.required(0, "tensor")?)?)
}

fn data_of(gil: Gil<'_>, object: Object<'_>) -> Result<u64, Raised> {
    let core = core(gil)?;
    tensors::of_object(&core.known, object)
        .and_then(|tensor| core.shims.data(&tensor))
        .ok_or_else(|| gil.raise(Kind::Type, "lighter_mps._core: a tensor with a storage is wanted"))
}

/// The storage's number, also of a tensor without elements, whose own address is 0.
fn number<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let object = call.required(0, "tensor")?;
    let data = data_of(gil, object)?;
    if data != 0 {
        return gil.integer(data >> ADDRESS_BITS);
    }
    let storage = object.call_method(c"untyped_storage")?;
    let data = storage.object().call_method(c"data_ptr")?;
    gil.integer(u64::try_from(data.object().as_integer()?).unwrap_or(0) >> ADDRESS_BITS)
}

fn free_count<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    gil.integer(FREED.count() as u64)
}

fn counters<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let counters = STREAM.counters();
    let dict = gil.dict()?;
    for (name, value) in
        [("calls", counters.calls), ("bytes_sent", counters.bytes_sent), ("flushes", counters.flushes)]
    {
        dict.object().set_entry(gil.text(name)?.object(), gil.integer(value)?.object())?;
    }
    Ok(dict)
}

fn forget_plans<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let kernels = core(gil)?.kernels.with(gil, |kernels| kernels.clone());
    for kernel in kernels {
        kernel.forget_plans(gil);
    }
    Ok(gil.none())
}

/// At exit: what goes later goes in silence.
fn close<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    FREED.ignore();
    Ok(gil.none())
}

fn thunk_addresses<'a>(gil: Gil<'a>, _: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let dict = gil.dict()?;
    for (number, thunk) in THUNKS {
        dict.object()
            .set_entry(gil.integer(number)?.object(), gil.integer(thunk as usize as u64)?.object())?;
    }
    Ok(dict)
}
