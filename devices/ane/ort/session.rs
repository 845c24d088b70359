// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session: a model in memory, compiled by one provider.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use lighter_frames::{Dim, Element, Port, WEIGHTS_LOCATION};
use ort_sys::{
    GraphOptimizationLevel, ONNXTensorElementDataType, OrtApi, OrtSession, OrtSessionOptions, OrtStatusPtr,
    OrtTypeInfo,
};

use super::library::{c_text, made};
use super::provider::Entry;
use super::{Ort, OrtError, ProviderSetup};

/// How sessions are made.
#[derive(Debug, Clone)]
pub struct SessionSetup {
    /// The provider; operations that it does not have are the processor's.
    pub provider: ProviderSetup,
    /// Threads of the session's own pool, the caller's included.
    pub threads: u16,
    /// Folder for what the provider compiles.
    pub cache_dir: Option<PathBuf>,
}

/// A model in memory.
#[derive(Debug, Clone, Copy)]
pub struct ModelBytes<'a> {
    /// The ModelProto, with its inputs.
    pub proto: &'a [u8],
    /// What the proto calls [`WEIGHTS_LOCATION`]; read while the session is made, not later.
    pub weights: &'a [u8],
    /// Names of the inputs, in the order of runs.
    pub inputs: &'a [Port],
    /// Names of the outputs, in the order of answers.
    pub outputs: &'a [Port],
}

/// A compiled model.
#[derive(Debug)]
pub struct Session {
    pub(super) ort: Arc<Ort>,
    pub(super) session: NonNull<OrtSession>,
    pub(super) inputs: Vec<CString>,
    pub(super) outputs: Vec<CString>,
}

// SAFETY: a session may be used and released by any thread.
unsafe impl Send for Session {}
// SAFETY: ONNX Runtime documents runs on one session by several threads as allowed; what a provider does not bear
// its caller must hold off.
unsafe impl Sync for Session {}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: made by CreateSessionFromArray, and released once.
        unsafe { (self.ort.api.ReleaseSession)(self.session.as_ptr()) }
    }
}

impl Session {
    /// Compiles a model.
    ///
    /// # Errors
    /// When the library has no such provider, or refuses an option or the model.
    pub fn new(ort: &Arc<Ort>, setup: &SessionSetup, model: ModelBytes<'_>) -> Result<Self, OrtError> {
        let names = |ports: &[Port]| {
            ports.iter().map(|port| c_text("port", &port.name)).collect::<Result<Vec<CString>, _>>()
        };
        let (inputs, outputs) = (names(model.inputs)?, names(model.outputs)?);
        let options = Options::new(ort)?;
        options.tune(setup)?;
        options.add_provider(setup)?;
        options.add_weights(model.weights)?;
        let mut session = null_mut();
        let what = "the model does not compile";
        // SAFETY: environment and options are alive, the bytes are readable for their whole length during the call,
        // and the place for the result is ours.
        let status = unsafe {
            (ort.api.CreateSessionFromArray)(
                ort.env.as_ptr(),
                model.proto.as_ptr().cast(),
                model.proto.len(),
                options.options.as_ptr(),
                &raw mut session,
            )
        };
        ort.check(what, status)?;
        Ok(Self { ort: Arc::clone(ort), session: made(what, session)?, inputs, outputs })
    }

    /// The inputs that the compiled model has. Those of types that do not travel are left out.
    ///
    /// # Errors
    /// When ONNX Runtime does not say.
    pub fn input_ports(&self) -> Result<Vec<Port>, OrtError> {
        let api = self.ort.api;
        self.ports(api.SessionGetInputCount, api.SessionGetInputName, api.SessionGetInputTypeInfo)
    }

    /// The outputs that the compiled model has, as [`Self::input_ports`].
    ///
    /// # Errors
    /// When ONNX Runtime does not say.
    pub fn output_ports(&self) -> Result<Vec<Port>, OrtError> {
        let api = self.ort.api;
        self.ports(api.SessionGetOutputCount, api.SessionGetOutputName, api.SessionGetOutputTypeInfo)
    }

    fn ports(&self, count: CountOf, name: NameOf, kind: TypeOf) -> Result<Vec<Port>, OrtError> {
        let what = "ports of the model";
        let session = self.session.as_ptr();
        let mut ports = 0;
        // SAFETY: the session is alive, and the place for the result is ours.
        self.ort.check(what, unsafe { count(session, &raw mut ports) })?;
        let mut all = Vec::new();
        for index in 0..ports {
            let name = self.port_name(index, name)?;
            let mut info = null_mut();
            // SAFETY: as above, and the index is below the count.
            self.ort.check(what, unsafe { kind(session, index, &raw mut info) })?;
            let info = TypeInfo { api: self.ort.api, info: made(what, info)? };
            all.extend(info.tensor(&self.ort)?.map(|(element, dims)| Port { name, element, dims }));
        }
        Ok(all)
    }

