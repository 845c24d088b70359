// SPDX-License-Identifier: MIT OR Apache-2.0
//! What each operation needs of its inputs, so that ggml neither asserts nor reaches outside them.
//!
//! Rules follow ggml's constructors and its CPU kernels. An operation without a rule is not computed; those
//! with function pointers in their parameters never get one. Indices within data cannot be checked here.

mod attention;
mod convolution;
mod elementwise;
mod matrix;
mod moving;
mod recurrent;
mod reduce;

use super::shape::Shape;
use crate::metal::rpc::{MAX_PARAMS, MAX_SOURCES, Op};

/// Why a node is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RuleError {
    /// The operation is not on the list.
    #[error("{} is not served", .0.name())]
    NotServed(Op),
    /// An input is missing.
    #[error("{} has no input {slot}", .op.name())]
    Missing {
        /// The operation.
        op: Op,
        /// Its place.
        slot: usize,
    },
    /// An input that the operation does not have.
    #[error("{} has an input {slot} too many", .op.name())]
    Surplus {
        /// The operation.
        op: Op,
        /// Its place.
        slot: usize,
    },
    /// Something that does not hold.
    #[error("{}: {what}", .op.name())]
    Broken {
        /// The operation.
        op: Op,
        /// What should hold.
        what: &'static str,
    },
}

/// A node as the rules see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node<'a> {
    pub(crate) op: Op,
    /// For [`Op::Unary`], the name of the operation within.
    pub(crate) unary: Option<&'static str>,
    pub(crate) out: &'a Shape,
    pub(crate) src: [Option<&'a Shape>; MAX_SOURCES],
    pub(crate) params: &'a [i32; MAX_PARAMS],
}

type Checked = Result<(), RuleError>;

impl<'a> Node<'a> {
    /// Requires something.
    fn hold(&self, holds: bool, what: &'static str) -> Checked {
        if holds { Ok(()) } else { Err(RuleError::Broken { op: self.op, what }) }
    }

    /// An input that must be there.
    fn input(&self, slot: usize) -> Result<&'a Shape, RuleError> {
        self.optional(slot).ok_or(RuleError::Missing { op: self.op, slot })
    }

    fn optional(&self, slot: usize) -> Option<&'a Shape> {
        self.src.get(slot).copied().flatten()
    }

    /// Requires that no inputs follow the first `count`.
    fn at_most(&self, count: usize) -> Checked {
        match self.src.iter().skip(count).position(Option::is_some) {
            None => Ok(()),
            Some(beyond) => Err(RuleError::Surplus { op: self.op, slot: count + beyond }),
        }
    }

    fn int(&self, index: usize) -> i32 {
        self.params.get(index).copied().unwrap_or(0)
    }

    /// A parameter that counts, so it must not be negative.
    fn count(&self, index: usize) -> Result<u64, RuleError> {
        u64::try_from(self.int(index))
            .map_err(|_| RuleError::Broken { op: self.op, what: "parameters are not negative" })
    }

    fn float(&self, index: usize) -> f32 {
        f32::from_bits(self.int(index).cast_unsigned())
    }
}

