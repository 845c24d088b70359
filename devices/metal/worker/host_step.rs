// SPDX-License-Identifier: MIT OR Apache-2.0
//! A node that the engine does not support, computed by the host's processor: inputs are copied over, the result
//! back.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use super::assemble::assemble;
use super::engine::Engine;
use super::indices::{IndexCheck, check_in};
use super::plan::{PlanError, TensorError, Tensors};
use crate::metal::ggml::{Backend, Device, Graph, Memory, MemoryError, Place};
use crate::metal::rpc::Major;

/// Distance of copies; ggml's kernels like their tensors aligned.
const ALIGN_BYTES: u64 = 64;

/// One node on the host.
#[derive(Debug)]
pub(super) struct HostStep {
    pub(super) device: Device,
    pub(super) graph: Graph,
    /// Where each tensor lies on the engine, and on the host.
    copies: Vec<(Place, Place)>,
    /// The result's entry.
    result: usize,
    indices: Option<IndexCheck>,
}

impl HostStep {
    /// Prepares the node.
    ///
    /// # Errors
    /// When the host does not compute it either, or there is no memory.
    pub(super) fn new(
        engine: &Arc<Engine>,
        all: &Tensors,
        index: usize,
        major: Major,
    ) -> Result<Self, PlanError> {
        let unsupported = || all.fail(index, TensorError::Unsupported { op: all.op(index).name() });
        let device = engine.fallback.clone().ok_or_else(unsupported)?;
        let mut needed: Vec<usize> = all.sources_of(index).into_iter().flatten().collect();
        needed.push(index);
        needed.sort_unstable();
        needed.dedup();
        let mut offsets = BTreeMap::new();
        let mut total = 0;
        for tensor in &needed {
            let Some(place) = all.place_of(*tensor) else { continue };
            offsets.insert(*tensor, (place.clone(), total));
            total += place.bytes.next_multiple_of(ALIGN_BYTES);
        }
        let memory = Rc::new(Memory::host(&engine.ggml, total.max(1), engine.config.huge_pages)?);
        let host_place = |at: usize| {
            offsets.get(&at).map(|(place, offset)| Place {
                memory: Rc::clone(&memory),
                offset: *offset,
                bytes: place.bytes,
            })
        };
        let assembled = assemble(engine, all, &[index], &host_place, major)?;
        for (at, _) in &assembled.order {
            if !assembled.builder.supported(&device, *at)? {
                return Err(unsupported());
            }
        }
        let indices = check_in(all, index, &host_place);
        let result = offsets.keys().position(|at| *at == index).unwrap_or(0);
        let copies = offsets.keys().filter_map(|at| Some((all.place_of(*at)?, host_place(*at)?))).collect();
        Ok(Self { device, graph: assembled.finish(engine)?, copies, result, indices })
    }

    /// Copies, computes, copies back. The engine must have finished before.
    ///
    /// # Errors
    /// When a row number does not exist, or the host fails.
    pub(super) fn compute(&mut self, host: &mut Backend) -> Result<(), PlanError> {
        // The result is copied over too: not every operation writes all of it.
        for (engine, own) in &self.copies {
            own.memory.write(own.offset, own.bytes, |bytes| engine.memory.get(engine.offset, bytes))??;
        }
        if let Some(check) = &self.indices {
            check.run()?;
        }
        host.compute(&mut self.graph)?;
        host.finish();
        if let Some((engine, own)) = self.copies.get(self.result) {
            own.memory.read(own.offset, own.bytes, |bytes| -> Result<(), MemoryError> {
                engine.memory.put(engine.offset, bytes)
            })??;
        }
        Ok(())
    }

    pub(super) fn uses(&self, memory: &Rc<Memory>) -> bool {
        self.copies.iter().any(|(engine, _)| Rc::ptr_eq(&engine.memory, memory))
    }
}
