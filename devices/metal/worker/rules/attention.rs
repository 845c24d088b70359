// SPDX-License-Identifier: MIT OR Apache-2.0
//! Soft maximum, rotary positions, fused attention.

use super::moving::STORE_KINDS;
use super::{Checked, Node};
use crate::metal::worker::shape::{divides, kinds::*};

pub(super) fn soft_max(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(3)?;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.packed() && out.packed(), "no gaps")?;
    let ([a0, a1, a2, a3], bias) = (a.ne, node.float(1));
    if let Some(mask) = node.optional(1) {
        let [m0, m1, m2, m3] = mask.ne;
        node.hold(mask.is_any(&[F16, F32]) && mask.packed(), "the mask's type fits")?;
        node.hold(m0 == a0 && m1 >= a1 && divides(m2, a2) && divides(m3, a3), "the mask fits")?;
    }
    if let Some(sinks) = node.optional(2) {
        let [s0, ..] = sinks.ne;
        node.hold(sinks.is(F32) && sinks.packed() && s0 == a2, "the sinks fit")?;
    }
    node.hold(bias == 0.0 || (bias > 0.0 && node.optional(1).is_some()), "a bias has a mask")
}

pub(super) fn rope(node: &Node<'_>) -> Checked {
    const MULTI: i32 = 8;
    const VISION: i32 = 24;
    /// Normal, NeoX, in sections, vision, interleaved sections.
    const MODES: [i32; 5] = [0, 2, MULTI, VISION, 40];
    let (a, positions, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(3)?;
    node.hold(a.is_any(&[F32, F16]) && out.kind == a.kind && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")?;
    let (turned, mode, skipped) = (node.count(1)?, node.int(2), node.count(15)?);
    let [a0, _, a2, _] = a.ne;
    node.hold(MODES.contains(&mode), "the mode exists")?;
    node.hold(turned >= 2 && turned % 2 == 0 && skipped % 2 == 0, "pairs are turned")?;
    node.hold(turned + skipped <= a0, "no more is turned than there is")?;
    let each = if mode & MULTI != 0 { 4 } else { 1 };
    node.hold(positions.is(I32) && positions.packed(), "positions are whole numbers")?;
    node.hold(positions.ne == [a2 * each, 1, 1, 1], "each token has its positions")?;
    if mode & MULTI != 0 {
        let mut sections = 0;
        for index in 11..15 {
            sections += node.count(index)?;
        }
        node.hold(sections > 0 && sections <= a0, "the sections fit")?;
        let first: u64 = node.count(11)? + node.count(12)? + node.count(13)?;
        node.hold(first > 0, "the sections fit")?;
    }
    node.hold(mode != VISION || (turned == a0 / 2 && skipped == 0), "vision turns half")?;
    match node.optional(2) {
        None => Ok(()),
        Some(factors) => {
            let [f0, ..] = factors.ne;
            node.hold(factors.is(F32) && factors.packed() && f0 >= turned / 2, "the factors fit")
        }
    }
}

pub(super) fn flash(node: &Node<'_>) -> Checked {
    /// Precisions: the default and 32-bit floats.
    const PRECISIONS: [i32; 2] = [0, 10];
    let (q, k, v, out) = (node.input(0)?, node.input(1)?, node.input(2)?, node.out);
    node.at_most(5)?;
    node.hold(q.is(F32) && out.is(F32), "types fit")?;
    node.hold(k.is_any(&STORE_KINDS) && v.is_any(&STORE_KINDS), "keys' and values' types fit")?;
    let ([q0, q1, q2, q3], [k0, k1, k2, k3], [v0, v1, v2, v3]) = (q.ne, k.ne, v.ne);
    node.hold(k0 == q0 && k1 == v1 && k1 > 0, "keys and values fit")?;
    node.hold(divides(k2, q2) && divides(v2, q2) && q3 == k3 && q3 == v3, "heads fit")?;
    node.hold(out.ne == [v0, q2, q1, q3], "the result fits")?;
    node.hold(q.dense_rows() && k.dense_rows() && v.dense_rows(), "rows are dense")?;
    node.hold(out.packed() && out.ascending(), "the result has no gaps")?;
    let bias = node.float(1);
    if let Some(mask) = node.optional(3) {
        let [m0, m1, m2, m3] = mask.ne;
        node.hold(mask.is(F16) && mask.packed(), "the mask's type fits")?;
        node.hold(m0 >= k1 && m1 >= q1 && divides(m2, q2) && divides(m3, q3), "the mask fits")?;
    }
    if let Some(sinks) = node.optional(4) {
        let [s0, ..] = sinks.ne;
        node.hold(sinks.is(F32) && sinks.packed() && s0 == q2, "the sinks fit")?;
    }
    node.hold(bias == 0.0 || (bias > 0.0 && node.optional(3).is_some()), "a bias has a mask")?;
    node.hold(PRECISIONS.contains(&node.int(3)), "the precision exists")
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn a_mask_covers_what_is_masked() {
        let a = plain(F32, [16, 4, 2, 1]);
        assert!(verdict(Op::SoftMax, &a, &[&a, &plain(F32, [16, 32, 1, 1])], &[]).is_ok());
        assert!(verdict(Op::SoftMax, &a, &[&a, &plain(F32, [16, 3, 1, 1])], &[]).is_err());
        let bias = 1.0_f32.to_bits().cast_signed();
        assert!(verdict(Op::SoftMax, &a, &[&a], &[0, bias]).is_err());
    }

    #[test]
    fn no_more_is_turned_than_there_is() {
        let (a, positions) = (plain(F32, [16, 4, 3, 1]), plain(I32, [3, 1, 1, 1]));
        assert!(verdict(Op::Rope, &a, &[&a, &positions], &[0, 16, 2]).is_ok());
        assert!(verdict(Op::Rope, &a, &[&a, &positions], &[0, 18, 2]).is_err());
        assert!(verdict(Op::Rope, &a, &[&a, &positions], &[0, -16, 2]).is_err());
        assert!(verdict(Op::Rope, &a, &[&a, &positions], &[0, 16, 1]).is_err());
        assert!(verdict(Op::Rope, &a, &[&a, &plain(I32, [2, 1, 1, 1])], &[0, 16, 2]).is_err());
        assert!(verdict(Op::Rope, &a, &[&a, &positions, &plain(F32, [7, 1, 1, 1])], &[0, 16, 2]).is_err());
    }

    #[test]
    fn attention_takes_shared_heads_and_a_long_enough_mask() {
        let q = plain(F32, [64, 2, 6, 1]);
        let (k, v) = (plain(F16, [64, 40, 3, 1]), plain(F16, [64, 40, 3, 1]));
        let out = plain(F32, [64, 6, 2, 1]);
        assert!(verdict(Op::FlashAttnExt, &out, &[&q, &k, &v, &plain(F16, [40, 2, 1, 1])], &[]).is_ok());
        assert!(verdict(Op::FlashAttnExt, &out, &[&q, &k, &v, &plain(F16, [39, 2, 1, 1])], &[]).is_err());
        assert!(verdict(Op::FlashAttnExt, &out, &[&q, &k, &plain(F16, [64, 41, 3, 1])], &[]).is_err());
        assert!(verdict(Op::FlashAttnExt, &out, &[&q, &plain(F16, [64, 40, 4, 1]), &v], &[]).is_err());
        assert!(verdict(Op::FlashAttnExt, &out, &[&q, &k, &v], &[0, 0, 0, 3]).is_err());
    }
}
