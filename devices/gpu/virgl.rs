// SPDX-License-Identifier: MIT OR Apache-2.0
//! virglrenderer: the fourteen functions of it that Venus needs, behind safe types.
//!
//! The library is loaded when a session starts and has a context of Vulkan only. It does not talk to a GPU: it hands
//! commands on to a render server, which we have started ourselves and whose socket it asks us for.
//!
//! One renderer a process, since the library keeps its state in itself, and in the thread that made it.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The capability set of Venus.
pub const CAPSET_VENUS: u32 = 4;
/// Memory of the renderer, in virtio-gpu's numbers.
pub const BLOB_MEM_HOST3D: u32 = 2;

/// Version of the callbacks below.
const CALLBACKS_VERSION: c_int = 3;
/// The largest set of capabilities that is taken.
const MAX_CAPSET_BYTES: u32 = 4096;
/// Words of Venus's set of capabilities that Mesa asserts.
const WORD_BLOB_ID_0: usize = 4;
const WORD_WAIT_SYNCS: usize = 21;
const WORD_TIMELINES: usize = 22;

const THREAD_SYNC: c_int = 1 << 1;
const USE_EXTERNAL_BLOB: c_int = 1 << 5;
const VENUS: c_int = 1 << 6;
const NO_VIRGL: c_int = 1 << 7;
const RENDER_SERVER: c_int = 1 << 9;

/// What the library calls memory that only its own driver can open.
const FD_TYPE_DMABUF: u32 = 1;
const FD_TYPE_OPAQUE: u32 = 2;
const FD_TYPE_SHM: u32 = 3;

/// Why the renderer does not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum VirglError {
    /// The library cannot be loaded.
    #[error("{} cannot be loaded", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// Why.
        #[source]
        source: libloading::Error,
    },
    /// It has not all functions.
    #[error("{} has no function {name}: virglrenderer 1.2 or newer is needed", path.display())]
    Function {
        /// The library.
        path: PathBuf,
        /// The function.
        name: String,
    },
    /// It has been started in this process before.
    #[error("virglrenderer runs in this process already")]
    Twice,
    /// It does not start.
    #[error("virglrenderer does not start (error {code})")]
    Start {
        /// What it returned.
        code: c_int,
    },
    /// It has no Vulkan: the render server gave no answer.
    #[error(
        "virglrenderer has no capabilities for Venus: its render server has ended or is of another version"
    )]
    NoVenus,
    /// It lacks something without which Mesa's driver ends the program.
    #[error("virglrenderer's Venus lacks {what}, without which Mesa's driver ends the program")]
    Lacks {
        /// What.
        what: &'static str,
    },
    /// A name with a zero byte in it.
    #[error("a context's name has a zero byte in it")]
    Name,
    /// One of its functions failed.
    #[error("virglrenderer's {function} failed (error {code})")]
    Failed {
        /// Which one.
        function: &'static str,
        /// What it returned.
        code: c_int,
    },
    /// Memory that a client cannot map.
    #[error(
        "the driver gives out this memory only to itself, so that a client cannot map it: `lighter doctor` says which mode of \
         memory this host's driver needs"
    )]
    Opaque,
}

/// What a piece of memory is, behind its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobKind {
    /// A dma-buf of the driver.
    DmaBuf,
    /// Ordinary shared memory.
    Shared,
}

/// A fence that has been passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// Its context.
    pub context: u32,
    /// Its ring.
    pub ring: u32,
    /// Its number.
    pub fence: u64,
}

/// Memory to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewBlob {
    /// Number of the resource, chosen by us.
    pub resource: u32,
    /// The context.
    pub context: u32,
    /// What is done with it, in virtio-gpu's numbers.
    pub flags: u32,
    /// Which of the context's memories; 0 for new shared memory.
    pub blob: u64,
    /// Its size.
    pub size_bytes: u64,
}

type GetServer = unsafe extern "C" fn(*mut c_void, u32) -> c_int;
type WriteContextFence = unsafe extern "C" fn(*mut c_void, u32, u32, u64);

/// The library's table of callbacks; those that only OpenGL needs stay null.
#[repr(C)]
struct Callbacks {
    version: c_int,
    write_fence: *const c_void,
    create_gl_context: *const c_void,
    destroy_gl_context: *const c_void,
    make_current: *const c_void,
    get_drm_fd: *const c_void,
    write_context_fence: WriteContextFence,
    get_server_fd: GetServer,
    get_egl_display: *const c_void,
}

