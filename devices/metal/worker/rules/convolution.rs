// SPDX-License-Identifier: MIT OR Apache-2.0
//! Convolutions and poolings, as whisper's encoder and image encoders use them.

use super::{Checked, Node};
use crate::metal::worker::shape::{Shape, divides, kinds::*};

/// Largest stride, padding or dilation; products of it with sizes stay far from an `int`'s end.
const MAX_STEP: u64 = 1 << 14;

impl Node<'_> {
    fn step(&self, index: usize) -> Result<u64, super::RuleError> {
        let step = self.count(index)?;
        self.hold(step <= MAX_STEP, "strides, paddings and dilations are moderate")?;
        Ok(step)
    }

    fn stride(&self, index: usize) -> Result<u64, super::RuleError> {
        let step = self.step(index)?;
        self.hold(step > 0, "strides and dilations are not zero")?;
        Ok(step)
    }
}

/// How many places a kernel has along one dimension.
fn places(input: u64, kernel: u64, stride: u64, padding: u64, dilation: u64) -> Option<u64> {
    let reach = dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
    Some((input + 2 * padding).checked_sub(reach)? / stride + 1)
}

/// How long the result of a transposed kernel is along one dimension.
fn spread(input: u64, kernel: u64, stride: u64) -> Option<u64> {
    input.checked_sub(1)?.checked_mul(stride)?.checked_add(kernel)
}

fn small(shape: &Shape) -> bool {
    shape.ne.iter().all(|ne| *ne <= 1 << 24)
}

