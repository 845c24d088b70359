// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs, made of descriptions that the worker has checked.
//!
//! The worker promises that each node passed its operation's shape rule; this file promises that indices,
//! places and pointers are valid.
#![allow(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;

use super::backend::Device;
use super::library::Ggml;
use super::memory::{Memory, MemoryError};
use super::raw::{InitParams, Opaque, Tensor};
use crate::metal::rpc::{MAX_PARAMS, MAX_SOURCES};

/// ggml's flag of a node that is to be computed.
const COMPUTE: i32 = 16;
/// Bytes that ggml may need besides tensors and graph.
const SPARE_BYTES: usize = 64 << 10;

/// Why a graph could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// ggml has no memory for it.
    #[error("no memory for a graph of {tensors} tensors")]
    Memory {
        /// Its tensors.
        tensors: usize,
    },
    /// An index that no tensor has.
    #[error("tensor {index} of {tensors} does not exist")]
    Index {
        /// The index.
        index: usize,
        /// Tensors there are.
        tensors: usize,
    },
    /// A place outside its memory.
    #[error(transparent)]
    Place(#[from] MemoryError),
}

/// Where a tensor's content lies.
#[derive(Debug, Clone)]
pub struct Place {
    /// In which memory.
    pub memory: Rc<Memory>,
    /// From which byte.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// One tensor, in the engine's own numbers.
#[derive(Debug, Clone)]
pub struct NodeSpec {
    /// Its type.
    pub kind: i32,
    /// Elements in each dimension.
    pub ne: [u32; 4],
    /// Strides in bytes.
    pub nb: [u32; 4],
    /// The operation, 0 for a tensor that is there already.
    pub op: i32,
    /// The operation's parameters.
    pub params: [i32; MAX_PARAMS],
    /// ggml's flags.
    pub flags: i32,
    /// Its name.
    pub name: [u8; 64],
    /// Where its content lies; `None` for one that has none.
    pub place: Option<Place>,
}

/// Makes a graph.
#[derive(Debug)]
pub struct Builder {
    ggml: Arc<Ggml>,
    context: Opaque,
    tensors: Vec<*mut Tensor>,
    flags: Vec<i32>,
    memories: Vec<Rc<Memory>>,
    spare_tensors: usize,
    graph_nodes: usize,
    bytes: usize,
}

impl Builder {
    /// Room for `tensors` tensors of which `nodes` are computed.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(ggml: &Arc<Ggml>, tensors: usize, nodes: usize) -> Result<Self, GraphError> {
        let f = &ggml.f;
        // Every node may need one more tensor, which keeps it from being fused away.
        let graph_nodes = 2 * tensors.max(nodes) + 16;
        let error = || GraphError::Memory { tensors };
        let room = tensors.checked_add(nodes).and_then(|count| count.checked_add(4)).ok_or_else(error)?;
        // SAFETY: no preconditions.
        let (each, graph) =
            unsafe { ((f.ggml_tensor_overhead)(), (f.ggml_graph_overhead_custom)(graph_nodes, false)) };
        let bytes = each
            .checked_mul(room)
            .and_then(|bytes| bytes.checked_add(graph)?.checked_add(SPARE_BYTES))
            .ok_or_else(error)?;
        let params = InitParams { mem_size: bytes, mem_buffer: std::ptr::null_mut(), no_alloc: true };
        // SAFETY: ggml allocates the memory itself.
        let context = unsafe { (f.ggml_init)(params) };
        if context.is_null() {
            return Err(error());
        }
        Ok(Self {
            ggml: Arc::clone(ggml),
            context,
            tensors: Vec::with_capacity(tensors),
            flags: Vec::with_capacity(tensors),
            memories: Vec::new(),
            spare_tensors: room,
            graph_nodes,
            bytes,
        })
    }

