// SPDX-License-Identifier: MIT OR Apache-2.0
//! From a client's graph to one that ggml computes, checked node by node.
//!
//! Tensors that the client does not list for computing become leaves, whatever made them: computing them again
//! would read inputs that are no longer there. Inputs come before their users, so nothing recurses.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::assemble::assemble;
use super::engine::Engine;
use super::host_step::HostStep;
use super::indices::{IndexCheck, IndexError, index_checks};
use super::rules::{Node, RuleError, check};
use super::shape::{Shape, ShapeError};
use super::space::{Access, Space, SpaceError};
use crate::metal::ggml::{Backend, Builder, EngineError, Graph, GraphError, Memory, MemoryError, Place};
use crate::metal::rpc::{Era, GraphFrame, MAX_SOURCES, Major, Op, WireTensor};

/// Why a graph is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlanError {
    /// A tensor of it.
    #[error("tensor {index} ({name})")]
    Tensor {
        /// Its place in the list.
        index: usize,
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: TensorError,
    },
    /// A node's id.
    #[error("node {id:#x} is {what}")]
    Node {
        /// The id.
        id: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Two tensors have the same id, or one has none.
    #[error("tensor id {id:#x} is no name of one tensor")]
    Id {
        /// The id.
        id: u64,
    },
    /// The graph asks for another device.
    #[error("device {device} does not exist")]
    Device {
        /// Its number.
        device: u32,
    },
    /// An index within the inputs' data.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// ggml has no room.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Memory for the host's part.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Why a tensor is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum TensorError {
    /// Its shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Its place.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Its operation's rule.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A number that is no operation.
    #[error("operation {number} does not exist in the client's ggml")]
    NoOp {
        /// The number.
        number: u32,
    },
    /// The engine's ggml does not have it.
    #[error("the engine's ggml has no {op}")]
    EngineLacks {
        /// The operation.
        op: &'static str,
    },
    /// Neither the engine nor the host computes it.
    #[error("{op} of these types is supported neither by the engine nor by the host")]
    Unsupported {
        /// The operation.
        op: &'static str,
    },
    /// An input that is not listed.
    #[error("input {id:#x} is not among the graph's tensors")]
    Source {
        /// The id.
        id: u64,
    },
    /// An input that is computed later.
    #[error("input {id:#x} is computed after it")]
    Order {
        /// The id.
        id: u64,
    },
    /// It, or an input, lies in no buffer.
    #[error("it has no memory here")]
    NoMemory,
    /// Sorting reads its input while it writes.
    #[error("its result lies over its input")]
    Overlap,
    /// It does not lie where its view says.
    #[error("it does not lie where it looks into another tensor")]
    View,
}

/// A part of a graph.
#[derive(Debug)]
enum Step {
    /// Nodes that the engine computes.
    Engine(Graph),
    /// One that the host computes for it.
    Host(HostStep),
}

/// A graph, ready to be computed again and again.
#[derive(Debug)]
pub(super) struct Plan {
    steps: Vec<Step>,
    indices: Vec<IndexCheck>,
}

