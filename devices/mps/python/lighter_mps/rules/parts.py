# SPDX-License-Identifier: MIT OR Apache-2.0
"""What rules are made of: results, common shapes and element types, and checks that leave a call to the host."""

import torch
from lighter_mps_wire.dtypes import tables

from ..tensors import contiguous_strides

# Numbers of element types on the wire.
CODES = tables().codes


def fresh(sizes, dtype):
    """A new result, contiguous."""
    sizes = tuple(sizes)
    return sizes, contiguous_strides(sizes), CODES[dtype]


def single(sizes, dtype):
    """One new result."""
    return "s", [fresh(sizes, dtype)]


def on_device(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_mps


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
        if isinstance(value, torch.Tensor):
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
    shapes = [value.shape for value in operands if isinstance(value, torch.Tensor)]
    sizes = broadcast(*shapes)
    full = [value for value in operands if on_device(value) and value.shape == sizes]
    if all(value.is_contiguous() for value in full):
        return sizes, contiguous_strides(sizes), CODES[dtype]
    strides = full[0].stride()
    if len(full) == len(shapes) and all(value.stride() == strides for value in full) and _dense(full[0]):
        return sizes, strides, CODES[dtype]
    raise ValueError("strides are not simple")


def _dense(tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    return tensor.permute(order).is_contiguous()


def floating(dtype):
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def real(*values) -> None:
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        raise ValueError("complex")


def plain(*values) -> None:
    real(*values)
    if not all(on_device(value) and value.is_contiguous() for value in values):
        raise ValueError("not contiguous")


def same_type(*values):
    real(*values)
    if any(value.dtype is not values[0].dtype for value in values):
        raise ValueError("types differ")
    return values[0].dtype


def axis_of(dim: int, rank: int) -> int:
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError("no such dimension")
    return dim % rank


def table(*entries) -> dict:
    """Rules by the operators' whole names, from pairs of a rule and names."""
    return {"aten::" + name: rule for rule, names in entries for name in names.split()}
