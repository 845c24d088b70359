// SPDX-License-Identifier: MIT OR Apache-2.0
//! The provider of one session: claims nodes, hands models to the host, runs them.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::ffi::CString;
use alloc::format;
use alloc::string::String;
use core::ffi::{c_char, c_void};
use core::ptr::null_mut;
use core::sync::atomic::Ordering;

use ort_sys::{OrtGraph, OrtKernelContext, OrtNode, OrtSessionOptions, OrtStatus};

use crate::claim::{Rules, claim};
use crate::compiled::{Compiled, RunError};
use crate::factory::{NAME, OwnFactory};
use crate::host::{Connection, Host};
use crate::log;
use crate::model::{self, ModelError};
use crate::ort::context::Context;
use crate::ort::graph::{Graph, Node};
use crate::ort::options::option;
use crate::ort::tables::{
    Ep, FusionOptions, GraphSupportInfo, NodeComputeContext, NodeComputeInfo, Returned, TABLES_VERSION,
};
use crate::ort::{Ort, Status};
use crate::package::pack;
use crate::settings::Settings;
use crate::sys::read_file;

/// More than a process's variables can be.
const MAX_ENVIRONMENT_BYTES: usize = 4 << 20;

/// The table, and what is behind it.
#[repr(C)]
pub(crate) struct Provider {
    table: Ep,
    ort: Ort,
    settings: Settings,
    host: Host,
    /// `None` when the service does not answer: then nothing is claimed.
    rules: Option<Rules>,
    /// The connection that was opened to ask, until the first model takes it.
    connection: Option<Connection>,
    /// What people call the session's model.
    label: String,
}

/// A compiled node: the table, and what is behind it.
#[repr(C)]
struct Computation {
    table: NodeComputeInfo,
    compiled: Compiled,
}

impl Provider {
    /// A provider for the runtime, which gives it back by [`release`].
    ///
    /// # Safety
    /// Options that the runtime has passed in, during its call.
    pub(crate) unsafe fn make(
        factory: &OwnFactory,
        options: *const OrtSessionOptions,
    ) -> Result<*mut Ep, *mut OrtStatus> {
        let ort = factory.ort;
        let environment = read_file(c"/proc/self/environ", MAX_ENVIRONMENT_BYTES).unwrap_or_default();
        // SAFETY: the caller's promise.
        let settings = Settings::read(|name| unsafe { option(ort, options, name) }, &environment);
        let settings = settings.map_err(|error| fail(ort, &error))?;
        let host = Host::of(&settings, ort.version());
        let connection = Connection::open(&host);
        let rules = connection.as_ref().ok().map(|connection| Rules {
            is_host_different: connection.host().ort != Some(ort.version()),
            min_work: settings.min_work,
        });
        if let Err(trouble) = &connection
            && !factory.has_said_away.swap(true, Ordering::Relaxed)
        {
            let socket = &host.socket;
            log::line(format_args!(
                "the device's service at {socket} does not answer ({trouble}): models run on the container's own processor"
            ));
        }
        let table =
            Ep { version: TABLES_VERSION, name, capability, compile, release_compiled, absent: [None; 8] };
        let provider =
            Self { table, ort, settings, host, rules, connection: connection.ok(), label: String::new() };
        Ok(Box::into_raw(Box::new(provider)).cast())
    }

    /// Says to the runtime which nodes are to become one.
    ///
    /// # Safety
    /// A graph and a place for the answer that the runtime has passed in, during its call.
    unsafe fn support(&mut self, graph: *const OrtGraph, info: *mut GraphSupportInfo) -> Result<(), Status> {
        // SAFETY: the caller's promise.
        let Some((rules, graph)) = self.rules.zip(unsafe { Graph::new(self.ort, graph) }) else {
            return Ok(());
        };
        let claim = claim(&graph, rules)?;
        if claim.nodes > 0 {
            self.label = model::label(&graph)?;
        }
        let options = FusionOptions { version: TABLES_VERSION, drop_constant_initializers: true };
        let mut claimed = 0;
        for group in &claim.groups {
            claimed += group.len();
            let nodes: alloc::vec::Vec<*const OrtNode> = group.iter().map(Node::raw).collect();
            // SAFETY: the caller's promise; nodes of this graph.
            let status = unsafe {
                (self.ort.ep().add_nodes_to_fuse)(info, nodes.as_ptr(), nodes.len(), &raw const options)
            };
            self.ort.check(ort_sys::OrtStatusPtr(status))?;
        }
        if self.settings.is_reported && claim.nodes > 0 {
            let (of, groups, label) = (claim.nodes, claim.groups.len(), &self.label);
            log::line(format_args!("{label}: {claimed} of {of} nodes in {groups} groups go to the host"));
        }
        Ok(())
    }

