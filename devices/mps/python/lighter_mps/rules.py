# SPDX-License-Identifier: MIT OR Apache-2.0
"""What hot operators give, worked out here: sizes, strides and element type of their results, with no round trip.

`signatures.miss` asks `predict` at the first sight of a signature, so that shapes which change at every step (a growing
cache of keys and values) do not wait for the host. A rule that is not sure gives None, and the host is asked. The host
checks every result against the prediction, so that a wrong rule is an error and never wrong data; strides that differ
are laid out anew. Operators that are put together here: pointwise ones with broadcasting and promotion, products of
matrices, joins, softmax, reductions, normalisation, and indexing with whole numbers. Arguments that a rule would have
to check (and that the user got wrong) also give None: the host's error is then raised at the user's line.
"""

import torch
from lighter_mps_wire.dtypes import tables

from .tensors import contiguous_strides

_codes = tables().codes
_tensor = torch.Tensor


def predict(name: str, args, kwargs):
    """(shape, results) as a plan has them, or None where the host has to be asked."""
    rule = _RULES.get(name)
    if rule is None:
        return None
    try:
        return rule(*args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        # Forms of arguments that the rule does not have; whether they are right the host says.
        return None


# ---- parts that rules are made of


def fresh(sizes, dtype):
    """A new result, contiguous."""
    sizes = tuple(sizes)
    return sizes, contiguous_strides(sizes), _codes[dtype]


def single(sizes, dtype):
    """One new result."""
    return "s", [fresh(sizes, dtype)]


def _device(value) -> bool:
    return isinstance(value, _tensor) and value.is_mps


def broadcast(*shapes):
    """The common shape; ValueError where there is none."""
    rank = max(map(len, shapes))
    out = [1] * rank
    for shape in shapes:
        at = rank - len(shape)
        for size in shape:
            if out[at] == 1:
                out[at] = size
            elif size != 1 and size != out[at]:
                raise ValueError("shapes do not broadcast")
            at += 1
    return tuple(out)


def _combine(higher, lower):
    if higher is None or lower is None:
        return higher if lower is None else lower
    if higher.is_floating_point:
        return higher
    if higher is torch.bool or lower.is_floating_point:
        return torch.promote_types(higher, lower)
    return higher


_NUMBER_TYPES = {bool: torch.bool, int: torch.int64}


def promote(operands):
    """The element type that pointwise operators compute in: tensors with dimensions before those without, then numbers."""
    with_dims = without = numbers = None
    for value in operands:
        if isinstance(value, _tensor):
            if value.is_complex():
                raise ValueError("complex")
            if not value.is_mps:
                dtype = torch.get_default_dtype() if value.is_floating_point() else value.dtype
                numbers = dtype if numbers is None else torch.promote_types(numbers, dtype)
            elif value.dim():
                with_dims = value.dtype if with_dims is None else torch.promote_types(with_dims, value.dtype)
            else:
                without = value.dtype if without is None else torch.promote_types(without, value.dtype)
        else:
            dtype = torch.get_default_dtype() if type(value) is float else _NUMBER_TYPES[type(value)]
            numbers = dtype if numbers is None else torch.promote_types(numbers, dtype)
    return _combine(with_dims, _combine(without, numbers))


def pointwise(operands, dtype):
    """A new result with the shape, and as far as that is simple the strides, that a pointwise operator gives."""
    shapes = [value.shape for value in operands if isinstance(value, _tensor)]
    sizes = broadcast(*shapes)
    full = [value for value in operands if _device(value) and value.shape == sizes]
    if all(value.is_contiguous() for value in full):
        return sizes, contiguous_strides(sizes), _codes[dtype]
    strides = full[0].stride()
    if len(full) == len(shapes) and all(value.stride() == strides for value in full) and _dense(full[0]):
        return sizes, strides, _codes[dtype]
    raise ValueError("strides are not simple")


def _dense(tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    return tensor.permute(order).is_contiguous()


def _floating(dtype):
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _real(*values) -> None:
    if any(isinstance(value, _tensor) and value.is_complex() for value in values):
        raise ValueError("complex")


def _plain(*values) -> None:
    _real(*values)
    if not all(_device(value) and value.is_contiguous() for value in values):
        raise ValueError("not contiguous")


# ---- pointwise


def _unary(change):
    def rule(self, *_args, **_kwargs):
        _real(self)
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
        if any(isinstance(value, _tensor) and value.dtype is torch.bool for value in (self, other)) or dtype is torch.bool:
            raise ValueError("torch has checks for bool")
        return "s", [pointwise((self, other), dtype)]

    return rule


def _rounded_division(self, other, rounding_mode=None):
    dtype = promote((self, other))
    return "s", [pointwise((self, other), _floating(dtype) if rounding_mode is None else dtype)]


def _where(condition, self, other):
    return "s", [pointwise((condition, self, other), promote((self, other)))]


def _ternary(self, first, second, value=1):
    return "s", [pointwise((self, first, second), promote((self, first, second)))]


def _lerp(self, end, weight):
    if self.dtype is not end.dtype:
        raise ValueError("types differ")
    return "s", [pointwise((self, end, weight), self.dtype)]


def _masked_fill(self, mask, value):
    _real(self)
    if broadcast(self.shape, mask.shape) != tuple(self.shape):
        raise ValueError("self would be broadcast")
    return "s", [pointwise((self, mask), self.dtype)]


def _clamp(self, *limits, **named):
    operands = [self, *(value for value in (*limits, *named.values()) if value is not None)]
    return "s", [pointwise(operands, promote(operands))]


def _clone(self, memory_format=None):
    _real(self)
    if memory_format is torch.contiguous_format:
        return single(self.shape, self.dtype)
    if memory_format not in (None, torch.preserve_format):
        raise ValueError("another memory format")
    return "s", [pointwise([self], self.dtype)]


def _native_dropout(input, p, train):
    if not train:
        raise ValueError("nothing is dropped")
    _real(input)
    result = pointwise([input], input.dtype)
    return "t", [result, (*result[:2], _codes[torch.bool])]


# ---- in place: the result is the first argument, and the others have to fit it


def _in_place(*_args, **_kwargs):
    return "s", [0]


def _in_place_pointwise(self, *others, **named):
    _real(self)
    operands = [value for value in (*others, *named.values()) if isinstance(value, _tensor)]
    if self.dtype is torch.bool or any(value.dtype is torch.bool for value in operands):
        raise ValueError("torch has checks for bool")
    if any(value.is_complex() for value in operands):
        raise ValueError("complex")
    if broadcast(self.shape, *(value.shape for value in operands)) != tuple(self.shape):
        raise ValueError("self would be broadcast")
    numbers = [value for value in (*others, *named.values()) if type(value) in (int, float, bool, *(_tensor,))]
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


# ---- products


def _same_type(*values):
    _real(*values)
    if any(value.dtype is not values[0].dtype for value in values):
        raise ValueError("types differ")
    return values[0].dtype


def _mm(self, mat2):
    (rows, inner), (inner2, columns) = self.shape, mat2.shape
    if inner != inner2:
        raise ValueError("sizes do not fit")
    return single((rows, columns), _same_type(self, mat2))


def _addmm(self, mat1, mat2, beta=1, alpha=1):
    dtype = _same_type(self, mat1, mat2)
    (rows, inner), (inner2, columns) = mat1.shape, mat2.shape
    if inner != inner2 or broadcast(self.shape, (rows, columns)) != (rows, columns):
        raise ValueError("sizes do not fit")
    return single((rows, columns), dtype)


def _bmm(self, mat2):
    (batch, rows, inner), (batch2, inner2, columns) = self.shape, mat2.shape
    if inner != inner2 or batch != batch2:
        raise ValueError("sizes do not fit")
    return single((batch, rows, columns), _same_type(self, mat2))


def _baddbmm(self, batch1, batch2, beta=1, alpha=1):
    dtype = _same_type(self, batch1, batch2)
    sizes = _bmm(batch1, batch2)[1][0][0]
    if broadcast(self.shape, sizes) != sizes:
        raise ValueError("sizes do not fit")
    return single(sizes, dtype)


def _mv(self, vec):
    (rows, inner), (inner2,) = self.shape, vec.shape
    if inner != inner2:
        raise ValueError("sizes do not fit")
    return single((rows,), _same_type(self, vec))


def _dot(self, tensor):
    if self.dim() != 1 or self.shape != tensor.shape:
        raise ValueError("sizes do not fit")
    return single((), _same_type(self, tensor))


# ---- joining, repeating, padding


def _cat(tensors, dim=0):
    _plain(*tensors)
    # An old rule of torch: an empty tensor of one dimension is left out.
    parts = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    sizes = list(parts[0].shape)
    dim = _axis(dim, len(sizes))
    dtype = parts[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    for tensor in parts[1:]:
        other = list(tensor.shape)
        if len(other) != len(sizes) or any(a != b for i, (a, b) in enumerate(zip(sizes, other)) if i != dim):
            raise ValueError("sizes do not fit")
    sizes[dim] = sum(tensor.shape[dim] for tensor in parts)
    return single(sizes, dtype)


def _stack(tensors, dim=0):
    _plain(*tensors)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise ValueError("sizes do not fit")
    dtype = _same_type(*tensors)
    sizes = list(tensors[0].shape)
    sizes.insert(_axis(dim, len(sizes) + 1), len(tensors))
    return single(sizes, dtype)


def _axis(dim: int, rank: int) -> int:
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError("no such dimension")
    return dim % rank


def _repeat(self, repeats):
    _plain(self)
    if len(repeats) < self.dim() or min(repeats, default=0) < 0:
        raise ValueError("sizes do not fit")
    sizes = (1,) * (len(repeats) - self.dim()) + tuple(self.shape)
    return single([a * b for a, b in zip(sizes, repeats)], self.dtype)


# ---- along a dimension


def _softmax(self, dim, half_to_float):
    _plain(self)
    _axis(dim, self.dim())
    if half_to_float or not self.is_floating_point():
        raise ValueError("another element type")
    return single(self.shape, self.dtype)


def _softmax_backward(grad_output, output, dim, input_dtype):
    _plain(grad_output, output)
    if grad_output.shape != output.shape or grad_output.dtype is not input_dtype or output.dtype is not input_dtype:
        raise ValueError("another element type")
    return single(output.shape, input_dtype)


def _scan(self, dim, dtype=None):
    _plain(self)
    _axis(dim, self.dim())
    return single(self.shape, dtype or (self.dtype if self.is_floating_point() else torch.int64))


def _reduced(self, dim, keepdim: bool):
    _plain(self)
    rank = self.dim()
    dims = range(rank) if dim is None or dim == [] else [dim] if type(dim) is int else dim
    axes = {_axis(entry, rank) for entry in dims}
    if len(axes) != len(dims):
        raise RuntimeError("a dimension comes twice")
    if keepdim:
        return [1 if axis in axes else size for axis, size in enumerate(self.shape)]
    return [size for axis, size in enumerate(self.shape) if axis not in axes]


def _sum(self, dim=None, keepdim=False, dtype=None):
    sizes = _reduced(self, dim, keepdim)
    return single(sizes, dtype or (self.dtype if self.is_floating_point() else torch.int64))


def _sum_all(self, dtype=None):
    return _sum(self, None, False, dtype)


def _mean(self, dim=None, keepdim=False, dtype=None):
    sizes = _reduced(self, dim, keepdim)
    if not (dtype or self.dtype).is_floating_point:
        raise ValueError("torch refuses this")
    return single(sizes, dtype or self.dtype)


def _mean_all(self, dtype=None):
    return _mean(self, None, False, dtype)


def _extreme(self, dim=(), keepdim=False):
    if self.numel() == 0:
        raise ValueError("nothing to choose from")
    return single(_reduced(self, list(dim), keepdim), self.dtype)


def _extreme_all(self):
    return _extreme(self)


def _extreme_at(self, dim, keepdim=False):
    sizes = _reduced(self, dim, keepdim)
    if self.numel() == 0:
        raise ValueError("nothing to choose from")
    return "t", [fresh(sizes, self.dtype), fresh(sizes, torch.int64)]


def _index_of_extreme(self, dim=None, keepdim=False):
    if self.numel() == 0 or (dim is None and keepdim):
        raise ValueError("nothing to choose from")
    return single(_reduced(self, dim, keepdim), torch.int64)


def _truth(self, dim=None, keepdim=False):
    if self.dtype is torch.uint8:
        raise ValueError("torch keeps uint8 here")
    return single(_reduced(self, dim, keepdim), torch.bool)


def _logsumexp(self, dim, keepdim=False):
    sizes = _reduced(self, list(dim), keepdim)
    return single(sizes, _floating(self.dtype))


def _spread(self, dim=None, correction=None, keepdim=False):
    sizes = _reduced(self, dim, keepdim)
    if not self.is_floating_point():
        raise ValueError("torch refuses this")
    return single(sizes, self.dtype)


def _spread_and_mean(self, dim=None, correction=None, keepdim=False):
    entry = _spread(self, dim, correction, keepdim)[1][0]
    return "t", [entry, entry]


def _sorted(self, dim=-1, descending=False):
    _plain(self)
    _axis(dim, self.dim())
    return "t", [fresh(self.shape, self.dtype), fresh(self.shape, torch.int64)]


def _sorted_stable(self, stable=None, dim=-1, descending=False):
    return _sorted(self, dim)


def _topk(self, k, dim=-1, largest=True, sorted=True):
    _plain(self)
    axis = _axis(dim, self.dim())
    if self.dim() == 0 or k > self.shape[axis]:
        raise ValueError("k is out of range")
    sizes = list(self.shape)
    sizes[axis] = k
    return "t", [fresh(sizes, self.dtype), fresh(sizes, torch.int64)]


# ---- normalisation


def _layer_norm(input, normalized_shape, weight, bias, eps):
    _plain(input)
    count = len(normalized_shape)
    if list(input.shape[input.dim() - count :]) != list(normalized_shape) or count == 0:
        raise ValueError("sizes do not fit")
    for parameter in (weight, bias):
        if parameter is not None and (list(parameter.shape) != list(normalized_shape) or parameter.dtype is not input.dtype):
            raise ValueError("sizes do not fit")
    if input.dtype is not torch.float32:
        raise ValueError("statistics of another element type")
    statistics = [*input.shape[: input.dim() - count], *([1] * count)]
    return "t", [fresh(input.shape, input.dtype), fresh(statistics, input.dtype), fresh(statistics, input.dtype)]


def _layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    _plain(grad_out, input)
    if input.dtype is not torch.float32 or weight is None or bias is None:
        raise ValueError("another form")
    wanted = [(input.shape, output_mask[0]), (weight.shape, output_mask[1]), (bias.shape, output_mask[2])]
    return "t", [fresh(sizes, input.dtype) if asked else None for sizes, asked in wanted]


# ---- indexing with whole numbers


def _whole(index) -> None:
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError("an index of another type")


def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    _plain(weight, indices)
    _whole(indices)
    if weight.dim() != 2:
        raise ValueError("sizes do not fit")
    return single((*indices.shape, weight.shape[1]), weight.dtype)


def _embedding_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    _plain(grad_output, indices)
    _whole(indices)
    return single((num_weights, grad_output.shape[-1]), grad_output.dtype)


def _index(self, indices):
    _plain(self)
    leading = len(indices)
    if leading > self.dim() or any(index is None for index in indices):
        raise ValueError("another form")
    for index in indices:
        _whole(index)
    sizes = broadcast(*(index.shape for index in indices))
    return single((*sizes, *self.shape[leading:]), self.dtype)


def _index_select(self, dim, index):
    _plain(self, index)
    _whole(index)
    axis = _axis(dim, self.dim())
    if index.dim() != 1 or self.dim() == 0:
        raise ValueError("another form")
    sizes = list(self.shape)
    sizes[axis] = index.shape[0]
    return single(sizes, self.dtype)


def _gather(self, dim, index, sparse_grad=False):
    _plain(self, index)
    _whole(index)
    axis = _axis(dim, self.dim())
    if self.dim() != index.dim() or any(
        b > a for at, (a, b) in enumerate(zip(self.shape, index.shape)) if at != axis
    ):
        raise ValueError("sizes do not fit")
    return single(index.shape, self.dtype)


def _like_self(self, *_args, **_kwargs):
    _plain(self)
    return single(self.shape, self.dtype)


def _zeros_around(grad_output, input_sizes, *_where):
    _real(grad_output)
    return single(input_sizes, grad_output.dtype)


# ---- the table


def _table() -> dict:
    rules: dict = {}

    def add(rule, text: str) -> None:
        for name in text.split():
            rules["aten::" + name] = rule

    add(
        _unary(_floating),
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
        "atanh sigmoid erf erfc erfinv lgamma digamma",
    )
    add(
        _unary(_same_but_bool),
        "neg relu floor ceil trunc round sign gelu silu mish hardswish hardsigmoid leaky_relu elu hardtanh softplus "
        "softshrink hardshrink threshold abs frac nan_to_num",
    )
    add(_unary(_same), "bitwise_not")
    add(_triangle, "tril triu")
    add(_unary(_bool), "logical_not isnan isinf signbit")
    add(_clone, "clone")
    comparisons = "eq ne lt le gt ge"
    add(_binary(_bool), " ".join(f"{name}.Tensor {name}.Scalar" for name in comparisons.split()))
    add(_binary(_bool), "logical_and logical_or logical_xor")
    add(_with_alpha(_same), "add.Tensor sub.Tensor rsub.Scalar add.Scalar sub.Scalar")
    add(_binary(_same), "mul.Tensor mul.Scalar maximum minimum fmin fmax remainder.Tensor fmod.Tensor remainder.Scalar")
    add(_binary(_same), "pow.Tensor_Tensor pow.Tensor_Scalar bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor")
    add(_binary(_floating), "div.Tensor div.Scalar atan2")
    add(_rounded_division, "div.Tensor_mode div.Scalar_mode")
    add(_where, "where.self")
    add(_ternary, "addcmul addcdiv")
    add(_lerp, "lerp.Tensor lerp.Scalar")
    add(_masked_fill, "masked_fill.Scalar")
    add(_clamp, "clamp clamp.Tensor clamp_min clamp_max")
    add(_native_dropout, "native_dropout")
    add(_binary(_same), "threshold_backward sigmoid_backward tanh_backward gelu_backward silu_backward")
    add(_in_place, "zero_ fill_.Scalar random_ random_.from random_.to bernoulli_.float")
    add(_in_place_floating, "exp_ sqrt_ normal_ uniform_ exponential_")
    add(_in_place_masked, "masked_fill_.Scalar")
    add(
        _in_place_pointwise,
        "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor copy_ addcmul_ addcdiv_ lerp_.Scalar clamp_ clamp_min_ relu_ "
        "neg_",
    )
    add(_mm, "mm")
    add(_addmm, "addmm")
    add(_bmm, "bmm")
    add(_baddbmm, "baddbmm")
    add(_mv, "mv")
    add(_dot, "dot")
    add(_cat, "cat")
    add(_stack, "stack")
    add(_repeat, "repeat")
    add(_softmax, "_softmax _log_softmax")
    add(_softmax_backward, "_softmax_backward_data _log_softmax_backward_data")
    add(_scan, "cumsum cumprod")
    add(_sum, "sum.dim_IntList")
    add(_sum_all, "sum")
    add(_mean, "mean.dim")
    add(_mean_all, "mean")
    add(_extreme, "amax amin")
    add(_extreme_all, "max min")
    add(_extreme_at, "max.dim min.dim")
    add(_index_of_extreme, "argmax argmin")
    add(_truth, "any.dim all.dim any all")
    add(_logsumexp, "logsumexp")
    add(_spread, "var.correction std.correction")
    add(_spread_and_mean, "var_mean.correction std_mean.correction")
    add(_sorted, "sort")
    add(_sorted_stable, "sort.stable")
    add(_topk, "topk")
    add(_layer_norm, "native_layer_norm")
    add(_layer_norm_backward, "native_layer_norm_backward")
    add(_embedding, "embedding")
    add(_embedding_backward, "embedding_dense_backward")
    add(_index, "index.Tensor")
    add(_index_select, "index_select")
    add(_gather, "gather")
    add(_like_self, "scatter.src scatter.value scatter_add index_add index_copy index_put")
    add(_zeros_around, "slice_backward select_backward")
    return rules


_RULES = _table()