#[repr(C)]
struct BlobArgs {
    resource: u32,
    context: u32,
    memory: u32,
    flags: u32,
    blob: u64,
    size: u64,
    iovecs: *const c_void,
    iovec_count: u32,
}

/// What the callbacks work on. Lives as long as the process, like the library that holds it.
struct Cookie {
    server: Mutex<Option<OwnedFd>>,
    passed: Mutex<VecDeque<Passed>>,
}

struct Api {
    init: unsafe extern "C" fn(*mut c_void, c_int, *const Callbacks) -> c_int,
    get_cap_set: unsafe extern "C" fn(u32, *mut u32, *mut u32),
    fill_caps: unsafe extern "C" fn(u32, u32, *mut c_void),
    context_create_with_flags: unsafe extern "C" fn(u32, u32, u32, *const c_char) -> c_int,
    context_destroy: unsafe extern "C" fn(u32),
    context_create_fence: unsafe extern "C" fn(u32, u32, u32, u64) -> c_int,
    context_poll: unsafe extern "C" fn(u32),
    context_get_poll_fd: unsafe extern "C" fn(u32) -> c_int,
    submit_cmd: unsafe extern "C" fn(*mut c_void, c_int, c_int) -> c_int,
    resource_create_blob: unsafe extern "C" fn(*const BlobArgs) -> c_int,
    resource_export_blob: unsafe extern "C" fn(u32, *mut u32, *mut c_int) -> c_int,
    resource_unref: unsafe extern "C" fn(u32),
    ctx_attach_resource: unsafe extern "C" fn(c_int, c_int),
    ctx_detach_resource: unsafe extern "C" fn(c_int, c_int),
}

/// The started library. Not for other threads: the library keeps to the one that started it.
pub struct Renderer {
    api: Api,
    cookie: &'static Cookie,
    capset_version: u32,
    capset: Vec<u32>,
    /// Makes this neither `Send` nor `Sync`.
    thread: PhantomData<*mut ()>,
}

impl fmt::Debug for Renderer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renderer").field("capset_version", &self.capset_version).finish_non_exhaustive()
    }
}

