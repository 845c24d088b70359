// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every call out of the plug-in: the loader, a few functions of the C library, and ggml's public functions.
//!
//! Nothing is linked. The C library's functions are those of the program; ggml's are looked up in the program by
//! name, because a program may hold its ggml privately (a Python module does).
#![allow(unsafe_code)]

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use core::mem::transmute;
use core::ptr::{NonNull, null, null_mut};

use crate::endpoint::Endpoint;

/// A `ggml_backend_reg`, of which only the address is known.
pub(crate) type Backend = c_void;
/// `ggml_backend_rpc_add_server`.
pub(crate) type AddServer = unsafe extern "C" fn(*const c_char) -> *mut Backend;

type RegByName = unsafe extern "C" fn(*const c_char) -> *mut Backend;
type GetProcAddress = unsafe extern "C" fn(*mut Backend, *const c_char) -> *mut c_void;
type RpcReg = unsafe extern "C" fn() -> *mut Backend;
type Version = unsafe extern "C" fn() -> *const c_char;

const RTLD_NOW: c_int = 2;
const RTLD_NOLOAD: c_int = 4;
const RTLD_NODELETE: c_int = 0x1000;
const F_OK: c_int = 0;
const STDERR: c_int = 2;
const FAMILY_INET: u16 = 2;
const ADDRESS_BYTES: c_uint = 16;
const _: () = assert!(size_of::<SocketAddress>() == 16);
const SOCK_STREAM_CLOEXEC: c_int = 1 | 0o2_000_000;
const MSG_NOSIGNAL: c_int = 0x4000;
const MSG_WAITALL: c_int = 0x100;

/// HELLO of ggml's RPC protocol: the command, the length of the body in 64 bits, 24 bytes about transports.
const HELLO: [u8; 33] = {
    let mut message = [0; 33];
    message[0] = 14;
    message[1] = 24;
    message
};

#[repr(C)]
struct SocketAddress {
    family: u16,
    port: [u8; 2],
    address: [u8; 4],
    zero: [u8; 8],
}

#[repr(C)]
struct Found {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
    fn dladdr(address: *const c_void, found: *mut Found) -> c_int;
    fn getenv(name: *const c_char) -> *const c_char;
    fn access(path: *const c_char, mode: c_int) -> c_int;
    fn write(descriptor: c_int, bytes: *const c_void, length: usize) -> c_long;
    fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn connect(descriptor: c_int, address: *const c_void, length: c_uint) -> c_int;
    fn send(descriptor: c_int, bytes: *const c_void, length: usize, flags: c_int) -> c_long;
    fn recv(descriptor: c_int, bytes: *mut c_void, length: usize, flags: c_int) -> c_long;
    fn close(descriptor: c_int) -> c_int;
    #[cfg(panic = "abort")]
    fn abort() -> !;
}

/// The ggml that loaded this plug-in.
pub(crate) struct Ggml {
    reg_by_name: RegByName,
    get_proc_address: GetProcAddress,
    version: Version,
}

impl Ggml {
    /// Its functions; `None` when one of them is not there.
    pub(crate) fn of_this_program() -> Option<Self> {
        let registry = find(c"ggml_backend_reg_by_name", c"libggml.so.0")?;
        let proc_address = find(c"ggml_backend_reg_get_proc_address", c"libggml-base.so.0")?;
        let version = find(c"ggml_version", c"libggml-base.so.0")?;
        // SAFETY: these are the functions' signatures in all versions of ggml that load plug-ins.
        unsafe {
            Some(Self {
                reg_by_name: transmute::<*mut c_void, RegByName>(registry.as_ptr()),
                get_proc_address: transmute::<*mut c_void, GetProcAddress>(proc_address.as_ptr()),
                version: transmute::<*mut c_void, Version>(version.as_ptr()),
            })
        }
    }

    /// A registered backend.
    pub(crate) fn backend(&self, name: &CStr) -> Option<NonNull<Backend>> {
        // SAFETY: a string that ends in a zero byte; ggml looks it up and keeps nothing of it.
        NonNull::new(unsafe { (self.reg_by_name)(name.as_ptr()) })
    }

    /// How a registered RPC client is told of a server; `None` in versions before there were such clients.
    pub(crate) fn add_server_of(&self, backend: NonNull<Backend>) -> Option<AddServer> {
        let name = c"ggml_backend_rpc_add_server";
        // SAFETY: the backend is one of ggml's registry, which never gives one up.
        let function = unsafe { (self.get_proc_address)(backend.as_ptr(), name.as_ptr()) };
        // SAFETY: under this name ggml's RPC client gives a function of this signature, in all versions with it.
        NonNull::new(function)
            .map(|function| unsafe { transmute::<*mut c_void, AddServer>(function.as_ptr()) })
    }

    /// Its version, as `0.27.0`.
    pub(crate) fn version(&self) -> &'static CStr {
        // SAFETY: takes nothing and gives a constant text, or null.
        unsafe { text((self.version)()) }.unwrap_or(c"of an unknown version")
    }
}

/// A function of the program: in its global scope, else in the library of that name if the program has loaded it.
fn find(name: &CStr, library: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: strings that end in zero bytes; null stands for the global scope; nothing new is loaded.
    unsafe {
        NonNull::new(dlsym(null_mut(), name.as_ptr())).or_else(|| {
            let library = NonNull::new(dlopen(library.as_ptr(), RTLD_NOW | RTLD_NOLOAD))?;
            NonNull::new(dlsym(library.as_ptr(), name.as_ptr()))
        })
    }
}

