# SPDX-License-Identifier: MIT OR Apache-2.0
"""Products of matrices, joins and repetitions."""

import torch

from .parts import axis_of, broadcast, plain, same_type, single, table


def _mm(self, mat2):
    (rows, inner), (inner2, columns) = self.shape, mat2.shape
    if inner != inner2:
        raise ValueError("sizes do not fit")
    return single((rows, columns), same_type(self, mat2))


def _addmm(self, mat1, mat2, beta=1, alpha=1):
    dtype = same_type(self, mat1, mat2)
    (rows, inner), (inner2, columns) = mat1.shape, mat2.shape
    if inner != inner2 or broadcast(self.shape, (rows, columns)) != (rows, columns):
        raise ValueError("sizes do not fit")
    return single((rows, columns), dtype)


def _bmm(self, mat2):
    (batch, rows, inner), (batch2, inner2, columns) = self.shape, mat2.shape
    if inner != inner2 or batch != batch2:
        raise ValueError("sizes do not fit")
    return single((batch, rows, columns), same_type(self, mat2))


def _baddbmm(self, batch1, batch2, beta=1, alpha=1):
    dtype = same_type(self, batch1, batch2)
    sizes = _bmm(batch1, batch2)[1][0][0]
    if broadcast(self.shape, sizes) != sizes:
        raise ValueError("sizes do not fit")
    return single(sizes, dtype)


def _mv(self, vec):
    (rows, inner), (inner2,) = self.shape, vec.shape
    if inner != inner2:
        raise ValueError("sizes do not fit")
    return single((rows,), same_type(self, vec))


def _dot(self, tensor):
    if self.dim() != 1 or self.shape != tensor.shape:
        raise ValueError("sizes do not fit")
    return single((), same_type(self, tensor))


# ---- joining and repeating


def _cat(tensors, dim=0):
    plain(*tensors)
    # An old rule of torch: an empty tensor of one dimension is left out.
    parts = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    sizes = list(parts[0].shape)
    dim = axis_of(dim, len(sizes))
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
    plain(*tensors)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise ValueError("sizes do not fit")
    dtype = same_type(*tensors)
    sizes = list(tensors[0].shape)
    sizes.insert(axis_of(dim, len(sizes) + 1), len(tensors))
    return single(sizes, dtype)



def _repeat(self, repeats):
    plain(self)
    if len(repeats) < self.dim() or min(repeats, default=0) < 0:
        raise ValueError("sizes do not fit")
    sizes = (1,) * (len(repeats) - self.dim()) + tuple(self.shape)
    return single([a * b for a, b in zip(sizes, repeats)], self.dtype)


RULES = table(
    (_mm, "mm"),
    (_addmm, "addmm"),
    (_bmm, "bmm"),
    (_baddbmm, "baddbmm"),
    (_mv, "mv"),
    (_dot, "dot"),
    (_cat, "cat"),
    (_stack, "stack"),
    (_repeat, "repeat"),
)
