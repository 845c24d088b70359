# SPDX-License-Identifier: MIT OR Apache-2.0
"""`scaled_dot_product_attention` on mps.

Torch's own kernel is a composite that looks for a Metal kernel in this process and fails an assertion. Where a gradient
or a tangent is wanted, or a tracer or `vmap` wants to see the parts, the plain formula runs, operator by operator; where
none is, the whole operator goes to the host as one call, and the host's torch picks its best kernel.
"""

import warnings

import torch

from .. import kernels, signatures

_op = torch.ops.aten.scaled_dot_product_attention.default
_parts = torch.ops.aten._scaled_dot_product_attention_math.default
# `torch.func` wraps tensors; before torch 2.15 its wrapper of a tensor on mps has the key of no backend.
_UNKNOWN_BACKEND = "AutogradOther"
_composite = torch._C.DispatchKey.CompositeImplicitAutograd
# Where torch takes the operator apart under `vmap`; the first is newer.
_VMAP_KEYS = ("FuncTorchVmapMode", "FuncTorchBatchedDecomposition")
_libraries = []


def _formula(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The operator by its parts."""
    keywords = {"enable_gqa": True} if enable_gqa else {}
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The formula adds its mask; turning a bool one into numbers is its caller's work.
        hidden = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(hidden, float("-inf"))
    return _parts(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **keywords)[0]


def _wants_gradient(tensors) -> bool:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    # Forward mode: a tangent is lost where one operator hides the formula.
    return torch.autograd.forward_ad._current_level >= 0


def _with_autograd(query, key, value, attn_mask=None, *args, **kwargs):
    """The kernel above the device's: whoever traces below autograd gets the whole operator to take apart."""
    if _wants_gradient((query, key, value, attn_mask)):
        return _formula(query, key, value, attn_mask, *args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(query, key, value, attn_mask, *args, **kwargs)


def _on_host():
    """The client's kernel of the whole operator, which `kernels` leaves to torch as a composite."""
    return kernels.make(signatures._State.hot, _op._schema.name, _op._schema)


def _taken_apart(query, *args, **kwargs):
    """For fake tensors, tracers and `vmap`: the formula on mps, torch's own composite elsewhere."""
    if query.device.type == "mps":
        return _formula(query, *args, **kwargs)
    return _op._op_dk(_composite, query, *args, **kwargs)


def install() -> None:
    """Registers the kernels."""
    kernels_by_key = {"AutogradMPS": _with_autograd, "MPS": _on_host(), _UNKNOWN_BACKEND: _taken_apart}
    for key in _VMAP_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(_op._schema.name, key):
            kernels_by_key[key] = _taken_apart
    with warnings.catch_warnings():
        # Torch has a kernel of its own under `vmap`, and says that this one takes its place.
        warnings.simplefilter("ignore")
        for key, kernel in kernels_by_key.items():
            library = torch.library.Library("aten", "IMPL", key)
            library.impl("scaled_dot_product_attention", kernel)
            # A library's kernels go when the object goes.
            _libraries.append(library)
    if _composite not in _op.py_kernels:
        _op.py_impl(_composite)(_taken_apart)