    fn port_name(&self, index: usize, name: NameOf) -> Result<String, OrtError> {
        let what = "name of a port";
        let api = self.ort.api;
        let (mut allocator, mut text) = (null_mut(), null_mut());
        // SAFETY: the place for the result is ours; the default allocator is never freed.
        self.ort.check(what, unsafe { (api.GetAllocatorWithDefaultOptions)(&raw mut allocator) })?;
        // SAFETY: session and allocator are alive, the index is below the count, the place for the result is ours.
        self.ort.check(what, unsafe { name(self.session.as_ptr(), index, allocator, &raw mut text) })?;
        // SAFETY: a terminated string from this allocator, freed once after it was copied.
        unsafe {
            let copy = super::library::text_of(text);
            self.ort.check(what, (api.AllocatorFree)(allocator, text.cast()))?;
            Ok(copy)
        }
    }
}

type CountOf = unsafe extern "system" fn(*const OrtSession, *mut usize) -> OrtStatusPtr;
type NameOf = unsafe extern "system" fn(
    *const OrtSession,
    usize,
    *mut ort_sys::OrtAllocator,
    *mut *mut c_char,
) -> OrtStatusPtr;
type TypeOf = unsafe extern "system" fn(*const OrtSession, usize, *mut *mut OrtTypeInfo) -> OrtStatusPtr;

struct TypeInfo {
    api: &'static OrtApi,
    info: NonNull<OrtTypeInfo>,
}

impl Drop for TypeInfo {
    fn drop(&mut self) {
        // SAFETY: given to us by the session, and released once.
        unsafe { (self.api.ReleaseTypeInfo)(self.info.as_ptr()) }
    }
}

/// Element type, and dimensions where they are known.
type Shape = (Element, Option<Vec<Dim>>);

impl TypeInfo {
    fn tensor(&self, ort: &Ort) -> Result<Option<Shape>, OrtError> {
        let what = "type of a port";
        let mut info = std::ptr::null();
        // SAFETY: the info is alive; the result is borrowed from it, and null when it is no tensor.
        ort.check(what, unsafe { (self.api.CastTypeInfoToTensorInfo)(self.info.as_ptr(), &raw mut info) })?;
        if info.is_null() {
            return Ok(None);
        }
        let (mut number, mut rank) = (0_i32, 0);
        // SAFETY: the info is alive. The type is read as the number that it is in C, because a newer library may
        // have types that the enumeration does not know.
        ort.check(what, unsafe {
            (self.api.GetTensorElementType)(info, (&raw mut number).cast::<ONNXTensorElementDataType>())
        })?;
        // SAFETY: the info is alive, and the place for the result is ours.
        ort.check(what, unsafe { (self.api.GetDimensionsCount)(info, &raw mut rank) })?;
        let mut dims = vec![0_i64; rank];
        // SAFETY: as above, with room for `rank` numbers.
        ort.check(what, unsafe { (self.api.GetDimensions)(info, dims.as_mut_ptr(), rank) })?;
        // Negative means free. That there are none can also mean that their number is unknown.
        let dim = |dim: &i64| u64::try_from(*dim).map_or(Dim::Free, Dim::Fixed);
        let dims = (rank > 0).then(|| dims.iter().map(dim).collect());
        Ok(Element::from_number(number).map(|element| (element, dims)))
    }
}

/// Options of a session in the making.
struct Options<'a> {
    ort: &'a Ort,
    options: NonNull<OrtSessionOptions>,
}

impl Drop for Options<'_> {
    fn drop(&mut self) {
        // SAFETY: made by CreateSessionOptions, and released once.
        unsafe { (self.ort.api.ReleaseSessionOptions)(self.options.as_ptr()) }
    }
}

impl<'a> Options<'a> {
    fn new(ort: &'a Ort) -> Result<Self, OrtError> {
        let what = "options of a session";
        let mut options = null_mut();
        // SAFETY: the place for the result is ours.
        ort.check(what, unsafe { (ort.api.CreateSessionOptions)(&raw mut options) })?;
        Ok(Self { ort, options: made(what, options)? })
    }

    fn tune(&self, setup: &SessionSetup) -> Result<(), OrtError> {
        let (api, options) = (self.ort.api, self.options.as_ptr());
        let all = GraphOptimizationLevel::ORT_ENABLE_ALL;
        // SAFETY: the options are alive, here and in the two calls after.
        let status = unsafe { (api.SetIntraOpNumThreads)(options, i32::from(setup.threads.max(1))) };
        self.ort.check("number of threads", status)?;
        // SAFETY: as above.
        self.ort.check("number of parallel operations", unsafe { (api.SetInterOpNumThreads)(options, 1) })?;
        // SAFETY: as above.
        let status = unsafe { (api.SetSessionGraphOptimizationLevel)(options, all) };
        self.ort.check("level of optimisation", status)?;
        // Container and host share the cores: a thread that spins takes them from the container.
        for key in [c"session.intra_op.allow_spinning", c"session.inter_op.allow_spinning"] {
            // SAFETY: as above, and both strings are terminated.
            let status = unsafe { (api.AddSessionConfigEntry)(options, key.as_ptr(), c"0".as_ptr()) };
            self.ort.check("spinning of threads", status)?;
        }
        Ok(())
    }

