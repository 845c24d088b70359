// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations on matrices.

use super::{Checked, Node};
use crate::metal::worker::shape::{divides, kinds::*};

/// Types of a matrix that is multiplied: those with blocks, and these.
const FACTOR_KINDS: [u32; 3] = [F32, F16, BF16];
/// Parameter of a multiplication whose first factor is a Hadamard matrix, so that it is not looked at.
const HADAMARD: i32 = 1;

pub(super) fn multiply(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(a.quantized || a.is_any(&FACTOR_KINDS), "the first factor's type fits")?;
    node.hold(b.is_any(&FACTOR_KINDS) && out.is(F32), "types fit")?;
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (a.ne, b.ne);
    node.hold(a0 == b0 && divides(a2, b2) && divides(a3, b3), "factors fit")?;
    node.hold(out.ne == [a1, b1, b2, b3], "the result fits")?;
    node.hold(a.dense_rows() && b.dense_rows() && out.packed() && out.ascending(), "strides fit")?;
    match node.int(1) {
        0 => Ok(()),
        HADAMARD => {
            node.hold(b.is(F32) && b0.is_power_of_two() && a0 == a1 && b.packed(), "the Hadamard hint fits")
        }
        _ => node.hold(false, "the hint exists"),
    }
}

pub(super) fn multiply_by_id(node: &Node<'_>) -> Checked {
    let (a, b, ids, out) = (node.input(0)?, node.input(1)?, node.input(2)?, node.out);
    node.at_most(3)?;
    node.hold(a.quantized || a.is_any(&FACTOR_KINDS), "the experts' type fits")?;
    node.hold(b.is(F32) && ids.is(I32) && out.is(F32), "types fit")?;
    let ([a0, a1, experts, a3], [b0, b1, b2, b3], [used, tokens, i2, i3]) = (a.ne, b.ne, ids.ne);
    node.hold(experts > 0 && a3 == 1 && b3 == 1 && i2 == 1 && i3 == 1, "dimensions fit")?;
    node.hold(a0 == b0 && tokens == b2 && divides(b1, used), "factors fit")?;
    node.hold(out.ne == [a1, used, b2, 1], "the result fits")?;
    node.hold(a.dense_rows() && b.dense_rows() && ids.dense_rows(), "rows are dense")?;
    node.hold(out.packed() && out.ascending(), "the result has no gaps")
}

pub(super) fn outer(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(a.is(F32) && b.is(F32) && out.is(F32), "types fit")?;
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (a.ne, b.ne);
    node.hold(a1 == b1 && divides(a2, b2) && divides(a3, b3), "factors fit")?;
    node.hold(out.ne == [a0, b0, b2, b3], "the result fits")?;
    node.hold(a.dense_rows() && out.packed(), "strides fit")
}

pub(super) fn solve_triangular(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(a.is(F32) && b.is(F32) && out.is(F32), "types fit")?;
    let ([a0, a1, a2, a3], [_, b1, b2, b3]) = (a.ne, b.ne);
    node.hold(a0 == a1 && a1 == b1 && a2 == b2 && a3 == b3 && out.same_sizes(b), "sizes fit")?;
    node.hold(a.packed() && b.packed() && out.packed(), "no gaps")
}

pub(super) fn triangle(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    let [a0, a1, ..] = a.ne;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out) && a0 == a1, "types and sizes fit")?;
    node.hold(a.packed() && out.packed(), "no gaps")?;
    node.hold((0..=3).contains(&node.int(0)), "the triangle exists")
}

pub(super) fn diagonal(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    let [a0, a1, a2, a3] = a.ne;
    node.hold(a.is(F32) && out.is(F32), "types fit")?;
    node.hold(a1 == 1 && out.ne == [a0, a0, a2, a3], "sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn diagonal_mask(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.packed() && out.packed(), "no gaps")?;
    node.count(0).map(|_| ())
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn factors_must_fit() {
        let (a, b) = (plain(Q4_0, [64, 8, 2, 1]), plain(F32, [64, 3, 4, 1]));
        let out = plain(F32, [8, 3, 4, 1]);
        assert!(verdict(Op::MulMat, &out, &[&a, &b], &[]).is_ok());
        assert!(verdict(Op::MulMat, &out, &[&a], &[]).is_err());
        assert!(verdict(Op::MulMat, &out, &[&a, &plain(F32, [32, 3, 4, 1])], &[]).is_err());
        assert!(verdict(Op::MulMat, &out, &[&a, &plain(F32, [64, 3, 3, 1])], &[]).is_err());
        assert!(verdict(Op::MulMat, &out, &[&plain(F32, [64, 8, 0, 1]), &b], &[]).is_err());
        assert!(verdict(Op::MulMat, &plain(F32, [9, 3, 4, 1]), &[&a, &b], &[]).is_err());
        assert!(verdict(Op::MulMat, &out, &[&a, &b], &[0, 7]).is_err());
    }

    #[test]
    fn experts_are_chosen_per_token() {
        let (a, b) = (plain(F32, [8, 4, 5, 1]), plain(F32, [8, 1, 3, 1]));
        let (ids, out) = (plain(I32, [2, 3, 1, 1]), plain(F32, [4, 2, 3, 1]));
        assert!(verdict(Op::MulMatId, &out, &[&a, &b, &ids], &[]).is_ok());
        assert!(verdict(Op::MulMatId, &out, &[&a, &b, &plain(I32, [2, 2, 1, 1])], &[]).is_err());
        assert!(verdict(Op::MulMatId, &out, &[&a, &b, &plain(F32, [2, 3, 1, 1])], &[]).is_err());
    }
}
