# SPDX-License-Identifier: MIT OR Apache-2.0
"""`scaled_dot_product_attention` on mps.

Torch's own kernel is a composite that looks for a Metal kernel in this process and fails an assertion. Where a gradient
(or a tangent) is wanted, the plain formula runs, operator by operator, so that autograd sees each; where none is, the
whole operator goes to the host as one call, and the host's torch picks its best kernel.
"""

import torch

from .. import kernels, signatures

_aten = torch.ops.aten
_libraries = []
_NAME = "scaled_dot_product_attention"


def _wants_gradient(tensors) -> bool:
    if not any(tensor is not None for tensor in tensors):
        return False
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    # Forward mode: a tangent is lost where one operator hides the formula.
    return torch.autograd.forward_ad._current_level >= 0


def _formula(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    keywords = {"scale": scale}
    if enable_gqa:
        keywords["enable_gqa"] = True
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, **keywords
    )[0]


def _on_host():
    """The client's kernel of the whole operator, which `kernels` leaves to torch as a composite."""
    overload = _aten.scaled_dot_product_attention.default
    return kernels.make(signatures._State.hot, overload._schema.name, overload._schema)


def attention(fused):
    """The kernel; `fused` is the client's own kernel for the whole operator."""

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        if _wants_gradient((query, key, value, attn_mask)):
            return _formula(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        keywords = {"enable_gqa": True} if enable_gqa else {}
        if scale is not None:
            keywords["scale"] = scale
        return fused(query, key, value, attn_mask, dropout_p, is_causal, **keywords)

    return scaled_dot_product_attention


def install() -> None:
    """Registers the kernel for tensors with and without autograd."""
    kernel = attention(_on_host())
    for key in ("AutogradMPS", "MPS"):
        library = torch.library.Library("aten", "IMPL", key)
        library.impl(_NAME, kernel)
        # A library's kernels go when the object goes.
        _libraries.append(library)
