// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much work a node is, roughly, in multiplications: small groups of nodes cost more to send than to compute. Pure.

use alloc::vec::Vec;

/// Below this a group stays in the container: about 0.1 ms on one core, which is what a round trip takes.
pub(crate) const MIN_WORK: u64 = 1_000_000;
/// What an unknown dimension counts as; a first one, the batch, counts as 1.
const UNKNOWN_DIM: u64 = 32;
/// What a weight counts as when the shape of the output is unknown.
const USES_OF_A_WEIGHT: u64 = 1024;
/// Elements that are added, compared or moved in the time of a multiplication, with the cost of sending them.
const ELEMENTS_PER_MULTIPLICATION: u64 = 16;

/// Dimensions as far as they are known; `None` for an unknown rank.
pub(crate) type Shape = Option<Vec<Option<u64>>>;

/// Multiplications of one node.
pub(crate) fn of_node(operator: &[u8], inputs: &[Shape], output: &Shape) -> u64 {
    let weights = |index: usize| inputs.get(index).and_then(elements);
    let made = elements(output);
    match operator {
        b"Conv" | b"ConvTranspose" | b"ConvInteger" | b"FusedConv" | b"DeformConv" => {
            convolution(inputs.get(1), made)
        }
        b"QLinearConv" => convolution(inputs.get(3), made),
        b"MatMul" | b"Gemm" | b"MatMulInteger" | b"FusedMatMul" | b"QLinearMatMul" => {
            let inner = inputs.first().and_then(Option::as_ref).and_then(|dims| *dims.last()?);
            made.map_or_else(
                || weights(1).unwrap_or(1).saturating_mul(USES_OF_A_WEIGHT),
                |made| made.saturating_mul(inner.unwrap_or(UNKNOWN_DIM)),
            )
        }
        b"LSTM" | b"GRU" | b"RNN" => {
            let steps = inputs.first().and_then(Option::as_ref).and_then(|dims| *dims.first()?);
            let weights = weights(1).unwrap_or(1).saturating_add(weights(2).unwrap_or(1));
            weights.saturating_mul(steps.unwrap_or(UNKNOWN_DIM))
        }
        _ if operator.ends_with(b"Attention") => made.unwrap_or(USES_OF_A_WEIGHT).saturating_mul(UNKNOWN_DIM),
        _ => made.unwrap_or(0) / ELEMENTS_PER_MULTIPLICATION,
    }
}

fn convolution(weights: Option<&Shape>, made: Option<u64>) -> u64 {
    let weights = weights.and_then(Option::as_ref);
    let all = product(weights.map(Vec::as_slice).unwrap_or_default());
    let kernels = weights.and_then(|dims| *dims.first()?).unwrap_or(1).max(1);
    made.map_or_else(
        || all.saturating_mul(USES_OF_A_WEIGHT),
        |made| made.saturating_mul((all / kernels).max(1)),
    )
}

fn elements(shape: &Shape) -> Option<u64> {
    shape.as_deref().map(product)
}

fn product(dims: &[Option<u64>]) -> u64 {
    let known = |(place, dim): (usize, &Option<u64>)| dim.unwrap_or(if place == 0 { 1 } else { UNKNOWN_DIM });
    dims.iter().enumerate().map(known).fold(1, u64::saturating_mul)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(dims: &[u64]) -> Shape {
        Some(dims.iter().map(|dim| Some(*dim)).collect())
    }

    #[test]
    fn a_layer_of_a_real_net_is_worth_sending_and_a_toy_is_not() {
        let first_of_resnet = [shape(&[1, 3, 224, 224]), shape(&[64, 3, 7, 7])];
        assert_eq!(of_node(b"Conv", &first_of_resnet, &shape(&[1, 64, 112, 112])), 112 * 112 * 64 * 3 * 49);
        assert!(of_node(b"Mul", &[shape(&[3, 2]), shape(&[3, 2])], &shape(&[3, 2])) < MIN_WORK);
        let classifier = [shape(&[1, 2048]), shape(&[2048, 1000])];
        assert_eq!(of_node(b"Gemm", &classifier, &shape(&[1, 1000])), 2_048_000);
        let speech = [shape(&[7, 1, 128]), shape(&[1, 512, 128]), shape(&[1, 512, 128])];
        assert_eq!(of_node(b"LSTM", &speech, &None), 7 * 2 * 512 * 128);
    }

    #[test]
    fn what_is_unknown_neither_vanishes_nor_overflows() {
        let free = Some(vec![None, Some(3), None, None]);
        assert!(
            of_node(b"Conv", &[free.clone(), shape(&[64, 3, 3, 3])], &Some(vec![None, Some(64), None, None]))
                > MIN_WORK
        );
        assert!(of_node(b"Conv", &[None, shape(&[64, 3, 3, 3])], &None) > MIN_WORK);
        assert_eq!(of_node(b"Conv", &[], &None), USES_OF_A_WEIGHT);
        assert_eq!(of_node(b"Relu", &[None], &None), 0);
        assert_eq!(of_node(b"MatMul", &[shape(&[u64::MAX])], &shape(&[u64::MAX])), u64::MAX);
    }
}
