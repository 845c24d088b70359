// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel of one operator overload: what torch's dispatcher calls for every operator on the device.
//!
//! ```text
//!              key known                       numbers for new tensors
//!  arguments ─────────────► plan ─► new tensors ─► CALL on the stream ─► results      nothing waits
//!      │ no key, or no plan
//!      └───────► miss(index, args, kwargs, cacheable) ─► (result, plan or None)       Python; may wait
//! ```
//!
//! New tensors are made before the CALL is written, because making them may run Python code (the garbage collector's), and
//! so another call of a kernel.
#![allow(unsafe_code)]

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::call::{Call, Definition, answer};
use crate::core::{Core, Memory, STREAM, core};
use crate::guarded::Guarded;
use crate::key::Reader;
use crate::plan::{Output, Plan, Shape};
use crate::python::{Gil, Kind, Object, Owned, Raised};
use crate::stream::is_child;

/// One operator overload.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// How `miss` knows it.
    index: u64,
    dynamic_positions: Vec<bool>,
    dynamic_keywords: Vec<Vec<u8>>,
    never_cache: bool,
    lazy: bool,
    plans: Guarded<FxHashMap<Box<[u8]>, Arc<Plan>>>,
}

static DEFINITION: Definition = Definition::fast(c"kernel", call_kernel);

/// Makes a kernel: `kernel(index, dynamic_positions, dynamic_keywords, never_cache, lazy) -> callable`.
pub(crate) fn make<'a>(gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
    let index = u64::try_from(call.required(0, "index")?.as_integer()?)
        .map_err(|_| gil.raise(Kind::Value, "kernel(): index is negative"))?;
    let mut dynamic_keywords = Vec::new();
    for name in call.required(2, "dynamic_keywords")?.items()? {
        dynamic_keywords.push(name.object().as_text()?.to_vec());
    }
    let dynamic_positions = call.required(1, "dynamic_positions")?.items()?;
    let kernel: &'static Kernel = Box::leak(Box::new(Kernel {
        index,
        dynamic_positions: dynamic_positions.iter().map(|item| item.object().is_true()).collect(),
        dynamic_keywords,
        never_cache: call.required(3, "never_cache")?.is_true(),
        lazy: call.optional(4, "lazy").is_some_and(Object::is_true),
        plans: Guarded::default(),
    }));
    core(gil)?.kernels.with(gil, |kernels| kernels.push(kernel));
    let bound = gil.pointer_to(kernel)?;
    gil.function(&DEFINITION, bound.object())
}

unsafe extern "C" fn call_kernel(
    bound: *mut pyo3_ffi::PyObject,
    arguments: *const *mut pyo3_ffi::PyObject,
    count: pyo3_ffi::Py_ssize_t,
    names: *mut pyo3_ffi::PyObject,
) -> *mut pyo3_ffi::PyObject {
    // SAFETY: Python calls its functions with the lock held, and with arguments as the vectorcall protocol says; what the
    // function is bound to was made by `make`, which leaked the kernel.
    unsafe {
        answer(|gil| {
            let kernel: &'static Kernel = gil.pointed_to(bound)?;
            kernel.call(gil, &Call::new(gil, arguments, count, names))
        })
    }
}

impl Kernel {
    /// Forgets what was learned.
    pub(crate) fn forget_plans(&self, gil: Gil<'_>) {
        self.plans.with(gil, FxHashMap::clear);
    }

    fn call<'a>(&self, gil: Gil<'a>, call: &Call<'a>) -> Result<Owned<'a>, Raised> {
        let core = core(gil)?;
        // Taken out, so that a kernel called meanwhile has its own.
        let mut memory = core.scratch.with(gil, std::mem::take);
        let result = self.call_with(gil, core, call, &mut memory);
        core.scratch.with(gil, |place| *place = memory);
        let result = result?;
        if let Some(sync_call) = core.sync_call {
            sync_call.object(gil).call(&[])?;
        }
        Ok(result)
    }

