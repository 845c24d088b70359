// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that move elements: copies, rows by index, paddings.

use super::{Checked, Node};
use crate::metal::rpc::Op;
use crate::metal::worker::shape::{Shape, divides, kinds::*};

/// Types that rows of numbers can be stored into.
pub(super) const STORE_KINDS: [u32; 9] = [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL];
/// Types of single numbers that are converted into each other.
const FLOATS: [u32; 3] = [F32, F16, BF16];

/// The copy's target, where an input, is the result itself under another id or a view with the same shape.
pub(super) fn copy(node: &Node<'_>) -> Checked {
    let (from, to) = (node.input(0)?, node.out);
    node.at_most(if matches!(node.op, Op::Cpy) { 2 } else { 1 })?;
    if let Some(target) = node.optional(1) {
        node.hold(target.kind == to.kind && target.elements() == to.elements(), "the target is the result")?;
    }
    node.hold(from.elements() == to.elements(), "as many elements")?;
    if from.kind == to.kind {
        let alike = from.same_sizes(to) && from.dense_rows() && to.dense_rows();
        return node.hold(!from.quantized || alike || (from.packed() && to.packed()), "blocks stay whole");
    }
    let float = |shape: &Shape| shape.is_any(&FLOATS);
    if float(from) && to.quantized {
        node.hold(to.is_any(&STORE_KINDS), "numbers can be stored so")?;
        return node.hold(from.dense_rows() && to.packed() && from.same_sizes(to), "strides fit");
    }
    if from.quantized && to.is(F32) {
        return node.hold(from.dense_rows() && to.packed() && from.same_sizes(to), "strides fit");
    }
    let numbers = (float(from) && float(to)) || (from.is(F32) && to.is(I32)) || (from.is(I32) && to.is(F32));
    node.hold(numbers, "types convert")
}

