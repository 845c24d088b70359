// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that treat each element by itself.

use super::{Checked, Node};
use crate::metal::worker::shape::{Shape, kinds::*};

/// Pairs of an input's and the result's type that unary kernels exist for.
const UNARY_KINDS: [(u32, u32); 5] = [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F16, F32)];
/// Types of both inputs and the result that binary kernels exist for.
const BINARY_KINDS: [(u32, u32, u32); 7] = [
    (F32, F32, F32),
    (F16, F16, F16),
    (BF16, BF16, BF16),
    (BF16, F32, BF16),
    (BF16, F32, F32),
    (F16, F32, F16),
    (F16, F32, F32),
];
/// Kernels of these exist for equal types only.
const SAME_KIND_ONLY: [&str; 4] = ["GELU", "GELU_ERF", "GELU_QUICK", "SILU"];

pub(super) fn binary(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(b.repeats_to(a), "the second input repeats to the first")?;
    node.hold(a.same_sizes(out), "the result has the first input's sizes")?;
    if a.quantized {
        node.hold(out.kind == a.kind && b.is(F32), "types fit")?;
        node.hold(b.same_sizes(a), "sizes are equal")?;
        node.hold(a.packed() && b.packed() && out.packed(), "no gaps")?;
        return node
            .hold(matches!(node.op, crate::metal::rpc::Op::Add), "only sums of quantized tensors exist");
    }
    node.hold(BINARY_KINDS.contains(&(a.kind, b.kind, out.kind)), "types fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn add_scalar(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(b.elements() == 1, "the second input is one number")?;
    node.hold(a.same_sizes(out), "the result has the first input's sizes")?;
    node.hold(a.is(F32) && b.is(F32) && out.is(F32), "types fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn add_by_id(node: &Node<'_>) -> Checked {
    let (a, b, ids, out) = (node.input(0)?, node.input(1)?, node.input(2)?, node.out);
    node.at_most(3)?;
    node.hold(a.is(F32) && b.is(F32) && ids.is(I32) && out.is(F32), "types fit")?;
    node.hold(a.same_sizes(out), "the result has the first input's sizes")?;
    let ([a0, a1, a2, a3], [b0, ..], [i0, i1, ..]) = (a.ne, b.ne, ids.ne);
    node.hold(a0 == b0 && a1 == i0 && a2 == i1 && a3 == 1, "sizes fit")?;
    node.hold([a, b, ids, out].iter().all(|shape| shape.dense_rows()), "rows are dense")
}

/// Adds to, or replaces, a part of the first input that the parameters describe.
pub(super) fn into_part(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    let kinds: &[u32] = if matches!(node.op, crate::metal::rpc::Op::Acc) { &[F32] } else { &[F32, I32] };
    node.hold(a.is_any(kinds) && b.kind == a.kind && out.kind == a.kind, "types fit")?;
    node.hold(a.same_sizes(out), "the result has the first input's sizes")?;
    node.hold(a.packed() && out.packed(), "no gaps")?;
    node.hold(b.dense_rows() && !b.is_empty(), "rows are dense")?;
    let strides = [a.block_bytes, node.count(0)?, node.count(1)?, node.count(2)?];
    let mut end = u128::from(node.count(3)?) + u128::from(a.block_bytes);
    for (count, stride) in b.ne.iter().zip(strides) {
        end += u128::from(count - 1) * u128::from(stride);
    }
    node.hold(end <= u128::from(out.bytes), "the part lies within")
}

fn same(node: &Node<'_>, pairs: &[(u32, u32)], laid_out: impl Fn(&Shape) -> bool) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(pairs.contains(&(a.kind, out.kind)), "types fit")?;
    node.hold(a.same_sizes(out), "sizes are equal")?;
    node.hold(laid_out(a) && laid_out(out), "strides fit")
}

pub(super) fn unary(node: &Node<'_>) -> Checked {
    same(node, &UNARY_KINDS, Shape::dense_rows)
}

pub(super) fn named_unary(node: &Node<'_>) -> Checked {
    let name = node.unary.unwrap_or_default();
    node.hold(!name.is_empty(), "the unary operation exists")?;
    let pairs = if SAME_KIND_ONLY.contains(&name) { UNARY_KINDS.get(..2) } else { Some(&UNARY_KINDS[..]) };
    same(node, pairs.unwrap_or_default(), |shape| {
        shape.dense_rows() && (name != "XIELU" || shape.even_rows())
    })
}

pub(super) fn leaky_relu(node: &Node<'_>) -> Checked {
    same(node, &[(F32, F32), (F16, F16)], |shape| shape.even_rows())
}

pub(super) fn scale(node: &Node<'_>) -> Checked {
    same(node, &[(F32, F32)], Shape::packed)
}

pub(super) fn clamp(node: &Node<'_>) -> Checked {
    // The kernel steps through all rows by one stride.
    same(node, &[(F32, F32), (F16, F16)], |shape| shape.even_rows())
}

pub(super) fn fill(node: &Node<'_>) -> Checked {
    same(node, &[(F32, F32), (F16, F16)], Shape::packed)
}

pub(super) fn gated(node: &Node<'_>) -> Checked {
    /// Number of SWIGLU_OAI, whose kernel exists for one type and two inputs.
    const SWIGLU_OAI: i32 = 3;
    /// Number of the last that every served ggml has.
    const LAST: i32 = 5;
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(2)?;
    let gate = node.int(0);
    node.hold((0..=LAST).contains(&gate), "the gate exists")?;
    node.hold((0..=1).contains(&node.int(1)), "swapped is yes or no")?;
    let kinds: &[u32] = if gate == SWIGLU_OAI { &[F32] } else { &[F32, F16] };
    node.hold(a.is_any(kinds) && out.kind == a.kind, "types fit")?;
    let fits = |shape: &Shape| shape.even_rows();
    node.hold(fits(a) && fits(out), "strides fit")?;
    let ([a0, a1, a2, a3], [o0, o1, o2, o3]) = (a.ne, out.ne);
    node.hold(a1 == o1 && a2 == o2 && a3 == o3, "rows are equal")?;
    match node.optional(1) {
        Some(b) => {
            node.hold(b.kind == a.kind && b.same_sizes(a) && fits(b), "both inputs are alike")?;
            node.hold(o0 == a0, "the result has the inputs' rows")
        }
        None => {
            node.hold(gate != SWIGLU_OAI || a0 % 2 == 0, "sizes fit")?;
            node.hold(o0 == a0 / 2, "the result has half the input's row")
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn sums_need_sizes_that_repeat() {
        let (a, b) = (plain(F32, [4, 6, 1, 1]), plain(F32, [4, 3, 1, 1]));
        assert!(verdict(Op::Add, &a, &[&a, &b], &[]).is_ok());
        assert!(verdict(Op::Add, &a, &[&a, &plain(F32, [3, 6, 1, 1])], &[]).is_err());
        assert!(verdict(Op::Add, &b, &[&a, &b], &[]).is_err());
        assert!(verdict(Op::Mul, &a, &[&a, &plain(I32, [4, 6, 1, 1])], &[]).is_err());
        assert!(verdict(Op::Add, &a, &[&a, &plain(F32, [0, 6, 1, 1])], &[]).is_err());
    }

    #[test]
    fn parts_lie_within() {
        let (a, b) = (plain(F32, [8, 4, 1, 1]), plain(F32, [4, 2, 1, 1]));
        assert!(verdict(Op::Acc, &a, &[&a, &b], &[32, 128, 128, 16]).is_ok());
        assert!(verdict(Op::Acc, &a, &[&a, &b], &[-32, 128, 128, 64]).is_err());
        assert!(verdict(Op::Set, &a, &[&a, &b], &[32, 128, 128, 84]).is_err());
        assert!(verdict(Op::Set, &a, &[&a, &b], &[i32::MAX, 128, 128, 0]).is_err());
    }

    #[test]
    fn gates_halve_or_pair() {
        let (a, half) = (plain(F32, [8, 4, 1, 1]), plain(F32, [4, 4, 1, 1]));
        assert!(verdict(Op::Glu, &half, &[&a], &[2]).is_ok());
        assert!(verdict(Op::Glu, &half, &[&half, &half], &[2]).is_ok());
        assert!(verdict(Op::Glu, &a, &[&a], &[2]).is_err());
        assert!(verdict(Op::Glu, &half, &[&a], &[9]).is_err());
    }
}
