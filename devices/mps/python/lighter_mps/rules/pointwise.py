# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pointwise operators, with broadcasting and promotion, and those in place."""

import torch

from .parts import CODES, broadcast, floating, pointwise, promote, real, single, table


def _unary(change):
    def rule(self, *_args, **_kwargs):
        real(self)
        return "s", [pointwise([self], change(self.dtype))]

    return rule


def _same(dtype):
    return dtype


def _same_but_bool(dtype):
    if dtype is torch.bool:
        raise ValueError("torch refuses bool here")
    return dtype


def _triangle(self, diagonal=0):
    if self.dim() < 2:
        raise ValueError("torch refuses this")
    return single(self.shape, self.dtype)


def _bool(_dtype):
    return torch.bool


def _binary(change, count=2):
    def rule(*args, **_kwargs):
        operands = args[:count]
        return "s", [pointwise(operands, change(promote(operands)))]

    return rule


def _with_alpha(change):
    def rule(self, other, alpha=1):
        dtype = change(promote((self, other)))
        if any(isinstance(value, torch.Tensor) and value.dtype is torch.bool for value in (self, other)) or dtype is torch.bool:
            raise ValueError("torch has checks for bool")
        return "s", [pointwise((self, other), dtype)]

    return rule


def _rounded_division(self, other, rounding_mode=None):
    dtype = promote((self, other))
    return "s", [pointwise((self, other), floating(dtype) if rounding_mode is None else dtype)]


def _where(condition, self, other):
    return "s", [pointwise((condition, self, other), promote((self, other)))]


def _ternary(self, first, second, value=1):
    return "s", [pointwise((self, first, second), promote((self, first, second)))]


def _lerp(self, end, weight):
    if self.dtype is not end.dtype:
        raise ValueError("types differ")
    return "s", [pointwise((self, end, weight), self.dtype)]


def _masked_fill(self, mask, value):
    real(self)
    if broadcast(self.shape, mask.shape) != tuple(self.shape):
        raise ValueError("self would be broadcast")
    return "s", [pointwise((self, mask), self.dtype)]


def _clamp(self, *limits, **named):
    operands = [self, *(value for value in (*limits, *named.values()) if value is not None)]
    return "s", [pointwise(operands, promote(operands))]


def _clone(self, memory_format=None):
    real(self)
    if memory_format is torch.contiguous_format:
        return single(self.shape, self.dtype)
    if memory_format not in (None, torch.preserve_format):
        raise ValueError("another memory format")
    return "s", [pointwise([self], self.dtype)]


def _native_dropout(input, p, train):
    if not train:
        raise ValueError("nothing is dropped")
    real(input)
    result = pointwise([input], input.dtype)
    return "t", [result, (*result[:2], CODES[torch.bool])]


# ---- in place: the result is the first argument, and the others have to fit it


def _in_place(*_args, **_kwargs):
    return "s", [0]


def _in_place_pointwise(self, *others, **named):
    real(self)
    operands = [value for value in (*others, *named.values()) if isinstance(value, torch.Tensor)]
    if self.dtype is torch.bool or any(value.dtype is torch.bool for value in operands):
        raise ValueError("torch has checks for bool")
    if any(value.is_complex() for value in operands):
        raise ValueError("complex")
    if broadcast(self.shape, *(value.shape for value in operands)) != tuple(self.shape):
        raise ValueError("self would be broadcast")
    numbers = [value for value in (*others, *named.values()) if type(value) in (int, float, bool, *(torch.Tensor,))]
    if not self.is_floating_point() and promote([self, *numbers]) is not self.dtype:
        raise ValueError("the result does not fit self")
    return "s", [0]


def _in_place_floating(self, *_args, **_kwargs):
    if not self.is_floating_point():
        raise ValueError("the result does not fit self")
    return "s", [0]


def _in_place_masked(self, mask, value):
    _masked_fill(self, mask, value)
    if not self.is_floating_point() and type(value) is not int:
        raise ValueError("the number may not fit self")
    return "s", [0]


RULES = table(
    (
        _unary(floating),
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
        "atanh sigmoid erf erfc erfinv lgamma digamma",
    ),
    (
        _unary(_same_but_bool),
        "neg relu floor ceil trunc round sign gelu silu mish hardswish hardsigmoid leaky_relu elu hardtanh softplus "
        "softshrink hardshrink threshold abs frac nan_to_num",
    ),
    (_unary(_same), "bitwise_not"),
    (_triangle, "tril triu"),
    (_unary(_bool), "logical_not isnan isinf signbit"),
    (_clone, "clone"),
    (_binary(_bool), " ".join(f"{name}.Tensor {name}.Scalar" for name in "eq ne lt le gt ge".split())),
    (_binary(_bool), "logical_and logical_or logical_xor"),
    (_with_alpha(_same), "add.Tensor sub.Tensor rsub.Scalar add.Scalar sub.Scalar"),
    (_binary(_same), "mul.Tensor mul.Scalar maximum minimum fmin fmax remainder.Tensor fmod.Tensor remainder.Scalar"),
    (_binary(_same), "pow.Tensor_Tensor pow.Tensor_Scalar bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor"),
    (_binary(floating), "div.Tensor div.Scalar atan2"),
    (_rounded_division, "div.Tensor_mode div.Scalar_mode"),
    (_where, "where.self"),
    (_ternary, "addcmul addcdiv"),
    (_lerp, "lerp.Tensor lerp.Scalar"),
    (_masked_fill, "masked_fill.Scalar"),
    (_clamp, "clamp clamp.Tensor clamp_min clamp_max"),
    (_native_dropout, "native_dropout"),
    (_binary(_same), "threshold_backward sigmoid_backward tanh_backward gelu_backward silu_backward"),
    (_in_place, "zero_ fill_.Scalar random_ random_.from random_.to bernoulli_.float"),
    (_in_place_floating, "exp_ sqrt_ normal_ uniform_ exponential_"),
    (_in_place_masked, "masked_fill_.Scalar"),
    (
        _in_place_pointwise,
        "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor copy_ addcmul_ addcdiv_ lerp_.Scalar clamp_ clamp_min_ relu_ "
        "neg_",
    ),
)