pub(super) fn repeat(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    // The second input of old clients only lends its sizes.
    node.at_most(2)?;
    node.hold(a.is_any(&[F32, F16, BF16, I16, I32]) && out.kind == a.kind, "types fit")?;
    node.hold(a.repeats_to(out), "the input repeats to the result")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn concat(node: &Node<'_>) -> Checked {
    let (a, b, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    let dimension = usize::try_from(node.int(0)).unwrap_or(usize::MAX);
    node.hold(dimension < 4, "the dimension exists")?;
    node.hold(a.kind == b.kind && a.kind == out.kind && !a.quantized, "types fit")?;
    let fits = a.ne.iter().zip(&b.ne).zip(&out.ne).enumerate();
    for (index, ((a, b), out)) in fits {
        let want = if index == dimension { *a + *b } else { *a };
        node.hold(*out == want && (index == dimension || a == b), "sizes fit")?;
    }
    node.hold([a, b, out].iter().all(|shape| shape.dense_rows()), "rows are dense")
}

pub(super) fn get_rows(node: &Node<'_>) -> Checked {
    let (a, rows, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(a.quantized || a.is_any(&[F32, F16, BF16, I32]), "the table's type fits")?;
    node.hold(rows.is(I32), "indices are whole numbers")?;
    node.hold(out.is(if a.is(I32) { I32 } else { F32 }), "the result's type fits")?;
    let ([a0, _, a2, a3], [r0, r1, r2, r3]) = (a.ne, rows.ne);
    node.hold(a2 == r1 && a3 == r2 && r3 == 1 && out.ne == [a0, r0, r1, r2], "sizes fit")?;
    node.hold(a.dense_rows() && rows.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn set_rows(node: &Node<'_>) -> Checked {
    let (from, rows, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(3)?;
    if let Some(target) = node.optional(2) {
        node.hold(target.kind == out.kind && target.same_sizes(out), "the target is the result")?;
    }
    node.hold(from.is_any(&[F32, F16]) && rows.is_any(&[I32, I64]), "types fit")?;
    node.hold(out.is_any(&STORE_KINDS) && (from.is(F32) || out.is(F16)), "numbers can be stored so")?;
    let ([f0, f1, f2, f3], [r0, r1, r2, r3], [o0, _, o2, o3]) = (from.ne, rows.ne, out.ne);
    node.hold(f0 == o0 && f2 == o2 && f3 == o3, "rows fit")?;
    node.hold(f1 == r0 && divides(r1, f2) && divides(r2, f3) && r3 == 1, "indices fit")?;
    node.hold(from.dense_rows() && rows.dense_rows() && out.dense_rows(), "rows are dense")
}

pub(super) fn pad(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32), "types fit")?;
    node.hold(!a.is_empty() && out.packed(), "strides fit")?;
    // Pairs of left and right; clients before ggml 0.9.5 send four right ones, which read as other pairs.
    for (index, (a, out)) in a.ne.iter().zip(&out.ne).enumerate() {
        let (left, right) = (node.count(2 * index)?, node.count(2 * index + 1)?);
        node.hold(*out == a + left + right, "sizes fit")?;
        // A circular pad wraps around once.
        node.hold(node.int(8) == 0 || (left <= *a && right <= *a), "pads fit")?;
    }
    node.hold((0..=1).contains(&node.int(8)), "circular is yes or no")
}

pub(super) fn pad_reflect(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    let (left, right) = (node.count(0)?, node.count(1)?);
    let [a0, a1, a2, a3] = a.ne;
    node.hold(a.is(F32) && out.is(F32), "types fit")?;
    node.hold(left < a0 && right < a0 && out.ne == [a0 + left + right, a1, a2, a3], "sizes fit")?;
    node.hold(a.packed() && out.dense_rows(), "strides fit")
}

pub(super) fn roll(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32) && a.same_sizes(out), "types and sizes fit")?;
    node.hold(a.dense_rows() && out.dense_rows(), "rows are dense")?;
    for (index, ne) in a.ne.iter().enumerate() {
        node.hold(u64::from(node.int(index).unsigned_abs()) < *ne, "shifts are shorter than sizes")?;
    }
    node.hold([a, out].iter().all(|shape| shape.nb.iter().all(|nb| nb % 4 == 0)), "strides fit")
}

pub(super) fn arange(node: &Node<'_>) -> Checked {
    node.at_most(0)?;
    let (start, stop, step) = (node.float(0), node.float(1), node.float(2));
    node.hold(node.out.is(F32) && node.out.packed(), "the result fits")?;
    let steps = ((stop - start) / step).ceil();
    // Compared as ggml computes it; a number that no count equals is refused.
    #[expect(clippy::cast_precision_loss, reason = "only equality within a float's whole numbers passes")]
    let count = node.out.elements() as f32;
    node.hold(steps > 0.0 && steps < 16_777_216.0 && steps == count, "as many steps as elements")
}

pub(super) fn upscale(node: &Node<'_>) -> Checked {
    /// The mode's own number; what is above are flags.
    const MODE: i32 = 0xff;
    /// Flags that exist: align corners, and antialias.
    const FLAGS: i32 = 0x300;
    const BILINEAR: i32 = 1;
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is(F32) && out.is(F32), "types fit")?;
    node.hold(!a.is_empty() && a.dense_rows() && out.dense_rows(), "strides fit")?;
    let mode = node.int(0);
    node.hold((0..=2).contains(&(mode & MODE)) && mode & !(MODE | FLAGS) == 0, "the mode exists")?;
    node.hold(mode & 0x200 == 0 || mode & MODE == BILINEAR, "the mode exists")?;
    // Positions are computed in floats; beyond these sizes rounding could lead past the end.
    let small = |shape: &Shape| shape.ne.iter().all(|ne| *ne <= 1 << 16);
    node.hold(small(a) && small(out), "sizes are moderate")?;
    let grows = a.ne.iter().zip(&out.ne).all(|(a, out)| divides(*a, *out));
    node.hold(grows || mode & MODE != 0, "nearest neighbours scale by whole numbers")
}

pub(super) fn timestep(node: &Node<'_>) -> Checked {
    let (a, out) = (node.input(0)?, node.out);
    node.at_most(1)?;
    let [a0, a1, a2, a3] = a.ne;
    let width = node.count(0)?;
    node.hold(a.is(F32) && out.is(F32), "types fit")?;
    node.hold(width > 0 && a1 * a2 * a3 == 1, "sizes fit")?;
    // An odd width is padded to an even one by older ggml.
    node.hold(out.ne == [width, a0, 1, 1] || out.ne == [width.next_multiple_of(2), a0, 1, 1], "sizes fit")?;
    node.hold(a.dense_rows() && out.packed() && node.int(1) > 0, "strides fit")
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn copies_convert_what_ggml_converts() {
        let numbers = plain(F32, [64, 2, 1, 1]);
        for (op, to, fits) in [
            (Op::Cpy, plain(F16, [128, 1, 1, 1]), true),
            (Op::Cpy, plain(Q8_0, [64, 2, 1, 1]), true),
            (Op::Cont, plain(F32, [2, 64, 1, 1]), true),
            (Op::Cpy, plain(I64, [64, 2, 1, 1]), false),
            (Op::Cpy, plain(F16, [64, 3, 1, 1]), false),
        ] {
            assert_eq!(verdict(op, &to, &[&numbers], &[]).is_ok(), fits, "{to:?}");
        }
        let blocks = plain(Q8_0, [64, 2, 1, 1]);
        assert!(verdict(Op::Cpy, &plain(Q4_0, [64, 2, 1, 1]), &[&blocks], &[]).is_err());
        assert!(verdict(Op::Cpy, &numbers, &[&blocks, &numbers], &[]).is_ok());
    }

    #[test]
    fn rows_are_taken_by_whole_numbers() {
        let (table, out) = (plain(Q4_0, [64, 9, 1, 1]), plain(F32, [64, 3, 1, 1]));
        assert!(verdict(Op::GetRows, &out, &[&table, &plain(I32, [3, 1, 1, 1])], &[]).is_ok());
        assert!(verdict(Op::GetRows, &out, &[&table, &plain(F32, [3, 1, 1, 1])], &[]).is_err());
        assert!(verdict(Op::GetRows, &out, &[&table, &plain(I32, [4, 1, 1, 1])], &[]).is_err());
        let (cache, new) = (plain(F16, [64, 9, 1, 1]), plain(F32, [64, 3, 1, 1]));
        assert!(verdict(Op::SetRows, &cache, &[&new, &plain(I64, [3, 1, 1, 1]), &cache], &[]).is_ok());
        assert!(verdict(Op::SetRows, &cache, &[&new, &plain(I64, [2, 1, 1, 1]), &cache], &[]).is_err());
        assert!(
            verdict(Op::SetRows, &plain(I32, [64, 9, 1, 1]), &[&new, &plain(I64, [3, 1, 1, 1])], &[])
                .is_err()
        );
    }

    #[test]
    fn paddings_and_ranges_count() {
        let (a, out) = (plain(F32, [4, 2, 1, 1]), plain(F32, [7, 2, 1, 1]));
        assert!(verdict(Op::Pad, &out, &[&a], &[1, 2]).is_ok());
        assert!(verdict(Op::Pad, &out, &[&a], &[-1, 4]).is_err());
        assert!(verdict(Op::PadReflect1d, &out, &[&a], &[0, 3]).is_ok());
        assert!(verdict(Op::PadReflect1d, &plain(F32, [9, 2, 1, 1]), &[&a], &[0, 5]).is_err());
        let float = |value: f32| value.to_bits().cast_signed();
        let range = [float(0.0), float(7.0), float(1.0)];
        assert!(verdict(Op::Arange, &plain(F32, [7, 1, 1, 1]), &[], &range).is_ok());
        assert!(verdict(Op::Arange, &plain(F32, [8, 1, 1, 1]), &[], &range).is_err());
        assert!(verdict(Op::Arange, &plain(F32, [8, 1, 1, 1]), &[], &[0, 0, 0]).is_err());
    }

    #[test]
    fn joined_sizes_add_up() {
        let (a, b) = (plain(F32, [4, 2, 1, 1]), plain(F32, [4, 3, 1, 1]));
        assert!(verdict(Op::Concat, &plain(F32, [4, 5, 1, 1]), &[&a, &b], &[1]).is_ok());
        assert!(verdict(Op::Concat, &plain(F32, [8, 2, 1, 1]), &[&a, &b], &[0]).is_err());
        assert!(verdict(Op::Concat, &plain(F32, [4, 5, 1, 1]), &[&a, &b], &[4]).is_err());
    }
}
