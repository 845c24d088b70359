// SPDX-License-Identifier: MIT OR Apache-2.0
//! Row numbers that a client uploads: looked at before each computation, where that costs next to nothing.
//!
//! ggml's CPU kernels give up on a row that does not exist. Row numbers that a graph computes itself cannot be
//! looked at before; what they do ends with the worker.

use super::plan::{Tensors, moves_nothing, overlap};
use super::shape::kinds::I64;
use crate::metal::ggml::{MemoryError, Place};
use crate::metal::rpc::Op;

/// Why the inputs' data is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    /// A row that does not exist.
    #[error("{op}: row {row} of {rows} does not exist")]
    Row {
        /// The operation.
        op: &'static str,
        /// The row.
        row: i64,
        /// How many there are.
        rows: u64,
    },
    /// Something that is computed before, or the operation itself, writes over the row numbers.
    #[error("{op}: its row numbers are overwritten before it reads them")]
    Overwritten {
        /// The operation.
        op: &'static str,
    },
    /// The data cannot be read.
    #[error("row numbers cannot be read")]
    Memory(#[from] MemoryError),
}

/// Row numbers in an input, and how many rows there are.
#[derive(Debug)]
pub(super) struct IndexCheck {
    op: &'static str,
    place: Place,
    ne: [u64; 4],
    nb: [u64; 4],
    wide: bool,
    rows: u64,
}

fn number(bytes: &[u8], offset: u64, wide: bool) -> Option<i64> {
    let rest = bytes.get(usize::try_from(offset).ok()?..)?;
    if wide {
        rest.first_chunk().map(|word| i64::from_le_bytes(*word))
    } else {
        rest.first_chunk().map(|word| i64::from(i32::from_le_bytes(*word)))
    }
}

impl IndexCheck {
    /// Looks at all row numbers.
    ///
    /// # Errors
    /// At the first that does not exist.
    pub(super) fn run(&self) -> Result<(), IndexError> {
        let bad = self.place.memory.read(self.place.offset, self.place.bytes, |bytes| self.bad(bytes))?;
        match bad {
            None => Ok(()),
            Some(row) => Err(IndexError::Row { op: self.op, row, rows: self.rows }),
        }
    }

    fn bad(&self, bytes: &[u8]) -> Option<i64> {
        let ([ne0, ne1, ne2, ne3], [nb0, nb1, nb2, nb3]) = (self.ne, self.nb);
        for i3 in 0..ne3 {
            for i2 in 0..ne2 {
                for i1 in 0..ne1 {
                    let row = i1 * nb1 + i2 * nb2 + i3 * nb3;
                    for i0 in 0..ne0 {
                        let value = number(bytes, row + i0 * nb0, self.wide).unwrap_or(-1);
                        if u64::try_from(value).map_or(true, |value| value >= self.rows) {
                            return Some(value);
                        }
                    }
                }
            }
        }
        None
    }
}

/// The tensor that a view looks into, or itself.
fn origin(all: &Tensors, index: usize) -> usize {
    all.views.get(index).copied().flatten().unwrap_or(index)
}

/// Whether a node up to this rank writes into a place: row numbers looked at before would be others by then.
fn overwritten(all: &Tensors, rank: usize, place: &Place) -> bool {
    all.order
        .iter()
        .take(rank + 1)
        .filter(|index| !moves_nothing(all.op(**index)) && all.computes(**index))
        .any(|index| all.place_of(*index).is_some_and(|written| overlap(&written, place)))
}

/// The input with a node's row numbers, and how many rows there are.
fn numbers_of(all: &Tensors, index: usize) -> Option<(usize, u64)> {
    // Where the row numbers are, and where the rows; `None` for the result itself.
    let (numbers, table) = match all.op(index) {
        Op::GetRows => (1, Some(0)),
        Op::SetRows => (1, None),
        Op::AddId => (2, Some(1)),
        _ => return None,
    };
    let sources = all.sources_of(index);
    let table = table.map_or(Some(index), |slot: usize| sources.get(slot).copied().flatten());
    let [_, rows, ..] = all.shape(table)?.ne;
    Some((sources.get(numbers).copied().flatten()?, rows))
}

/// The check of a node's row numbers, with the memory that `place` gives.
pub(super) fn check_in(
    all: &Tensors,
    index: usize,
    place: &dyn Fn(usize) -> Option<Place>,
) -> Option<IndexCheck> {
    let (numbers, rows) = numbers_of(all, index)?;
    let (shape, place) = (all.shape(Some(numbers))?, place(numbers)?);
    let op = all.op(index).name();
    Some(IndexCheck { op, place, ne: shape.ne, nb: shape.nb, wide: shape.is(I64), rows })
}

/// The row numbers of a node, where these can be known before.
fn check_of(all: &Tensors, index: usize) -> Option<IndexCheck> {
    let (numbers, _) = numbers_of(all, index)?;
    let computed = |at: usize| all.rank.get(at).is_some_and(Option::is_some) && !moves_nothing(all.op(at));
    if computed(numbers) || computed(origin(all, numbers)) {
        return None;
    }
    check_in(all, index, &|at| all.place_of(at))
}

/// The checks of a graph, each once.
///
/// # Errors
/// When row numbers are overwritten before they are read.
pub(super) fn index_checks(all: &Tensors) -> Result<Vec<IndexCheck>, IndexError> {
    let mut checks: Vec<IndexCheck> = Vec::new();
    for (rank, index) in all.order.iter().enumerate() {
        // The row numbers of a branch that is not meant may never have been uploaded.
        if !all.computes(*index) {
            continue;
        }
        let Some(check) = check_of(all, *index) else { continue };
        if overwritten(all, rank, &check.place) {
            return Err(IndexError::Overwritten { op: check.op });
        }
        let known = checks.iter().any(|other| {
            other.rows <= check.rows
                && (other.place.offset, other.ne, other.nb) == (check.place.offset, check.ne, check.nb)
                && std::rc::Rc::ptr_eq(&other.place.memory, &check.place.memory)
        });
        if !known {
            checks.push(check);
        }
    }
    Ok(checks)
}