impl Renderer {
    /// Loads the library and starts it on a render server's socket.
    ///
    /// # Errors
    /// When it cannot be loaded, does not start, or has not what Mesa's driver needs.
    pub fn start(library: &Path, server: OwnedFd) -> Result<Self, VirglError> {
        static STARTED: AtomicBool = AtomicBool::new(false);
        if STARTED.swap(true, Ordering::Relaxed) {
            return Err(VirglError::Twice);
        }
        let api = load(library)?;
        let cookie: &'static Cookie =
            Box::leak(Box::new(Cookie { server: Mutex::new(Some(server)), passed: Mutex::default() }));
        let callbacks: &'static Callbacks = Box::leak(Box::new(Callbacks {
            version: CALLBACKS_VERSION,
            write_fence: null(),
            create_gl_context: null(),
            destroy_gl_context: null(),
            make_current: null(),
            get_drm_fd: null(),
            write_context_fence,
            get_server_fd,
            get_egl_display: null(),
        }));
        let flags = THREAD_SYNC | USE_EXTERNAL_BLOB | VENUS | NO_VIRGL | RENDER_SERVER;
        let data = std::ptr::from_ref(cookie).cast_mut().cast();
        // SAFETY: cookie and callbacks are never freed; the callbacks take the cookie for what it is.
        let code = unsafe { (api.init)(data, flags, callbacks) };
        if code != 0 {
            return Err(VirglError::Start { code });
        }
        let (capset_version, capset) = capset(&api)?;
        Ok(Self { api, cookie, capset_version, capset, thread: PhantomData })
    }

    /// Newest version of Venus's capabilities.
    #[must_use]
    pub fn capset_version(&self) -> u32 {
        self.capset_version
    }

    /// Venus's capabilities, as a client gets them.
    #[must_use]
    pub fn capset(&self) -> &[u32] {
        &self.capset
    }

    /// Begins a context.
    ///
    /// # Errors
    /// When the render server does not make one.
    pub fn create_context(&self, context: u32, name: &str) -> Result<(), VirglError> {
        let name = CString::new(name).map_err(|_| VirglError::Name)?;
        let length = u32::try_from(name.as_bytes().len()).map_err(|_| VirglError::Name)?;
        // SAFETY: the name has that length and lives through the call.
        let code =
            unsafe { (self.api.context_create_with_flags)(context, CAPSET_VENUS, length, name.as_ptr()) };
        check("context_create_with_flags", code)
    }

    /// Ends a context.
    pub fn destroy_context(&self, context: u32) {
        // SAFETY: an unknown context is left alone.
        unsafe { (self.api.context_destroy)(context) }
    }

    /// A descriptor that is readable when there may be fences that have been passed.
    #[must_use]
    pub fn poll_fd(&self, context: u32) -> Option<BorrowedFd<'_>> {
        // SAFETY: an unknown context has none.
        let fd = unsafe { (self.api.context_get_poll_fd)(context) };
        // SAFETY: the library's own, open as long as the context, which only `destroy_context` ends.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Fences that have been passed since the last call, in the order of their rings.
    #[must_use]
    pub fn passed(&self, context: u32) -> Vec<Passed> {
        // SAFETY: an unknown context is left alone; calls back from within.
        unsafe { (self.api.context_poll)(context) };
        self.cookie.passed.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }

    /// Gives commands to a context. The library may write to them.
    ///
    /// # Errors
    /// When they are not Venus's commands, or the render server has ended.
    pub fn submit(&self, context: u32, commands: &mut [u32]) -> Result<(), VirglError> {
        let too_long = |_| VirglError::Failed { function: "submit_cmd", code: -libc::EINVAL };
        let count = c_int::try_from(commands.len()).map_err(too_long)?;
        let id = c_int::try_from(context).map_err(too_long)?;
        // SAFETY: that many words, aligned, ours alone.
        let code = unsafe { (self.api.submit_cmd)(commands.as_mut_ptr().cast(), id, count) };
        check("submit_cmd", code)
    }

    /// Notes a fence on a ring; it comes with [`Self::passed`].
    ///
    /// # Errors
    /// When the render server has ended.
    pub fn create_fence(&self, context: u32, ring: u32, fence: u64) -> Result<(), VirglError> {
        // SAFETY: takes numbers.
        let code = unsafe { (self.api.context_create_fence)(context, 0, ring, fence) };
        check("context_create_fence", code)
    }

    /// Makes a resource of a context's memory, and gives it to the context.
    ///
    /// # Errors
    /// When there is no such memory.
    pub fn create_blob(&self, blob: &NewBlob) -> Result<(), VirglError> {
        let bad = |_| VirglError::Failed { function: "resource_create_blob", code: -libc::EINVAL };
        let context = c_int::try_from(blob.context).map_err(bad)?;
        let resource = c_int::try_from(blob.resource).map_err(bad)?;
        let args = BlobArgs {
            resource: blob.resource,
            context: blob.context,
            memory: BLOB_MEM_HOST3D,
            flags: blob.flags,
            blob: blob.blob,
            size: blob.size_bytes,
            iovecs: null(),
            iovec_count: 0,
        };
        // SAFETY: the arguments live through the call.
        check("resource_create_blob", unsafe { (self.api.resource_create_blob)(&raw const args) })?;
        // SAFETY: takes numbers of what there is.
        unsafe { (self.api.ctx_attach_resource)(context, resource) };
        Ok(())
    }

    /// A resource's memory, to be mapped by somebody else.
    ///
    /// # Errors
    /// When the driver does not give it out.
    pub fn export_blob(&self, resource: u32) -> Result<(OwnedFd, BlobKind), VirglError> {
        let (mut kind, mut fd) = (0, -1);
        // SAFETY: the pointers are to live numbers.
        let code = unsafe { (self.api.resource_export_blob)(resource, &raw mut kind, &raw mut fd) };
        check("resource_export_blob", code)?;
        if fd < 0 {
            return Err(VirglError::Failed { function: "resource_export_blob", code: fd });
        }
        // SAFETY: the library gives a descriptor away.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        match kind {
            FD_TYPE_DMABUF => Ok((fd, BlobKind::DmaBuf)),
            FD_TYPE_SHM => Ok((fd, BlobKind::Shared)),
            FD_TYPE_OPAQUE => Err(VirglError::Opaque),
            _ => Err(VirglError::Failed { function: "resource_export_blob", code: -libc::EINVAL }),
        }
    }

    /// Takes a resource from its context and forgets it.
    pub fn remove_resource(&self, context: u32, resource: u32) {
        if let (Ok(context), Ok(id)) = (c_int::try_from(context), c_int::try_from(resource)) {
            // SAFETY: unknown ones are left alone.
            unsafe { (self.api.ctx_detach_resource)(context, id) };
        }
        // SAFETY: as above.
        unsafe { (self.api.resource_unref)(resource) }
    }
}