    fn call_with<'a>(
        &self,
        gil: Gil<'a>,
        core: &'static Core,
        call: &Call<'a>,
        memory: &mut Memory,
    ) -> Result<Owned<'a>, Raised> {
        memory.written.clear();
        memory.numbers.clear();
        let cacheable = !self.never_cache && self.encode(core, call, memory);
        let plan = if cacheable {
            self.plans.with(gil, |plans| plans.get(memory.written.key.as_slice()).cloned())
        } else {
            None
        };
        match plan {
            Some(plan) => run(gil, core, call, &plan, memory),
            None => self.miss(gil, core, call, cacheable.then_some(memory.written.key.as_slice())),
        }
    }

    /// Writes key and slots; false when the call has no key.
    fn encode(&self, core: &'static Core, call: &Call<'_>, memory: &mut Memory) -> bool {
        let reader = Reader { known: &core.known, shims: &core.shims, lazy: self.lazy };
        let mut dynamic = self.dynamic_positions.iter().copied().chain(std::iter::repeat(false));
        if !call
            .positional()
            .all(|argument| reader.read(&mut memory.written, argument, dynamic.next() == Some(true)))
        {
            return false;
        }
        call.keywords().all(|(name, argument)| {
            let Ok(name) = name.as_text() else {
                name.gil().forget_error();
                return false;
            };
            reader.keyword(&mut memory.written, name);
            reader.read(
                &mut memory.written,
                argument,
                self.dynamic_keywords.iter().any(|dynamic| dynamic == name),
            )
        })
    }

    /// Python decides; the key is None for a call that has none.
    fn miss<'a>(
        &self,
        gil: Gil<'a>,
        core: &'static Core,
        call: &Call<'a>,
        key: Option<&[u8]>,
    ) -> Result<Owned<'a>, Raised> {
        let index = gil.integer(self.index)?;
        let positional = gil.tuple(call.positional().map(Object::owned).collect::<Vec<_>>().into_iter())?;
        let keywords = gil.dict()?;
        let mut names = Vec::new();
        for (name, argument) in call.keywords() {
            keywords.object().set_entry(name, argument)?;
            names.push(name.as_text()?);
        }
        let answer = core.miss.object(gil).call(&[
            index.object(),
            positional.object(),
            keywords.object(),
            gil.boolean(key.is_some()),
        ])?;
        let refuse = || gil.raise(Kind::Type, "lighter_mps: miss() gives a result and a plan or None");
        let (result, plan) = (answer.object().item(0), answer.object().item(1));
        let (Some(result), Some(plan)) = (result, plan) else { return Err(refuse()) };
        if let Some(key) = key.filter(|_| !plan.object().is_none()) {
            let plan = Arc::new(Plan::read(plan.object(), call.positional_count(), &names)?);
            self.plans.with(gil, |plans| plans.insert(key.into(), plan));
        }
        Ok(result.in_gil(gil))
    }
}

/// A call whose signature the host has.
fn run<'a>(
    gil: Gil<'a>,
    core: &'static Core,
    call: &Call<'a>,
    plan: &Plan,
    memory: &mut Memory,
) -> Result<Owned<'a>, Raised> {
    let Memory { written, numbers } = memory;
    if plan.new_tensors > 0 && !STREAM.take_numbers(plan.new_tensors, plan.new_bytes, numbers) {
        return Err(no_number(gil));
    }
    let mut making = Making { gil, core, call, numbers: numbers.iter(), tried: 0 };
    let result = making.result(plan);
    let tried = making.tried;
    let result = match result {
        Ok(result) => result,
        Err(raised) => {
            STREAM.take_back(numbers, tried);
            return Err(raised);
        }
    };
    if STREAM.call(plan.signature, &written.slots, numbers) {
        core.flush_when_due(gil)?;
    }
    Ok(result)
}

/// Says why there is no number for a new tensor.
pub(crate) fn no_number(gil: Gil<'_>) -> Raised {
    let why = if is_child() {
        "mps tensors cannot be used in a forked child process; use the start method 'spawn'"
    } else {
        "too many storages are alive on the device"
    };
    gil.raise(Kind::Runtime, &format!("lighter-mps: {why}"))
}

/// Results on their way.
struct Making<'c, 'a> {
    gil: Gil<'a>,
    core: &'static Core,
    call: &'c Call<'a>,
    numbers: std::slice::Iter<'c, crate::numbers::Number>,
    tried: usize,
}

impl<'a> Making<'_, 'a> {
    fn result(&mut self, plan: &Plan) -> Result<Owned<'a>, Raised> {
        match (plan.shape, plan.outputs.as_slice()) {
            (Shape::Single, [output]) => self.output(output),
            (Shape::Tuple, outputs) => {
                let outputs = self.outputs(outputs)?;
                self.gil.tuple(outputs.into_iter())
            }
            (Shape::List, outputs) => {
                let outputs = self.outputs(outputs)?;
                self.gil.list(outputs.into_iter())
            }
            (Shape::Single | Shape::Void, _) => Ok(self.gil.none()),
        }
    }

    fn outputs(&mut self, outputs: &[Output]) -> Result<Vec<Owned<'a>>, Raised> {
        outputs.iter().map(|output| self.output(output)).collect()
    }

    fn output(&mut self, output: &Output) -> Result<Owned<'a>, Raised> {
        let missing = || self.gil.raise(Kind::Runtime, "lighter_mps: a plan does not fit its call");
        match output {
            Output::Argument(index) => self.call.argument(*index).map(Object::owned).ok_or_else(missing),
            Output::None => Ok(self.gil.none()),
            Output::New(layout) => {
                let number = *self.numbers.next().ok_or_else(missing)?;
                self.tried = self.tried.saturating_add(1);
                let Core { maker, shims, .. } = self.core;
                maker.make(self.gil, shims, number, &layout.sizes, &layout.strides, layout.dtype)
            }
        }
    }
}
