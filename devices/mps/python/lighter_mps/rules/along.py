# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators along a dimension: softmax, scans, reductions, sorting, normalisation."""

import torch

from .parts import axis_of, floating, fresh, plain, single, table


def _softmax(self, dim, half_to_float):
    plain(self)
    axis_of(dim, self.dim())
    if half_to_float or not self.is_floating_point():
        raise ValueError("another element type")
    return single(self.shape, self.dtype)


def _softmax_backward(grad_output, output, dim, input_dtype):
    plain(grad_output, output)
    if grad_output.shape != output.shape or grad_output.dtype is not input_dtype or output.dtype is not input_dtype:
        raise ValueError("another element type")
    return single(output.shape, input_dtype)


def _scan(self, dim, dtype=None):
    plain(self)
    axis_of(dim, self.dim())
    return single(self.shape, dtype or (self.dtype if self.is_floating_point() else torch.int64))


def _reduced(self, dim, keepdim: bool):
    plain(self)
    rank = self.dim()
    dims = range(rank) if dim is None or dim == [] else [dim] if type(dim) is int else dim
    axes = {axis_of(entry, rank) for entry in dims}
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
    return single(sizes, floating(self.dtype))


def _spread(self, dim=None, correction=None, keepdim=False):
    sizes = _reduced(self, dim, keepdim)
    if not self.is_floating_point():
        raise ValueError("torch refuses this")
    return single(sizes, self.dtype)


def _spread_and_mean(self, dim=None, correction=None, keepdim=False):
    entry = _spread(self, dim, correction, keepdim)[1][0]
    return "t", [entry, entry]


def _sorted(self, dim=-1, descending=False):
    plain(self)
    axis_of(dim, self.dim())
    return "t", [fresh(self.shape, self.dtype), fresh(self.shape, torch.int64)]


def _sorted_stable(self, stable=None, dim=-1, descending=False):
    return _sorted(self, dim)


def _topk(self, k, dim=-1, largest=True, sorted=True):
    plain(self)
    axis = axis_of(dim, self.dim())
    if self.dim() == 0 or k > self.shape[axis]:
        raise ValueError("k is out of range")
    sizes = list(self.shape)
    sizes[axis] = k
    return "t", [fresh(sizes, self.dtype), fresh(sizes, torch.int64)]


# ---- normalisation


def _layer_norm(input, normalized_shape, weight, bias, eps):
    plain(input)
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
    plain(grad_out, input)
    if input.dtype is not torch.float32 or weight is None or bias is None:
        raise ValueError("another form")
    wanted = [(input.shape, output_mask[0]), (weight.shape, output_mask[1]), (bias.shape, output_mask[2])]
    return "t", [fresh(sizes, input.dtype) if asked else None for sizes, asked in wanted]


RULES = table(
    (_softmax, "_softmax _log_softmax"),
    (_softmax_backward, "_softmax_backward_data _log_softmax_backward_data"),
    (_scan, "cumsum cumprod"),
    (_sum, "sum.dim_IntList"),
    (_sum_all, "sum"),
    (_mean, "mean.dim"),
    (_mean_all, "mean"),
    (_extreme, "amax amin"),
    (_extreme_all, "max min"),
    (_extreme_at, "max.dim min.dim"),
    (_index_of_extreme, "argmax argmin"),
    (_truth, "any.dim all.dim any all"),
    (_logsumexp, "logsumexp"),
    (_spread, "var.correction std.correction"),
    (_spread_and_mean, "var_mean.correction std_mean.correction"),
    (_sorted, "sort"),
    (_sorted_stable, "sort.stable"),
    (_topk, "topk"),
    (_layer_norm, "native_layer_norm"),
    (_layer_norm_backward, "native_layer_norm_backward"),
)