/// Whether llama.cpp is in this program, which knows RPC servers by its own option and variable.
pub(crate) fn is_llama() -> bool {
    find(c"llama_supports_rpc", c"libllama.so.0").is_some()
}

/// An RPC client of ggml that is loaded and not yet registered.
pub(crate) struct Client {
    reg: RpcReg,
    /// How it is told of a server.
    pub(crate) add_server: AddServer,
}

impl Client {
    /// Loads it from a file, for the rest of the program's life.
    pub(crate) fn load(path: &CStr) -> Result<Self, &'static CStr> {
        // SAFETY: runs the initialisers of a library that lighter put beside this one, built from ggml.
        let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW | RTLD_NODELETE) };
        // SAFETY: the loader's last message; it stays until the next call into the loader, and none follows.
        let reason = || unsafe { text(dlerror()) }.unwrap_or(c"the loader does not say why");
        let library = NonNull::new(library).ok_or_else(reason)?;
        let function = |name: &CStr| {
            // SAFETY: an open library, and a string that ends in a zero byte.
            NonNull::new(unsafe { dlsym(library.as_ptr(), name.as_ptr()) }).ok_or_else(reason)
        };
        let (reg, add_server) =
            (function(c"ggml_backend_rpc_reg")?, function(c"ggml_backend_rpc_add_server")?);
        // SAFETY: ggml's public header gives the functions these signatures.
        unsafe {
            Ok(Self {
                reg: transmute::<*mut c_void, RpcReg>(reg.as_ptr()),
                add_server: transmute::<*mut c_void, AddServer>(add_server.as_ptr()),
            })
        }
    }

    /// The backend that has no device until a program adds a server.
    pub(crate) fn backend(&self) -> Option<NonNull<Backend>> {
        // SAFETY: takes nothing and gives a constant of the library.
        NonNull::new(unsafe { (self.reg)() })
    }
}

/// Tells ggml's RPC client of a server; `None` when it cannot use it.
pub(crate) fn add_server(function: AddServer, endpoint: &CStr) -> Option<NonNull<Backend>> {
    // SAFETY: the client's function, and a string that ends in a zero byte, which it copies.
    NonNull::new(unsafe { function(endpoint.as_ptr()) })
}

/// The folder in which this plug-in lies; `.` when the loader cannot tell.
pub(crate) fn own_folder() -> &'static [u8] {
    let mut found = Found { file: null(), base: null_mut(), symbol: null(), address: null_mut() };
    let here: extern "C" fn() -> *mut c_void = crate::ggml_backend_init;
    // SAFETY: an address in this library, and a struct of the loader's layout to fill in.
    let is_known = unsafe { dladdr(here as *const c_void, &raw mut found) } != 0;
    // SAFETY: filled in; the name lives as long as the library, which is this one.
    let file = if is_known { unsafe { text(found.file) } } else { None };
    let file = file.unwrap_or_default().to_bytes();
    let end = file.iter().rposition(|byte| *byte == b'/');
    end.and_then(|end| file.get(..end)).unwrap_or(b".")
}

/// A variable of the environment, unless it is empty.
pub(crate) fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the value is read before ggml goes on; nothing in this library changes the environment.
    unsafe { text(getenv(name.as_ptr())) }.filter(|value| !value.is_empty())
}

/// Whether a file is there.
pub(crate) fn exists(path: &CStr) -> bool {
    // SAFETY: a string that ends in a zero byte.
    unsafe { access(path.as_ptr(), F_OK) == 0 }
}

/// Whether a server at the endpoint greets back. Waits as long as it takes to load the engine, as ggml's client does.
pub(crate) fn answers(endpoint: Endpoint) -> bool {
    let to = SocketAddress {
        family: FAMILY_INET,
        port: endpoint.port.to_be_bytes(),
        address: endpoint.address,
        zero: [0; 8],
    };
    let mut length = [0_u8; 8];
    let mut body = [0_u8; 64];
    // SAFETY: an IPv4 socket with an IPv4 address of that length; the buffers are as long as said and live through
    // the calls; the descriptor is closed once.
    unsafe {
        let descriptor = socket(FAMILY_INET.into(), SOCK_STREAM_CLOEXEC, 0);
        if descriptor < 0 {
            return false;
        }
        let take = |bytes: &mut [u8]| {
            let got = recv(descriptor, bytes.as_mut_ptr().cast(), bytes.len(), MSG_WAITALL);
            usize::try_from(got).is_ok_and(|got| got == bytes.len())
        };
        let has_answered = connect(descriptor, (&raw const to).cast(), ADDRESS_BYTES) == 0
            && usize::try_from(send(descriptor, HELLO.as_ptr().cast(), HELLO.len(), MSG_NOSIGNAL)) == Ok(HELLO.len())
            && take(&mut length)
            // To the end of the answer: a connection that is closed before is an error to the server.
            && usize::try_from(u64::from_le_bytes(length))
                .ok()
                .and_then(|length| body.get_mut(..length))
                .is_some_and(take);
        close(descriptor);
        has_answered
    }
}

/// Writes to standard error as much as it takes; there is nobody to tell when it does not.
pub(crate) fn write_to_stderr(bytes: &[u8]) {
    // SAFETY: bytes that live through the call.
    let _ = unsafe { write(STDERR, bytes.as_ptr().cast(), bytes.len()) };
}

#[cfg(panic = "abort")]
pub(crate) fn abort_program() -> ! {
    // SAFETY: takes nothing and does not come back.
    unsafe { abort() }
}

/// # Safety
/// Null, or a text that ends in a zero byte and stays where it is.
unsafe fn text(pointer: *const c_char) -> Option<&'static CStr> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { CStr::from_ptr(pointer) })
}
