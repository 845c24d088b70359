// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts checked tensors into ggml's hands: a run of nodes, what they read, and the order to compute them in.

use std::collections::HashMap;

use super::engine::Engine;
use super::plan::{PlanError, TensorError, Tensors};
use crate::metal::ggml::{Builder, Graph, NodeSpec, Place};
use crate::metal::rpc::{Major, Op, WireTensor};

/// ggml's flags that a client may set.
const KNOWN_FLAGS: i32 = 0x1f;

/// A run of nodes, ready to become a graph.
pub(super) struct Assembled {
    pub(super) builder: Builder,
    /// Positions in the builder, each with whether something outside the run uses it.
    pub(super) order: Vec<(usize, bool)>,
}

impl Assembled {
    pub(super) fn finish(self, engine: &Engine) -> Result<Graph, PlanError> {
        let view = engine.ggml.op_number(Op::View).unwrap_or(0);
        Ok(self.builder.finish(&self.order, view)?)
    }
}

/// Numbers the tensors of a run as the builder will: in the order in which they are first met.
fn numbered(all: &Tensors, run: &[usize]) -> (Vec<usize>, HashMap<usize, usize>) {
    let mut met = Vec::new();
    let mut position = HashMap::new();
    let mut meet = |index: usize| {
        position.entry(index).or_insert_with(|| {
            met.push(index);
            met.len() - 1
        });
    };
    for index in run {
        for source in all.sources_of(*index).into_iter().flatten() {
            meet(source);
            all.views.get(source).copied().flatten().into_iter().for_each(&mut meet);
        }
        meet(*index);
        all.views.get(*index).copied().flatten().into_iter().for_each(&mut meet);
    }
    (met, position)
}

/// Gives ggml the nodes of a run, all else that they read as leaves, with memory where `place` says.
pub(super) fn assemble(
    engine: &Engine,
    all: &Tensors,
    run: &[usize],
    place: &dyn Fn(usize) -> Option<Place>,
    major: Major,
) -> Result<Assembled, PlanError> {
    let (met, position) = numbered(all, run);
    let mut builder = Builder::new(&engine.ggml, met.len(), run.len())?;
    let mut listed = vec![false; met.len()];
    for at in run.iter().filter_map(|index| position.get(index)) {
        if let Some(listed) = listed.get_mut(*at) {
            *listed = true;
        }
    }
    for (index, listed) in met.iter().zip(&listed) {
        let Some(tensor) = all.wire.get(*index) else { continue };
        let spec = spec(engine, all, *index, tensor, *listed, place(*index));
        let mut spec = spec.map_err(|error| all.fail(*index, error))?;
        spec.flags = tensor.flags & KNOWN_FLAGS;
        builder.add(&spec)?;
    }
    for (at, (index, listed)) in met.iter().zip(&listed).enumerate() {
        for (slot, source) in all.sources_of(*index).into_iter().enumerate() {
            if let Some(source) = source.filter(|_| *listed).and_then(|source| position.get(&source)) {
                builder.link(at, slot, *source)?;
            }
        }
        if let Some((root, offset)) = all.check_view(*index).map_err(|error| all.fail(*index, error))?
            && let Some(root) = position.get(&root)
        {
            builder.link_view(at, *root, offset)?;
        }
    }
    let uses = with_uses(all, run, major);
    let order = uses.filter_map(|(index, used)| position.get(&index).map(|at| (*at, used))).collect();
    Ok(Assembled { builder, order })
}

fn spec(
    engine: &Engine,
    all: &Tensors,
    index: usize,
    tensor: &WireTensor,
    listed: bool,
    place: Option<Place>,
) -> Result<NodeSpec, TensorError> {
    let op = if listed { all.op(index) } else { Op::None };
    let lacks = |name: &'static str| TensorError::EngineLacks { op: name };
    let mut params = tensor.params;
    if let Some(name) = all.unary.get(index).copied().flatten()
        && let Some(first) = params.first_mut()
    {
        *first = engine.ggml.unary_number(name).ok_or(lacks(name))?;
    }
    Ok(NodeSpec {
        kind: i32::try_from(tensor.kind).unwrap_or(-1),
        ne: tensor.ne,
        nb: tensor.nb,
        op: engine.ggml.op_number(op).ok_or(lacks(op.name()))?,
        params,
        flags: 0,
        name: tensor.name,
        place,
    })
}

/// The run, each with whether something outside it uses it: then ggml must not fuse it away.
fn with_uses<'a>(
    all: &'a Tensors,
    run: &'a [usize],
    major: Major,
) -> impl Iterator<Item = (usize, bool)> + 'a {
    let mut inside: HashMap<usize, i64> = HashMap::new();
    for index in run {
        for source in all.sources_of(*index).into_iter().flatten() {
            *inside.entry(source).or_default() += 1;
        }
    }
    let told = major.may_send_use_counts() && all.wire.iter().any(|tensor| tensor.use_count != 0);
    run.iter().map(move |index| {
        let counted = inside.get(index).copied().unwrap_or(0);
        let total = all.wire.get(*index).map_or(0, |tensor| i64::from(tensor.use_count));
        (*index, !told || total > counted)
    })
}