impl Plan {
    /// Computes it: on the engine's backend, and on the host's where a step needs it.
    pub(super) fn compute(
        &mut self,
        engine: &Engine,
        backend: &mut Backend,
        fallback: &mut Option<Backend>,
    ) -> Result<(), PlanError> {
        for check in &self.indices {
            check.run()?;
        }
        for step in &mut self.steps {
            match step {
                Step::Engine(graph) => backend.compute(graph)?,
                Step::Host(step) => {
                    backend.finish();
                    let host = match fallback.take() {
                        Some(host) => host,
                        None => engine.backend(&step.device)?,
                    };
                    step.compute(fallback.insert(host))?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn bytes(&self) -> usize {
        self.graphs().map(Graph::bytes).sum()
    }

    pub(super) fn uses(&self, memory: &Rc<Memory>) -> bool {
        self.steps.iter().any(|step| match step {
            Step::Engine(graph) => graph.uses(memory),
            Step::Host(step) => step.uses(memory),
        })
    }

    fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.steps.iter().map(|step| match step {
            Step::Engine(graph) => graph,
            Step::Host(step) => &step.graph,
        })
    }
}

/// What is known of each tensor by its index.
pub(super) struct Tensors {
    pub(super) wire: Vec<WireTensor>,
    pub(super) shapes: Vec<Shape>,
    pub(super) ops: Vec<Op>,
    pub(super) unary: Vec<Option<&'static str>>,
    pub(super) places: Vec<Option<Place>>,
    pub(super) sources: Vec<[Option<usize>; MAX_SOURCES]>,
    pub(super) views: Vec<Option<usize>>,
    /// To be computed, in order.
    pub(super) order: Vec<usize>,
    /// Position in the order, for those in it.
    pub(super) rank: Vec<Option<usize>>,
}

/// Whether two places have a byte in common.
pub(super) fn overlap(one: &Place, other: &Place) -> bool {
    Rc::ptr_eq(&one.memory, &other.memory)
        && one.offset < other.offset + other.bytes
        && other.offset < one.offset + one.bytes
}

/// Operations that only look at memory in another way.
pub(super) fn moves_nothing(op: Op) -> bool {
    matches!(op, Op::None | Op::Reshape | Op::View | Op::Permute | Op::Transpose)
}

impl Tensors {
    pub(super) fn fail(&self, index: usize, source: impl Into<TensorError>) -> PlanError {
        let name = self.wire.get(index).map(WireTensor::name_text).unwrap_or_default();
        PlanError::Tensor { index, name, source: source.into() }
    }

    pub(super) fn shape(&self, index: Option<usize>) -> Option<&Shape> {
        self.shapes.get(index?)
    }

    pub(super) fn op(&self, index: usize) -> Op {
        self.ops.get(index).copied().unwrap_or(Op::None)
    }

    pub(super) fn sources_of(&self, index: usize) -> [Option<usize>; MAX_SOURCES] {
        self.sources.get(index).copied().unwrap_or_default()
    }

    pub(super) fn place_of(&self, index: usize) -> Option<Place> {
        self.places.get(index).cloned().flatten()
    }

    fn listed(&self, index: usize) -> Option<usize> {
        self.rank.get(index).copied().flatten()
    }

    /// Reads records and order; nothing is looked up in memory yet.
    fn read(engine: &Engine, frame: &GraphFrame<'_>, era: &Era) -> Result<Self, PlanError> {
        let wire: Vec<WireTensor> = frame.tensors().collect();
        let count = wire.len();
        let mut by_id = HashMap::with_capacity(count);
        for (index, tensor) in wire.iter().enumerate() {
            if tensor.id == 0 || by_id.insert(tensor.id, index).is_some() {
                return Err(PlanError::Id { id: tensor.id });
            }
        }
        let mut all = Self {
            shapes: Vec::with_capacity(count),
            ops: vec![Op::None; count],
            unary: vec![None; count],
            places: vec![None; count],
            sources: vec![[None; MAX_SOURCES]; count],
            views: vec![None; count],
            order: Vec::with_capacity(frame.nodes().len()),
            rank: vec![None; count],
            wire,
        };
        for (index, tensor) in all.wire.iter().enumerate() {
            let shape = Shape::new(&engine.ggml, tensor.kind, tensor.ne, tensor.nb);
            all.shapes.push(shape.map_err(|error| all.fail(index, error))?);
        }
        for id in frame.nodes() {
            let index = *by_id.get(&id).ok_or(PlanError::Node { id, what: "not among the tensors" })?;
            match all.rank.get_mut(index) {
                Some(rank @ None) => *rank = Some(all.order.len()),
                _ => return Err(PlanError::Node { id, what: "listed twice" }),
            }
            all.order.push(index);
        }
        all.read_operations(era)?;
        all.link(&by_id)?;
        Ok(all)
    }

    /// Operations of the listed tensors; those of others do not matter.
    fn read_operations(&mut self, era: &Era) -> Result<(), PlanError> {
        for index in self.order.clone() {
            let Some(tensor) = self.wire.get(index) else { continue };
            let op = era.op(tensor.op).ok_or(TensorError::NoOp { number: tensor.op });
            let op = op.map_err(|error| self.fail(index, error))?;
            // A result without elements is nothing to compute.
            let op = if self.shapes.get(index).is_some_and(Shape::is_empty) { Op::None } else { op };
            if matches!(op, Op::Unary) {
                let number = tensor.params.first().copied().unwrap_or(-1);
                if let (Some(unary), Some(name)) = (self.unary.get_mut(index), era.unary(number)) {
                    *unary = Some(name);
                }
            }
            if let Some(slot) = self.ops.get_mut(index) {
                *slot = op;
            }
        }
        Ok(())
    }

    fn link(&mut self, by_id: &HashMap<u64, usize>) -> Result<(), PlanError> {
        for index in 0..self.wire.len() {
            let Some(tensor) = self.wire.get(index) else { continue };
            let find = |id: u64| match id {
                0 => Ok(None),
                id => by_id.get(&id).map(|found| Some(*found)).ok_or(TensorError::Source { id }),
            };
            let view = find(tensor.view_src).map_err(|error| self.fail(index, error))?;
            let mut sources = [None; MAX_SOURCES];
            if !matches!(self.op(index), Op::None) {
                for (slot, id) in sources.iter_mut().zip(tensor.src) {
                    *slot = find(id).map_err(|error| self.fail(index, error))?;
                    let (Some(source), Some(own)) = (*slot, self.listed(index)) else { continue };
                    // A cast has itself as its second input.
                    let itself = source == index && matches!(self.op(index), Op::Cpy);
                    if self.listed(source).is_some_and(|rank| rank >= own) && !itself {
                        return Err(self.fail(index, TensorError::Order { id }));
                    }
                }
            }
            if let (Some(slot), Some(seen)) = (self.sources.get_mut(index), self.views.get_mut(index)) {
                (*slot, *seen) = (sources, view);
            }
        }
        Ok(())
    }

    /// Finds the memory of all tensors that have some.
    fn place(&mut self, space: &mut Space) -> Result<(), PlanError> {
        // Content that lies across a shared segment's end moves while places are found; then those found
        // before may be old, so the search begins anew. A second time nothing is left to move.
        let mut moved_before = Vec::new();
        for _ in 0..2 {
            for index in 0..self.wire.len() {
                let Some((tensor, shape)) = self.wire.get(index).zip(self.shapes.get(index)) else {
                    continue;
                };
                if tensor.buffer == 0 || tensor.data == 0 {
                    continue;
                }
                let writes = self.listed(index).is_some() && !moves_nothing(self.op(index));
                let access = if writes { Access::Write } else { Access::Read };
                let place = space.place(tensor.buffer, tensor.data, shape.bytes, access);
                space.mark_computed(tensor.buffer);
                let place = place.map_err(|error| self.fail(index, error))?;
                if let Some(slot) = self.places.get_mut(index) {
                    *slot = Some(place);
                }
            }
            let moved = space.take_moved();
            let again = !moved.is_empty();
            moved_before.extend(moved);
            if !again {
                break;
            }
        }
        space.put_moved(moved_before);
        Ok(())
    }

    /// What a view says of where it lies must be true: some engines compute addresses from it.
    pub(super) fn check_view(&self, index: usize) -> Result<Option<(usize, u64)>, TensorError> {
        let Some(root) = self.views.get(index).copied().flatten() else { return Ok(None) };
        let place = |at: usize| self.places.get(at).and_then(Option::as_ref);
        let (Some(own), Some(of)) = (place(index), place(root)) else { return Ok(None) };
        let offset = self.wire.get(index).map_or(0, |tensor| tensor.view_offset);
        let root_is_whole = self.wire.get(root).is_some_and(|tensor| tensor.view_src == 0);
        let fits = Rc::ptr_eq(&own.memory, &of.memory) && of.offset.checked_add(offset) == Some(own.offset);
        if !root_is_whole || !fits {
            return if self.shapes.get(index).is_some_and(Shape::is_empty) {
                Ok(None)
            } else {
                Err(TensorError::View)
            };
        }
        Ok(Some((root, offset)))
    }

    /// Checks the rule of a listed node, and that it and its inputs have memory.
    fn check_node(&self, index: usize) -> Result<(), TensorError> {
        let op = self.op(index);
        let (Some(out), Some(tensor)) = (self.shapes.get(index), self.wire.get(index)) else { return Ok(()) };
        let sources = self.sources.get(index).copied().unwrap_or_default();
        let unary = self.unary.get(index).copied().flatten();
        let node =
            Node { op, unary, out, src: sources.map(|source| self.shape(source)), params: &tensor.params };
        check(&node)?;
        if !moves_nothing(op) {
            let has = |at: usize| {
                self.places.get(at).is_some_and(Option::is_some)
                    || self.shapes.get(at).is_some_and(Shape::is_empty)
            };
            if !has(index) || !sources.iter().flatten().all(|source| has(*source)) {
                return Err(TensorError::NoMemory);
            }
        }
        let sorts = matches!(op, Op::Argsort | Op::TopK);
        if sorts && sources.iter().flatten().any(|source| self.overlap(index, *source)) {
            return Err(TensorError::Overlap);
        }
        Ok(())
    }

    /// Whether ggml will compute a listed node. llama.cpp lists branches of which only one is meant, and leaves
    /// the mark away from the others.
    pub(super) fn computes(&self, index: usize) -> bool {
        self.wire.get(index).is_some_and(|tensor| tensor.flags & Builder::compute_flag() != 0)
    }

    /// Clients before ggml 0.9.6 know no mark and mean every node, and without the mark nothing is computed.
    fn mark_all_if_none_is(&mut self) {
        if self.order.iter().any(|index| self.computes(*index)) {
            return;
        }
        for index in &self.order {
            if let Some(tensor) = self.wire.get_mut(*index) {
                tensor.flags |= Builder::compute_flag();
            }
        }
    }

    /// Whether two tensors have a byte in common.
    pub(super) fn overlap(&self, one: usize, other: usize) -> bool {
        match (self.place_of(one), self.place_of(other)) {
            (Some(one), Some(other)) => overlap(&one, &other),
            _ => false,
        }
    }
}

/// Makes a plan of a client's graph, or says why not. The space marks the buffers that it uses.
pub(super) fn plan(
    engine: &Arc<Engine>,
    space: &mut Space,
    frame: &GraphFrame<'_>,
    era: &Era,
    major: Major,
) -> Result<Plan, PlanError> {
    if frame.device != 0 {
        return Err(PlanError::Device { device: frame.device });
    }
    let mut all = Tensors::read(engine, frame, era)?;
    if major.number() < 4 {
        all.mark_all_if_none_is();
    }
    all.place(space)?;
    for index in &all.order {
        all.check_node(*index).map_err(|error| all.fail(*index, error))?;
    }
    let steps = build(engine, &all, major)?;
    let indices = if engine.host { index_checks(&all)? } else { Vec::new() };
    Ok(Plan { steps, indices })
}

/// Divides the order into what the engine computes and what the host does for it.
fn build(engine: &Arc<Engine>, all: &Tensors, major: Major) -> Result<Vec<Step>, PlanError> {
    let whole = assemble(engine, all, &all.order, &|index| all.place_of(index), major)?;
    let mut here = Vec::with_capacity(all.order.len());
    for (index, (built, _)) in all.order.iter().zip(&whole.order) {
        here.push(
            moves_nothing(all.op(*index))
                || !all.computes(*index)
                || whole.builder.supported(&engine.device, *built)?,
        );
    }
    if here.iter().all(|here| *here) {
        return Ok(vec![Step::Engine(whole.finish(engine)?)]);
    }
    drop(whole);
    let mut steps = Vec::new();
    let mut run = Vec::new();
    for (index, here) in all.order.iter().zip(here) {
        if here {
            run.push(*index);
            continue;
        }
        steps.extend(engine_step(engine, all, &std::mem::take(&mut run), major)?);
        steps.push(Step::Host(HostStep::new(engine, all, *index, major)?));
    }
    steps.extend(engine_step(engine, all, &run, major)?);
    Ok(steps)
}

fn engine_step(
    engine: &Arc<Engine>,
    all: &Tensors,
    run: &[usize],
    major: Major,
) -> Result<Option<Step>, PlanError> {
    if run.iter().all(|index| moves_nothing(all.op(*index))) {
        return Ok(None);
    }
    let assembled = assemble(engine, all, run, &|index| all.place_of(index), major)?;
    Ok(Some(Step::Engine(assembled.finish(engine)?)))
}
