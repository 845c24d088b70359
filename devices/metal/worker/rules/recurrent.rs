// SPDX-License-Identifier: MIT OR Apache-2.0
//! State-space and linear-attention layers.

use super::{Checked, Node};
use crate::metal::worker::shape::{Shape, divides, kinds::*};

pub(super) fn ssm_conv(node: &Node<'_>) -> Checked {
    let (input, kernel, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(input.is(F32) && kernel.is(F32) && out.is(F32), "types fit")?;
    let ([i0, i1, i2, i3], [k0, k1, k2, k3]) = (input.ne, kernel.ne);
    let tokens = (i0 + 1).saturating_sub(k0);
    node.hold(k0 > 0 && i1 == k1 && i3 == 1 && k2 == 1 && k3 == 1, "sizes fit")?;
    node.hold(out.ne == [k1, tokens, i2, 1], "the result fits")?;
    node.hold(input.packed() && kernel.packed() && out.packed(), "no gaps")
}

pub(super) fn ssm_scan(node: &Node<'_>) -> Checked {
    let (state, x, dt, a) = (node.input(0)?, node.input(1)?, node.input(2)?, node.input(3)?);
    let (b, c, ids, out) = (node.input(4)?, node.input(5)?, node.input(6)?, node.out);
    node.at_most(7)?;
    node.hold([state, x, dt, a, b, c, out].iter().all(|shape| shape.is(F32)) && ids.is(I32), "types fit")?;
    let ([s0, s1, s2, s3], [x0, x1, x2, x3]) = (state.ne, x.ne);
    let ([a0, a1, a2, a3], [b0, groups, b2, b3]) = (a.ne, b.ne);
    node.hold(s1 == x0 && s2 == x1 && s3 > 0 && dt.ne == [x1, x2, x3, 1], "state and steps fit")?;
    node.hold(b0 == s0 && b2 == x2 && b3 == x3 && c.same_sizes(b) && divides(groups, x1), "groups fit")?;
    node.hold((a0 == 1 || a0 == s0) && a1 == x1 && a2 == 1 && a3 == 1, "decays fit")?;
    node.hold(ids.ne == [x3, 1, 1, 1], "each sequence has a state")?;
    // Parameter 0 counts snapshots from ggml 0.18; before, it is not there.
    let snapshots = node.count(0)?.max(1);
    node.hold(snapshots == 1 || a0 == 1, "snapshots need a common decay")?;
    let elements =
        snapshots.checked_mul(s0 * s1 * s2).and_then(|each| each.checked_mul(x3)?.checked_add(x.elements()));
    node.hold(elements == Some(out.elements()), "the result fits")?;
    let dense = [state, x, dt, a, b, c, ids, out].iter().all(|shape| shape.dense_rows());
    let inner = |shape: &Shape| {
        let ([ne0, ..], [nb0, nb1, ..]) = (shape.ne, shape.nb);
        nb1 == ne0 * nb0
    };
    node.hold(dense && [x, b, c].iter().all(|shape| inner(shape)), "rows follow each other")?;
    node.hold([state, dt, a, ids, out].iter().all(|shape| shape.packed()), "no gaps")
}

/// Inputs of `[size, heads, tokens]` each, and a state of `size * size * heads` for each sequence.
fn heads(node: &Node<'_>, inputs: &[usize], state: usize) -> Checked {
    let first = node.input(inputs.first().copied().unwrap_or(0))?;
    let [size, count, tokens, last] = first.ne;
    node.hold(last == 1 && size > 0 && count > 0, "sizes fit")?;
    for slot in inputs {
        let input = node.input(*slot)?;
        node.hold(input.is(F32) && input.packed() && input.same_sizes(first), "inputs are alike")?;
    }
    let (held, out) = (node.input(state)?, node.out);
    let [_, sequences, ..] = held.ne;
    node.hold(held.is(F32) && held.packed() && divides(sequences, tokens), "sequences fit")?;
    let wanted = size.checked_mul(size).and_then(|square| square.checked_mul(count)?.checked_mul(sequences));
    node.hold(wanted == Some(held.elements()), "the state fits")?;
    node.hold(out.is(F32) && out.packed(), "no gaps")?;
    node.hold(out.ne == [size * count, tokens + size * sequences, 1, 1], "the result fits")
}

/// `RWKV_WKV6` has one more input for each head; gated linear attention does not.
pub(super) fn linear_attention(node: &Node<'_>) -> Checked {
    if matches!(node.op, crate::metal::rpc::Op::GatedLinearAttn) {
        node.at_most(5)?;
        return heads(node, &[0, 1, 2, 3], 4);
    }
    node.at_most(6)?;
    heads(node, &[0, 1, 2, 4], 5)?;
    let (first, bonus) = (node.input(0)?, node.input(3)?);
    let [size, count, ..] = first.ne;
    node.hold(bonus.is(F32) && bonus.packed() && bonus.elements() == size * count, "the bonus fits")
}

pub(super) fn wkv7(node: &Node<'_>) -> Checked {
    node.at_most(7)?;
    heads(node, &[0, 1, 2, 3, 4, 5], 6)
}

pub(super) fn gated_delta_net(node: &Node<'_>) -> Checked {
    let (q, k, v) = (node.input(0)?, node.input(1)?, node.input(2)?);
    let (gate, beta, state, out) = (node.input(3)?, node.input(4)?, node.input(5)?, node.out);
    node.at_most(6)?;
    node.hold([q, k, v, gate, beta, state, out].iter().all(|shape| shape.is(F32)), "types fit")?;
    let [size, heads, tokens, sequences] = v.ne;
    let ([q0, q1, q2, q3], [k0, k1, k2, k3], [g0, g1, g2, g3]) = (q.ne, k.ne, gate.ne);
    node.hold(q0 == size && k0 == size && q2 == tokens && k2 == tokens, "queries and keys fit")?;
    node.hold(divides(q1, heads) && divides(k1, heads), "heads fit")?;
    node.hold(divides(q3, sequences) && divides(k3, sequences), "sequences fit")?;
    node.hold((g0 == 1 || g0 == size) && [g1, g2, g3] == [heads, tokens, sequences], "the gate fits")?;
    node.hold(beta.ne == [1, heads, tokens, sequences], "beta fits")?;
    node.hold(state.elements() == size * size * heads * sequences, "the state fits")?;
    // Parameter 0 counts snapshots; clients that do not know of them send 0, which ggml refuses.
    let snapshots = node.count(0)?;
    let kept = (size * size * heads * sequences).checked_mul(snapshots);
    let scores = size * heads * tokens * sequences;
    node.hold(
        snapshots > 0 && kept.and_then(|kept| kept.checked_add(scores)) == Some(out.elements()),
        "the result fits",
    )?;
    let dense = [q, k, v].iter().all(|shape| shape.dense_rows());
    let packed = [gate, beta, state, out].iter().all(|shape| shape.packed());
    let [_, _, _, state_stride] = state.nb;
    node.hold(dense && packed && state_stride == size * size * heads * 4, "strides fit")
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn a_state_holds_a_square_for_each_head_and_sequence() {
        let each = plain(F32, [4, 3, 6, 1]);
        let (state, out) = (plain(F32, [48, 2, 1, 1]), plain(F32, [12, 14, 1, 1]));
        let inputs = [&each; 6];
        let mut all = inputs.to_vec();
        all.push(&state);
        assert!(verdict(Op::RwkvWkv7, &out, &all, &[]).is_ok());
        let wrong = plain(F32, [48, 1, 1, 1]);
        all[6] = &wrong;
        assert!(verdict(Op::RwkvWkv7, &out, &all, &[]).is_err());
        assert!(verdict(Op::RwkvWkv7, &out, &inputs, &[]).is_err());
    }

    #[test]
    fn a_scan_needs_all_seven() {
        let (state, x, dt) = (plain(F32, [8, 4, 2, 1]), plain(F32, [4, 2, 5, 1]), plain(F32, [2, 5, 1, 1]));
        let (a, b, ids) = (plain(F32, [1, 2, 1, 1]), plain(F32, [8, 1, 5, 1]), plain(I32, [1, 1, 1, 1]));
        let out = plain(F32, [40 + 64, 1, 1, 1]);
        assert!(verdict(Op::SsmScan, &out, &[&state, &x, &dt, &a, &b, &b, &ids], &[1]).is_ok());
        assert!(verdict(Op::SsmScan, &out, &[&state, &x, &dt, &a, &b, &b], &[1]).is_err());
        assert!(verdict(Op::SsmScan, &out, &[&state, &x, &dt, &a, &b, &b, &ids], &[2]).is_err());
    }
}
