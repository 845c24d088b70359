# SPDX-License-Identifier: MIT OR Apache-2.0
"""Indexing with whole numbers."""

import torch

from .parts import axis_of, broadcast, plain, real, single, table


def _whole(index) -> None:
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError("an index of another type")


def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    plain(weight, indices)
    _whole(indices)
    if weight.dim() != 2:
        raise ValueError("sizes do not fit")
    return single((*indices.shape, weight.shape[1]), weight.dtype)


def _embedding_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    plain(grad_output, indices)
    _whole(indices)
    return single((num_weights, grad_output.shape[-1]), grad_output.dtype)


def _index(self, indices):
    plain(self)
    leading = len(indices)
    if leading > self.dim() or any(index is None for index in indices):
        raise ValueError("another form")
    for index in indices:
        _whole(index)
    sizes = broadcast(*(index.shape for index in indices))
    return single((*sizes, *self.shape[leading:]), self.dtype)


def _index_select(self, dim, index):
    plain(self, index)
    _whole(index)
    axis = axis_of(dim, self.dim())
    if index.dim() != 1 or self.dim() == 0:
        raise ValueError("another form")
    sizes = list(self.shape)
    sizes[axis] = index.shape[0]
    return single(sizes, self.dtype)


def _gather(self, dim, index, sparse_grad=False):
    plain(self, index)
    _whole(index)
    axis = axis_of(dim, self.dim())
    if self.dim() != index.dim() or any(
        b > a for at, (a, b) in enumerate(zip(self.shape, index.shape)) if at != axis
    ):
        raise ValueError("sizes do not fit")
    return single(index.shape, self.dtype)


def _like_self(self, *_args, **_kwargs):
    plain(self)
    return single(self.shape, self.dtype)


def _zeros_around(grad_output, input_sizes, *_where):
    real(grad_output)
    return single(input_sizes, grad_output.dtype)


RULES = table(
    (_embedding, "embedding"),
    (_embedding_backward, "embedding_dense_backward"),
    (_index, "index.Tensor"),
    (_index_select, "index_select"),
    (_gather, "gather"),
    (_like_self, "scatter.src scatter.value scatter_add index_add index_copy index_put"),
    (_zeros_around, "slice_backward select_backward"),
)