    fn blank(&mut self) -> Result<&'static mut Tensor, GraphError> {
        let error = GraphError::Memory { tensors: self.tensors.len() };
        self.spare_tensors = self.spare_tensors.checked_sub(1).ok_or(error)?;
        // One element: ggml asserts on sizes that it finds absurd, so the real ones are written after.
        // SAFETY: the context has room, as just counted; the tensor lives as long as the context, and only
        // this builder and then its graph use it.
        unsafe { (self.ggml.f.ggml_new_tensor_4d)(self.context, 0, 1, 1, 1, 1).as_mut() }
            .ok_or(GraphError::Memory { tensors: self.tensors.len() })
    }

    /// Adds a tensor; its index is how many were added before.
    ///
    /// # Errors
    /// When its place is not within its memory.
    pub fn add(&mut self, spec: &NodeSpec) -> Result<(), GraphError> {
        let place = match &spec.place {
            Some(place) => Some((place.memory.buffer(), place.memory.address(place.offset, place.bytes)?)),
            None => None,
        };
        if let Some(place) = &spec.place
            && !self.memories.iter().any(|memory| Rc::ptr_eq(memory, &place.memory))
        {
            self.memories.push(Rc::clone(&place.memory));
        }
        let tensor = self.blank()?;
        tensor.kind = spec.kind;
        tensor.ne = spec.ne.map(i64::from);
        tensor.nb = spec.nb.map(|stride| stride as usize);
        tensor.op = spec.op;
        tensor.params = spec.params;
        tensor.name = spec.name;
        if let Some(last) = tensor.name.last_mut() {
            *last = 0;
        }
        if let Some((buffer, data)) = place {
            tensor.buffer = buffer;
            tensor.data = data;
        }
        self.tensors.push(tensor);
        self.flags.push(spec.flags);
        Ok(())
    }

    fn at(&self, index: usize) -> Result<*mut Tensor, GraphError> {
        let tensors = self.tensors.len();
        self.tensors.get(index).copied().ok_or(GraphError::Index { index, tensors })
    }

    /// Makes one tensor the input of another.
    ///
    /// # Errors
    /// When one of them does not exist.
    pub fn link(&mut self, index: usize, slot: usize, source: usize) -> Result<(), GraphError> {
        let (tensor, source) = (self.at(index)?, self.at(source)?);
        // SAFETY: both live in the context.
        let sources: &mut [*mut Tensor; MAX_SOURCES] = unsafe { &mut (*tensor).src };
        *sources.get_mut(slot).ok_or(GraphError::Index { index: slot, tensors: MAX_SOURCES })? = source;
        Ok(())
    }

    /// Says whose memory a tensor looks into, and where it begins there.
    ///
    /// # Errors
    /// When one of them does not exist.
    pub fn link_view(&mut self, index: usize, of: usize, offset: u64) -> Result<(), GraphError> {
        let (tensor, of) = (self.at(index)?, self.at(of)?);
        // SAFETY: both live in the context.
        unsafe {
            (*tensor).view_src = of;
            (*tensor).view_offset = usize::try_from(offset).unwrap_or(usize::MAX);
        }
        Ok(())
    }

    /// Whether a device computes this node.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn supported(&self, device: &Device, index: usize) -> Result<bool, GraphError> {
        let tensor = self.at(index)?;
        // SAFETY: the node passed its shape rule, so it has the inputs that the device looks at.
        Ok(unsafe { (device.ggml.f.ggml_backend_dev_supports_op)(device.raw, tensor) })
    }

    /// Ends the making: `order` are the nodes to compute, each with whether something outside uses it too, so
    /// that it must not be fused away. `view_op` is the engine's number of VIEW.
    ///
    /// # Errors
    /// When a node does not exist or there is no memory.
    pub fn finish(mut self, order: &[(usize, bool)], view_op: i32) -> Result<Graph, GraphError> {
        let f = &self.ggml.f;
        // SAFETY: the context has room for a graph of this size.
        let graph = unsafe { (f.ggml_new_graph_custom)(self.context, self.graph_nodes, false) };
        if graph.is_null() {
            return Err(GraphError::Memory { tensors: self.tensors.len() });
        }
        let expand = f.ggml_build_forward_expand;
        for (index, _) in order {
            let tensor = self.at(*index)?;
            // SAFETY: inputs come before, so nothing is visited deeper than one step, and the graph has room
            // for all tensors.
            unsafe { expand(graph, tensor) }
        }
        for (index, used_outside) in order {
            if !used_outside {
                continue;
            }
            let of: *mut Tensor = self.at(*index)?;
            let user = self.blank()?;
            // SAFETY: both live in the context; `user` is another tensor than `of`.
            unsafe {
                user.kind = (*of).kind;
                user.ne = (*of).ne;
                user.nb = (*of).nb;
                user.op = view_op;
                user.src[0] = of;
                user.view_src = if (*of).view_src.is_null() { of } else { (*of).view_src };
                user.buffer = (*of).buffer;
                user.data = (*of).data;
                expand(graph, user);
                // Without the flag it is counted as a user and not computed.
                user.flags = 0;
            }
        }
        // Expanding marks all as to be computed; what the client said holds.
        for (tensor, flags) in self.tensors.iter().zip(&self.flags) {
            // SAFETY: lives in the context.
            unsafe { (**tensor).flags = *flags }
        }
        Ok(Graph {
            nodes: order.len(),
            graph,
            bytes: self.bytes,
            memories: std::mem::take(&mut self.memories),
            context: Context {
                ggml: Arc::clone(&self.ggml),
                raw: std::mem::replace(&mut self.context, std::ptr::null_mut()),
            },
        })
    }

    /// ggml's flag of a node that is to be computed.
    #[must_use]
    pub fn compute_flag() -> i32 {
        COMPUTE
    }

    /// Bytes that a tensor takes in the device's memory; its own size where ggml does not say.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn device_bytes(&self, device: &Device, index: usize) -> Result<Option<u64>, GraphError> {
        let tensor = self.at(index)?;
        // SAFETY: the tensor passed its shape rule or has no operation; the buffer type is the device's.
        Ok(self
            .ggml
            .f
            .ggml_backend_buft_get_alloc_size
            .map(|size| unsafe { size(device.buffer_type(), tensor) as u64 }))
    }

    /// Lets the device prepare a tensor in its place. False when it wants to keep notes on the tensor, which
    /// would not outlive this call.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn prepare(&mut self, index: usize) -> Result<bool, GraphError> {
        let tensor = self.at(index)?;
        // SAFETY: lives in the context; a buffer that it has is valid, and it lies within.
        unsafe {
            if (*tensor).buffer.is_null() {
                return Ok(true);
            }
            let status = (self.ggml.f.ggml_backend_buffer_init_tensor)((*tensor).buffer, tensor);
            Ok(status == 0 && (*tensor).extra.is_null())
        }
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: valid, and not used after.
            unsafe { (self.ggml.f.ggml_free)(self.context) }
        }
    }
}

#[derive(Debug)]
struct Context {
    ggml: Arc<Ggml>,
    raw: Opaque,
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: valid, and not used after.
        unsafe { (self.ggml.f.ggml_free)(self.raw) }
    }
}

/// A graph that can be computed again and again. It keeps the memory alive that its tensors lie in.
#[derive(Debug)]
pub struct Graph {
    graph: Opaque,
    nodes: usize,
    bytes: usize,
    // Before the memories: tensors go before what they lie in.
    #[expect(dead_code, reason = "owns the tensors")]
    context: Context,
    memories: Vec<Rc<Memory>>,
}

impl Graph {
    pub(super) fn raw(&mut self) -> Opaque {
        self.graph
    }

    /// How many nodes it computes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether one of its tensors lies in this memory.
    #[must_use]
    pub fn uses(&self, memory: &Rc<Memory>) -> bool {
        self.memories.iter().any(|other| Rc::ptr_eq(other, memory))
    }
}