/// Gives the library its render server, once.
///
/// # Safety
/// `data` is the cookie.
unsafe extern "C" fn get_server_fd(data: *mut c_void, _version: u32) -> c_int {
    // SAFETY: the caller's promise; the cookie is never freed.
    let cookie = unsafe { &*data.cast::<Cookie>() };
    let server = cookie.server.lock().unwrap_or_else(PoisonError::into_inner).take();
    server.map_or(-1, IntoRawFd::into_raw_fd)
}

/// Notes a fence that has been passed.
///
/// # Safety
/// `data` is the cookie.
unsafe extern "C" fn write_context_fence(data: *mut c_void, context: u32, ring: u32, fence: u64) {
    // SAFETY: the caller's promise; the cookie is never freed.
    let cookie = unsafe { &*data.cast::<Cookie>() };
    cookie.passed.lock().unwrap_or_else(PoisonError::into_inner).push_back(Passed { context, ring, fence });
}

fn check(function: &'static str, code: c_int) -> Result<(), VirglError> {
    if code == 0 { Ok(()) } else { Err(VirglError::Failed { function, code }) }
}

fn capset(api: &Api) -> Result<(u32, Vec<u32>), VirglError> {
    let (mut version, mut bytes) = (0, 0);
    // SAFETY: the pointers are to live numbers.
    unsafe { (api.get_cap_set)(CAPSET_VENUS, &raw mut version, &raw mut bytes) };
    if bytes == 0 || bytes > MAX_CAPSET_BYTES || bytes % 4 != 0 {
        return Err(VirglError::NoVenus);
    }
    let mut words = vec![0u32; usize::try_from(bytes / 4).unwrap_or_default()];
    // SAFETY: room for as many bytes as the library has said.
    unsafe { (api.fill_caps)(CAPSET_VENUS, version, words.as_mut_ptr().cast()) };
    if words.iter().all(|word| *word == 0) {
        return Err(VirglError::NoVenus);
    }
    for (word, what) in [
        (WORD_BLOB_ID_0, "shared memory (supports_blob_id_0)"),
        (WORD_WAIT_SYNCS, "waits for syncs (allow_vk_wait_syncs)"),
        (WORD_TIMELINES, "several timelines (supports_multiple_timelines)"),
    ] {
        if words.get(word).is_none_or(|word| *word == 0) {
            return Err(VirglError::Lacks { what });
        }
    }
    Ok((version, words))
}

fn load(path: &Path) -> Result<Api, VirglError> {
    // SAFETY: runs the library's initialisers. That is the purpose of this process, and the library is the host's own.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|source| VirglError::Load { path: path.to_owned(), source })?;
    macro_rules! function {
        ($name:literal) => {{
            let missing = |_| VirglError::Function { path: path.to_owned(), name: text($name) };
            // SAFETY: the signatures are those of virglrenderer's public header, unchanged since 1.0.
            *unsafe { library.get($name) }.map_err(missing)?
        }};
    }
    let api = Api {
        init: function!(c"virgl_renderer_init"),
        get_cap_set: function!(c"virgl_renderer_get_cap_set"),
        fill_caps: function!(c"virgl_renderer_fill_caps"),
        context_create_with_flags: function!(c"virgl_renderer_context_create_with_flags"),
        context_destroy: function!(c"virgl_renderer_context_destroy"),
        context_create_fence: function!(c"virgl_renderer_context_create_fence"),
        context_poll: function!(c"virgl_renderer_context_poll"),
        context_get_poll_fd: function!(c"virgl_renderer_context_get_poll_fd"),
        submit_cmd: function!(c"virgl_renderer_submit_cmd"),
        resource_create_blob: function!(c"virgl_renderer_resource_create_blob"),
        resource_export_blob: function!(c"virgl_renderer_resource_export_blob"),
        resource_unref: function!(c"virgl_renderer_resource_unref"),
        ctx_attach_resource: function!(c"virgl_renderer_ctx_attach_resource"),
        ctx_detach_resource: function!(c"virgl_renderer_ctx_detach_resource"),
    };
    // Never unloaded: its threads run in it.
    std::mem::forget(library);
    Ok(api)
}

fn text(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}