    fn add_provider(&self, setup: &SessionSetup) -> Result<(), OrtError> {
        let provider = setup.provider.provider;
        self.ort.require(provider)?;
        let merged = Pairs::new(&setup.provider.merged(setup.threads, setup.cache_dir.as_deref()))?;
        match provider.entry() {
            Entry::None => Ok(()),
            Entry::Named(name) => self.add_named(name, &merged),
            Entry::Cuda => self.add_cuda(&merged),
            Entry::TensorRt => self.add_tensorrt(&merged),
        }
    }

    fn add_named(&self, name: &'static str, pairs: &Pairs) -> Result<(), OrtError> {
        let name = c_text("provider", name)?;
        let (keys, values) = pairs.pointers();
        // SAFETY: the options are alive; the arrays hold as many terminated strings as is said, all alive.
        let status = unsafe {
            (self.ort.api.SessionOptionsAppendExecutionProvider)(
                self.options.as_ptr(),
                name.as_ptr(),
                keys.as_ptr(),
                values.as_ptr(),
                keys.len(),
            )
        };
        self.ort.check("the provider cannot be used", status)
    }

    fn add_cuda(&self, pairs: &Pairs) -> Result<(), OrtError> {
        let (api, what) = (self.ort.api, "CUDA cannot be used");
        let (keys, values) = pairs.pointers();
        let mut cuda = null_mut();
        // SAFETY: the place for the result is ours.
        self.ort.check(what, unsafe { (api.CreateCUDAProviderOptions)(&raw mut cuda) })?;
        let cuda = made(what, cuda)?;
        // SAFETY: all options are alive; the arrays hold as many terminated strings as is said, all alive; CUDA's
        // options are released once, after the last use.
        let (set, added) = unsafe {
            let (keys, values, count) = (keys.as_ptr(), values.as_ptr(), keys.len());
            let set =
                self.ort.check(what, (api.UpdateCUDAProviderOptions)(cuda.as_ptr(), keys, values, count));
            let add = api.SessionOptionsAppendExecutionProvider_CUDA_V2;
            let added = self.ort.check(what, add(self.options.as_ptr(), cuda.as_ptr()));
            (api.ReleaseCUDAProviderOptions)(cuda.as_ptr());
            (set, added)
        };
        set.and(added)
    }

    fn add_tensorrt(&self, pairs: &Pairs) -> Result<(), OrtError> {
        let (api, what) = (self.ort.api, "TensorRT cannot be used");
        let (keys, values) = pairs.pointers();
        let mut trt = null_mut();
        // SAFETY: the place for the result is ours.
        self.ort.check(what, unsafe { (api.CreateTensorRTProviderOptions)(&raw mut trt) })?;
        let trt = made(what, trt)?;
        // SAFETY: as for CUDA.
        let (set, added) = unsafe {
            let (keys, values, count) = (keys.as_ptr(), values.as_ptr(), keys.len());
            let set =
                self.ort.check(what, (api.UpdateTensorRTProviderOptions)(trt.as_ptr(), keys, values, count));
            let add = api.SessionOptionsAppendExecutionProvider_TensorRT_V2;
            let added = self.ort.check(what, add(self.options.as_ptr(), trt.as_ptr()));
            (api.ReleaseTensorRTProviderOptions)(trt.as_ptr());
            (set, added)
        };
        set.and(added)
    }

    fn add_weights(&self, weights: &[u8]) -> Result<(), OrtError> {
        if weights.is_empty() {
            return Ok(());
        }
        let name = c_text("location", WEIGHTS_LOCATION)?;
        let names = [name.as_ptr()];
        let buffers = [weights.as_ptr().cast_mut().cast::<c_char>()];
        let lengths = [weights.len()];
        // SAFETY: the options are alive and the arrays have one entry each. ONNX Runtime copies what it needs of the
        // bytes while the session is made, and writes none; the caller keeps them until then.
        let status = unsafe {
            (self.ort.api.AddExternalInitializersFromMemory)(
                self.options.as_ptr(),
                names.as_ptr(),
                buffers.as_ptr(),
                lengths.as_ptr(),
                1,
            )
        };
        self.ort.check("weights of the model", status)
    }
}

/// Keys and values for C.
struct Pairs(Vec<(CString, CString)>);

impl Pairs {
    fn new(options: &BTreeMap<String, String>) -> Result<Self, OrtError> {
        let pair = |(key, value): (&String, &String)| {
            Ok((c_text("option", key)?, c_text("value of option", value)?))
        };
        options.iter().map(pair).collect::<Result<_, _>>().map(Self)
    }

    fn pointers(&self) -> (Vec<*const c_char>, Vec<*const c_char>) {
        self.0.iter().map(|(key, value)| (key.as_ptr(), value.as_ptr())).unzip()
    }
}