/// Checks one node.
///
/// # Errors
/// When its operation has no rule, or breaks it.
pub(crate) fn check(node: &Node<'_>) -> Checked {
    match node.op {
        Op::None => Ok(()),
        Op::Reshape | Op::View | Op::Permute | Op::Transpose => node.input(0).and(node.at_most(1)),
        Op::Add | Op::Sub | Op::Mul | Op::Div => elementwise::binary(node),
        Op::Add1 => elementwise::add_scalar(node),
        Op::AddId => elementwise::add_by_id(node),
        Op::Acc | Op::Set => elementwise::into_part(node),
        Op::Sqr | Op::Sqrt | Op::Log | Op::Sin | Op::Cos => elementwise::unary(node),
        Op::Unary => elementwise::named_unary(node),
        Op::LeakyRelu => elementwise::leaky_relu(node),
        Op::Glu => elementwise::gated(node),
        Op::Scale => elementwise::scale(node),
        Op::Clamp => elementwise::clamp(node),
        Op::Fill => elementwise::fill(node),
        Op::Sum => reduce::sum(node),
        Op::SumRows | Op::Mean => reduce::rows(node),
        Op::Cumsum => reduce::cumulative(node),
        Op::Argmax => reduce::argmax(node),
        Op::CountEqual => reduce::count_equal(node),
        Op::Norm | Op::RmsNorm | Op::L2Norm => reduce::norm(node),
        Op::GroupNorm => reduce::group_norm(node),
        Op::Argsort => reduce::argsort(node),
        Op::TopK => reduce::top_k(node),
        Op::MulMat => matrix::multiply(node),
        Op::MulMatId => matrix::multiply_by_id(node),
        Op::OutProd => matrix::outer(node),
        Op::SolveTri => matrix::solve_triangular(node),
        Op::Tri => matrix::triangle(node),
        Op::Diag => matrix::diagonal(node),
        Op::DiagMaskInf | Op::DiagMaskZero => matrix::diagonal_mask(node),
        Op::Dup | Op::Cont | Op::Cpy => moving::copy(node),
        Op::Repeat => moving::repeat(node),
        Op::Concat => moving::concat(node),
        Op::GetRows => moving::get_rows(node),
        Op::SetRows => moving::set_rows(node),
        Op::Pad => moving::pad(node),
        Op::PadReflect1d => moving::pad_reflect(node),
        Op::Roll => moving::roll(node),
        Op::Arange => moving::arange(node),
        Op::Upscale => moving::upscale(node),
        Op::TimestepEmbedding => moving::timestep(node),
        Op::SoftMax => attention::soft_max(node),
        Op::Rope => attention::rope(node),
        Op::FlashAttnExt => attention::flash(node),
        Op::Im2col => convolution::im2col(node),
        Op::ConvTranspose1d => convolution::transpose_1d(node),
        Op::ConvTranspose2d => convolution::transpose_2d(node),
        Op::Conv2d => convolution::direct_2d(node),
        Op::Conv2dDw => convolution::depthwise_2d(node),
        Op::Pool1d => convolution::pool_1d(node),
        Op::Pool2d => convolution::pool_2d(node),
        Op::SsmConv => recurrent::ssm_conv(node),
        Op::SsmScan => recurrent::ssm_scan(node),
        Op::RwkvWkv6 | Op::GatedLinearAttn => recurrent::linear_attention(node),
        Op::RwkvWkv7 => recurrent::wkv7(node),
        Op::GatedDeltaNet => recurrent::gated_delta_net(node),
        op => Err(RuleError::NotServed(op)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::metal::rpc::LATEST_OPS;
    use crate::metal::worker::shape::kinds::*;
    use crate::metal::worker::shape::tests::plain;

    /// Checks a node made of its parts.
    pub(crate) fn verdict(op: Op, out: &Shape, src: &[&Shape], params: &[i32]) -> Checked {
        let mut sources = [None; MAX_SOURCES];
        for (slot, shape) in sources.iter_mut().zip(src) {
            *slot = Some(*shape);
        }
        let mut all = [0; MAX_PARAMS];
        all[..params.len()].copy_from_slice(params);
        check(&Node { op, unary: None, out, src: sources, params: &all })
    }

    #[test]
    fn operations_that_call_the_client_are_never_served() {
        let shape = plain(F32, [4, 1, 1, 1]);
        for op in [Op::MapCustom1, Op::MapCustom2, Op::MapCustom3, Op::Custom] {
            assert_eq!(verdict(op, &shape, &[&shape], &[]), Err(RuleError::NotServed(op)));
        }
    }

    #[test]
    fn nothing_computes_without_inputs() {
        let shape = plain(F32, [4, 1, 1, 1]);
        for op in LATEST_OPS {
            if !matches!(op, Op::None | Op::Arange) {
                assert!(verdict(*op, &shape, &[], &[]).is_err(), "{}", op.name());
            }
        }
    }

    #[test]
    fn at_least_sixty_operations_have_a_rule() {
        let shape = plain(F32, [4, 1, 1, 1]);
        let served = LATEST_OPS
            .iter()
            .filter(|op| !matches!(verdict(**op, &shape, &[], &[]), Err(RuleError::NotServed(_))))
            .count();
        assert!(served >= 60, "{served}");
    }
}
