// SPDX-License-Identifier: MIT OR Apache-2.0
//! Row numbers that a client uploads: looked at before each computation, where that costs next to nothing.
//!
//! ggml's CPU kernels give up on a row that does not exist. Row numbers that a graph computes itself cannot be
//! looked at before; what they do ends with the worker.

use super::plan::Tensors;
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

/// The checks of a graph, each once.
pub(super) fn index_checks(all: &Tensors) -> Vec<IndexCheck> {
    let mut checks: Vec<IndexCheck> = Vec::new();
    for index in &all.order {
        // Where the row numbers are, and where the rows; `None` for the result itself.
        let op = all.op(*index);
        let (numbers, table) = match op {
            Op::GetRows => (1, Some(0)),
            Op::SetRows => (1, None),
            Op::AddId => (2, Some(1)),
            _ => continue,
        };
        let sources = all.sources.get(*index).copied().unwrap_or_default();
        let table = table.map_or(Some(*index), |slot: usize| sources.get(slot).copied().flatten());
        let Some(numbers) = sources.get(numbers).copied().flatten() else { continue };
        let root = origin(all, numbers);
        let computed = |at: usize| {
            all.rank.get(at).is_some_and(Option::is_some)
                && !matches!(all.op(at), Op::None | Op::View | Op::Reshape | Op::Permute | Op::Transpose)
        };
        if computed(numbers) || computed(root) {
            continue;
        }
        let (Some(shape), Some(table)) = (all.shape(Some(numbers)), all.shape(table)) else { continue };
        let Some(place) = all.places.get(numbers).cloned().flatten() else { continue };
        let [_, rows, ..] = table.ne;
        let known = checks.iter().any(|check| {
            check.rows <= rows
                && check.place.offset == place.offset
                && check.ne == shape.ne
                && check.nb == shape.nb
                && std::rc::Rc::ptr_eq(&check.place.memory, &place.memory)
        });
        if !known {
            let (ne, nb, wide) = (shape.ne, shape.nb, shape.is(I64));
            checks.push(IndexCheck { op: op.name(), place, ne, nb, wide, rows });
        }
    }
    checks
}