pub(super) fn im2col(node: &Node<'_>) -> Checked {
    let (kernel, input, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    let flat = match node.int(6) {
        0 => true,
        1 => false,
        _ => return node.hold(false, "two-dimensional is yes or no"),
    };
    let types = out.is(F32) && input.is(F32) || out.is(F16) && input.is_any(&[F32, F16]);
    node.hold(types && small(input) && small(kernel), "types fit")?;
    let ([k0, k1, k2, _], [i0, i1, i2, i3]) = (kernel.ne, input.ne);
    let across = places(i0, k0, node.stride(0)?, node.step(2)?, node.stride(4)?).unwrap_or(0);
    node.hold(across > 0, "the kernel fits into the input")?;
    if flat {
        node.hold(k1 == i1 && i3 == 1 && out.ne == [k1 * k0, across, i2, 1], "sizes fit")?;
    } else {
        let down = places(i1, k1, node.stride(1)?, node.step(3)?, node.stride(5)?).unwrap_or(0);
        node.hold(k2 == i2 && down > 0, "the kernel fits into the input")?;
        node.hold(out.ne == [k2 * k1 * k0, across, down, i3], "sizes fit")?;
    }
    // The kernel takes the input's planes as dense; strides between them go through an int.
    let planes = if flat { input.dense_rows() } else { input.dense_rows() && dense_planes(input) };
    let ints = input.nb.iter().all(|nb| i32::try_from(*nb).is_ok());
    node.hold(planes && ints && out.packed(), "strides fit")
}

/// Rows of a plane follow each other.
fn dense_planes(shape: &Shape) -> bool {
    let ([ne0, ne1, ..], [_, nb1, ..]) = (shape.ne, shape.nb);
    ne1 == 1 || nb1 == ne0 * shape.block_bytes
}

pub(super) fn transpose_1d(node: &Node<'_>) -> Checked {
    let (kernel, input, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(kernel.is_any(&[F16, F32]) && input.is(F32) && out.is(F32), "types fit")?;
    let ([k0, k1, k2, k3], [i0, i1, i2, i3]) = (kernel.ne, input.ne);
    let length = spread(i0, k0, node.stride(0)?).unwrap_or(0);
    node.hold(i2 == 1 && i3 == 1 && k2 == i1 && k3 == 1, "sizes fit")?;
    node.hold(node.int(1) == 0 && node.int(2) == 1, "no padding and no dilation")?;
    node.hold(length > 0 && out.ne == [length, k1, 1, 1] && small(out), "sizes fit")?;
    node.hold(kernel.packed() && input.dense_rows() && out.packed(), "strides fit")
}

pub(super) fn transpose_2d(node: &Node<'_>) -> Checked {
    let (kernel, input, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(kernel.is_any(&[F16, F32]) && input.is(F32) && out.is(F32), "types fit")?;
    let ([k0, k1, k2, k3], [i0, i1, i2, i3]) = (kernel.ne, input.ne);
    let stride = node.stride(0)?;
    let (across, down) = (spread(i0, k0, stride).unwrap_or(0), spread(i1, k1, stride).unwrap_or(0));
    // The kernel of ggml handles one image.
    node.hold(k3 == i2 && i3 == 1 && across > 0 && down > 0, "sizes fit")?;
    node.hold(out.ne == [across, down, k2, 1] && small(out), "sizes fit")?;
    node.hold(kernel.packed() && input.packed() && out.packed(), "no gaps")
}

fn plane(node: &Node<'_>, kernel: &Shape, input: &Shape) -> Result<(u64, u64), super::RuleError> {
    let ([k0, k1, ..], [i0, i1, ..]) = (kernel.ne, input.ne);
    let across = places(i0, k0, node.stride(0)?, node.step(2)?, node.stride(4)?).unwrap_or(0);
    let down = places(i1, k1, node.stride(1)?, node.step(3)?, node.stride(5)?).unwrap_or(0);
    node.hold(across > 0 && down > 0 && small(input) && small(kernel), "the kernel fits into the input")?;
    Ok((across, down))
}

pub(super) fn direct_2d(node: &Node<'_>) -> Checked {
    let (kernel, input, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(kernel.is_any(&[F16, F32]) && input.is(F32) && out.is(F32), "types fit")?;
    let (across, down) = plane(node, kernel, input)?;
    let ([_, _, k2, k3], [_, _, i2, i3]) = (kernel.ne, input.ne);
    node.hold(k2 == i2 && out.ne == [across, down, k3, i3], "sizes fit")?;
    node.hold(kernel.packed() && input.packed() && out.packed(), "no gaps")
}

pub(super) fn depthwise_2d(node: &Node<'_>) -> Checked {
    let (kernel, input, out) = (node.input(0)?, node.input(1)?, node.out);
    node.at_most(2)?;
    node.hold(kernel.is_any(&[F16, F32]) && input.is(F32) && out.is(F32), "types fit")?;
    let (across, down) = plane(node, kernel, input)?;
    let ([_, _, k2, k3], [_, _, i2, i3]) = (kernel.ne, input.ne);
    node.hold(k2 == 1 && k3 == i2 && out.ne == [across, down, i2, i3], "sizes fit")?;
    node.hold(kernel.packed() && input.packed() && out.packed(), "no gaps")
}

fn pooled(node: &Node<'_>) -> Result<(Shape, u64), super::RuleError> {
    let (a, out) = (*node.input(0)?, node.out);
    node.at_most(1)?;
    node.hold(a.is_any(&[F32, F16]) && out.is(F32) && small(&a), "types fit")?;
    node.hold(a.packed() && out.packed(), "no gaps")?;
    node.hold((0..=1).contains(&node.int(0)), "the pooling exists")?;
    Ok((a, out.rows()))
}

pub(super) fn pool_1d(node: &Node<'_>) -> Checked {
    let (a, rows) = pooled(node)?;
    node.hold(node.stride(1)? > 0 && node.stride(2)? > 0, "window and stride fit")?;
    node.step(3)?;
    node.hold(rows == a.rows(), "sizes fit")
}

pub(super) fn pool_2d(node: &Node<'_>) -> Checked {
    let (a, _) = pooled(node)?;
    for index in 1..5 {
        node.stride(index)?;
    }
    node.step(5)?;
    node.step(6)?;
    let ([_, _, a2, a3], [_, _, o2, o3]) = (a.ne, node.out.ne);
    node.hold(a2 == o2 && a3 == o3 && divides(a2 * a3, o2 * o3), "sizes fit")
}

#[cfg(test)]
mod tests {
    use crate::metal::rpc::Op;
    use crate::metal::worker::rules::tests::verdict;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    #[test]
    fn columns_are_counted_as_ggml_counts() {
        // whisper's first layer: 3 wide, 80 channels, padding 1.
        let (kernel, input) = (plain(F16, [3, 80, 384, 1]), plain(F32, [3000, 80, 1, 1]));
        let out = plain(F16, [240, 3000, 1, 1]);
        let params = [1, 0, 1, 0, 1, 0, 0];
        assert!(verdict(Op::Im2col, &out, &[&kernel, &input], &params).is_ok());
        assert!(verdict(Op::Im2col, &plain(F16, [240, 3001, 1, 1]), &[&kernel, &input], &params).is_err());
        assert!(verdict(Op::Im2col, &out, &[&kernel, &input], &[0, 0, 1, 0, 1, 0, 0]).is_err());
        assert!(verdict(Op::Im2col, &out, &[&kernel, &input], &[1, 0, -1, 0, 1, 0, 0]).is_err());
        assert!(verdict(Op::Im2col, &out, &[&plain(F16, [4000, 80, 384, 1]), &input], &params).is_err());
    }

    #[test]
    fn planes_need_matching_channels() {
        let (kernel, input) = (plain(F32, [3, 3, 4, 8]), plain(F32, [10, 10, 4, 1]));
        let out = plain(F32, [8, 8, 8, 1]);
        let params = [1, 1, 0, 0, 1, 1];
        assert!(verdict(Op::Conv2d, &out, &[&kernel, &input], &params).is_ok());
        assert!(verdict(Op::Conv2d, &out, &[&plain(F32, [3, 3, 5, 8]), &input], &params).is_err());
        assert!(verdict(Op::Pool2d, &plain(F32, [5, 5, 4, 1]), &[&input], &[1, 2, 2, 2, 2, 0, 0]).is_ok());
        assert!(verdict(Op::Pool2d, &plain(F32, [5, 5, 4, 1]), &[&input], &[2, 2, 2, 2, 2, 0, 0]).is_err());
    }
}
