# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ways around what a device cannot do: operators that Apple's torch computes wrongly, or not at all.

`wrapped` is asked once a signature; most operators are called as they are. The list names public reports; each entry
makes the arguments contiguous, also the one written to, whose values are copied back.
"""

import platform
from typing import NamedTuple

import torch


class Quirk(NamedTuple):
    """Operators that give wrong values for arguments with strides, and the macOS versions that do."""

    operators: tuple
    before_macos: tuple
    report: str


NEVER_REPAIRED = (999,)
QUIRKS = (
    Quirk(("addcdiv", "addcmul", "addcdiv_", "addcmul_"), (15,), "pytorch#118115"),
    Quirk(("where",), NEVER_REPAIRED, "pytorch#150967"),
    Quirk(
        (
            "_scaled_dot_product_attention_math_for_mps",
            "_scaled_dot_product_attention_math",
            "scaled_dot_product_attention",
        ),
        NEVER_REPAIRED,
        "pytorch#181133, pytorch#163597, pytorch#174861",
    ),
    Quirk(("bmm", "baddbmm", "baddbmm_"), NEVER_REPAIRED, "pytorch#197636"),
    Quirk(("cat",), (14, 4), "pytorch#78043"),
    Quirk(("index_put_", "fill_", "copy_", "_index_put_impl_"), (14, 5), "pytorch#122016"),
)


def macos_version() -> tuple:
    """(15, 1) on macOS 15.1; () elsewhere."""
    return tuple(int(part) for part in platform.mac_ver()[0].split(".") if part.isdigit())


def needs_contiguous(operator, device: torch.device, version: tuple) -> bool:
    """Whether an operator is on the list for this device and system."""
    if device.type != "mps":
        return False
    base = operator.name.split("::")[1].split(".")[0]
    return any(base in quirk.operators and version < quirk.before_macos for quirk in QUIRKS)


def wrapped(operator, device: torch.device):
    """The callable for an operator on this device."""
    if needs_contiguous(operator, device, macos_version()):
        return elsewhere(operator, lambda tensor: tensor.contiguous())
    return operator.call


def on_processor(operator, device: torch.device):
    """The callable that runs an operator on the processor, which PYTORCH_ENABLE_MPS_FALLBACK asks for."""
    return elsewhere(operator, lambda tensor: tensor.to("cpu"), device)


def elsewhere(operator, moved, device=None):
    """Runs an operator on changed arguments; what it wrote is copied into the arguments that it was given."""

    def change(value, pairs):
        if isinstance(value, torch.Tensor):
            other = moved(value)
            if other is not value:
                pairs.append((value, other))
            return other
        if isinstance(value, list):
            return [change(entry, pairs) for entry in value]
        if device is not None and isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def back(result, by_id):
        if isinstance(result, torch.Tensor):
            if id(result) in by_id:
                return by_id[id(result)]
            return result if device is None else result.to(device)
        if isinstance(result, (list, tuple)):
            return type(result)(back(entry, by_id) for entry in result)
        return result

    def call(*arguments, **keywords):
        pairs, written = [], []
        named = [*zip(operator.positional, arguments, strict=False), *keywords.items()]
        changed = {}
        for name, value in named:
            before = len(pairs)
            changed[name] = change(value, pairs)
            if name in operator.written:
                written += pairs[before:]
        result = operator.call(
            *[changed[name] for name, _ in named[: len(arguments)]], **{name: changed[name] for name in keywords}
        )
        for original, other in written:
            if original.shape != other.shape:
                original.resize_(other.shape)
            original.copy_(other)
        return back(result, {id(other): original for original, other in pairs})

    return call