    /// # Safety
    /// A graph and its node that the runtime has passed in, during its call.
    unsafe fn compile(
        &mut self,
        graph: *const OrtGraph,
        fused: *const OrtNode,
    ) -> Result<*mut NodeComputeInfo, *mut OrtStatus> {
        let ort = self.ort;
        // SAFETY: the caller's promise.
        let (graph, fused) = unsafe { (Graph::new(ort, graph), Node::new(ort, fused)) };
        let Some((graph, fused)) = graph.zip(fused) else { return Err(fail(ort, "a graph without a node")) };
        let error = |error: ModelError| match error {
            ModelError::Ort(status) => status.into_raw(),
            ModelError::Unwritable(what) => {
                fail(ort, &format!("the graph cannot be sent to the host: {what}"))
            }
        };
        let constants = model::constants(&graph, &fused).map_err(error)?;
        let written = model::write(&graph, &fused, &constants).map_err(error)?;
        let package = pack(written, self.label.clone())
            .map_err(|errno| fail(ort, &format!("no memory to hand the model over: {errno}")))?;
        drop(constants);
        let compiled = Compiled::new(ort, self.host.clone(), package, self.connection.take());
        let table = NodeComputeInfo { version: TABLES_VERSION, create_state, compute, release_state };
        Ok(Box::into_raw(Box::new(Computation { table, compiled })).cast())
    }
}

/// An error in this library's words.
fn fail(ort: Ort, text: &str) -> *mut OrtStatus {
    let text: String = text.chars().filter(|char| *char != '\0').collect();
    let text = CString::new(format!("lighter-ane: {text}")).unwrap_or_default();
    ort.fail(&text)
}

/// # Safety
/// A provider from [`Provider::make`] that nobody uses any more.
pub(crate) unsafe fn release(ep: *mut Ep) {
    if !ep.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(ep.cast::<Provider>()) });
    }
}

unsafe extern "C" fn name(_: *const Ep) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn capability(
    ep: *mut Ep,
    graph: *const OrtGraph,
    info: *mut GraphSupportInfo,
) -> Returned {
    // SAFETY: the runtime's call: a provider of this library's, a graph and a place for the answer.
    let result = unsafe { (*ep.cast::<Provider>()).support(graph, info) };
    result.map_or_else(Status::into_raw, |()| null_mut())
}

unsafe extern "C" fn compile(
    ep: *mut Ep,
    graphs: *const *const OrtGraph,
    fused: *const *const OrtNode,
    count: usize,
    computations: *mut *mut NodeComputeInfo,
    _: *mut *mut OrtNode,
) -> Returned {
    // SAFETY: the runtime's call: a provider of this library's, as many graphs, nodes and places as it says. Places that
    // stay null are not given back.
    unsafe {
        for index in 0..count {
            computations.add(index).write(null_mut());
        }
        for index in 0..count {
            match (*ep.cast::<Provider>()).compile(*graphs.add(index), *fused.add(index)) {
                Ok(computation) => computations.add(index).write(computation),
                Err(status) => return status,
            }
        }
    }
    null_mut()
}

unsafe extern "C" fn release_compiled(ep: *mut Ep, computations: *mut *mut NodeComputeInfo, count: usize) {
    // SAFETY: the runtime's call: a provider of this library's, and as many computations as it says, each from `compile`
    // or null.
    unsafe {
        for index in 0..count {
            let computation = *computations.add(index);
            if computation.is_null() {
                continue;
            }
            let computation = Box::from_raw(computation.cast::<Computation>());
            if (*ep.cast::<Provider>()).settings.is_reported {
                let compiled = &computation.compiled;
                log::line(format_args!("{}: {}", compiled.label(), compiled.runs()));
            }
        }
    }
}

unsafe extern "C" fn create_state(
    computation: *mut NodeComputeInfo,
    _: *mut NodeComputeContext,
    state: *mut *mut c_void,
) -> Returned {
    // SAFETY: the runtime's call: a place for the answer. All state is the computation's own.
    unsafe { state.write(computation.cast()) };
    null_mut()
}

unsafe extern "C" fn release_state(_: *mut NodeComputeInfo, _: *mut c_void) {}

unsafe extern "C" fn compute(
    computation: *mut NodeComputeInfo,
    _: *mut c_void,
    context: *mut OrtKernelContext,
) -> Returned {
    // SAFETY: the runtime's call: a computation of this library's, which several threads may run, and a run.
    unsafe {
        let compiled = &(*computation.cast::<Computation>()).compiled;
        let ort = compiled.ort();
        let Some(context) = Context::new(ort, context) else { return fail(ort, "a run without a context") };
        match compiled.run(&context) {
            Ok(()) => null_mut(),
            Err(RunError::Ort(status)) => status.into_raw(),
            Err(RunError::Text(text)) => fail(ort, &text),
        }
    }
}
