// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that look along rows: sums, norms, orders.

use super::{Checked, Node};
use crate::metal::rpc::Op;
use crate::metal::worker::shape::{Shape, kinds::*};

pub(super) fn sum(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is_any(&[F32, F16, BF16]) && out.kind == a.kind, "types fit")?;
    node.hold(a.dense_rows() && out.elements() == 1, "sizes fit")
}

pub(super) fn rows(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32), "types fit")?;
    let [_, a1, a2, a3] = a.ne;
    node.hold(out.ne == [1, a1, a2, a3], "sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn cumulative(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn argmax(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    let [a0, a1, a2, a3] = a.ne;
    node.hold(a.is(F32) && out.is(I32), "types fit")?;
    node.hold(a0 > 0 && a2 == 1 && a3 == 1 && out.ne == [a1, 1, 1, 1], "sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn count_equal(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(a.is(I32) && b.is(I32) && out.is(I64), "types fit")?;
    node.hold(a.same_sizes(b) && out.elements() == 1, "sizes fit")
}

pub(super) fn norm(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")?;
    node.hold(node.float(0) >= 0.0, "epsilon is not negative")
}

pub(super) fn group_norm(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.packed() && out.packed(), "no gaps")?;
    let [_, _, channels, _] = a.ne;
    node.hold((1..=channels).contains(&node.count(0)?), "there are groups for the channels")?;
    node.hold(node.float(1) >= 0.0, "epsilon is not negative")
}

pub(super) fn argsort(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(I32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(evenly_spaced(a) && evenly_spaced(out), "rows are evenly spaced")?;
    node.hold((0..=1).contains(&node.int(0)), "the order exists")
}

pub(super) fn top_k(node: &Node<'_>) -> Checked {
    debug_assert!(node.op == Op::TopK, "written for it");
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    let ([a0, a1, a2, a3], [k, o1, o2, o3]) = (a.ne, out.ne);
    node.hold(a.is(F32) && out.is(I32), "types fit")?;
    node.hold(k <= a0 && a1 == o1 && a2 == o2 && a3 == o3, "sizes fit")?;
    node.hold(evenly_spaced(a) && evenly_spaced(out), "rows are evenly spaced")
}

/// The kernels that sort step through all rows by one stride.
fn evenly_spaced(shape: &Shape) -> bool {
    shape.even_rows()
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn norms_keep_sizes_and_have_an_epsilon() {
        let a = plain(F32, [8, 4, 1, 1]);
        let eps = |value: f32| value.to_bits().cast_signed();
        assert!(verdict(Op::RmsNorm, &a, &[&a], &[eps(1e-5)]).is_ok());
        assert!(verdict(Op::RmsNorm, &a, &[&a], &[eps(-1.0)]).is_err());
        assert!(verdict(Op::RmsNorm, &a, &[&a], &[eps(f32::NAN)]).is_err());
        assert!(verdict(Op::Norm, &a, &[&plain(F32, [4, 8, 1, 1])], &[0]).is_err());
        assert!(verdict(Op::GroupNorm, &a, &[&a], &[0]).is_err());
    }

    #[test]
    fn the_best_are_not_more_than_all() {
        let a = plain(F32, [8, 4, 1, 1]);
        assert!(verdict(Op::TopK, &plain(I32, [3, 4, 1, 1]), &[&a], &[]).is_ok());
        assert!(verdict(Op::TopK, &plain(I32, [9, 4, 1, 1]), &[&a], &[]).is_err());
        assert!(verdict(Op::Argsort, &plain(I32, [8, 4, 1, 1]), &[&a], &[2]).is_err());
        let (mut gaps, out) = (plain(F32, [8, 4, 2, 1]), plain(I32, [8, 4, 2, 1]));
        assert!(verdict(Op::Argsort, &out, &[&gaps], &[0]).is_ok());
        gaps.nb[2] = 4096;
        assert!(verdict(Op::Argsort, &out, &[&gaps], &[0]).is_err());
    }
}
