# SPDX-License-Identifier: MIT OR Apache-2.0
"""The accelerator hooks: what torch asks to learn which accelerators it was built with, and whether they are there.

A Linux build's MPS hooks say "not built" and throw. Their object gets a copy of its vtable that says "built, available, one device".
An accelerator that torch was linked with and that is not there (the CUDA wheel on a machine without an NVIDIA GPU) gets
one that says "not built": torch allows one accelerator, and otherwise ends every look-up of it with `Cannot have both MPS and cuda`.

One that *is* there is left alone and the takeover refused: its tensors, streams and generators may be in use already, and
which of the two `torch.accelerator` means is the user's choice. Called by `install()`.
"""

from .errors import TakeoverError
from .guard import copy_table
from .layouts import Layout
from .native import Libraries, Write, lasting_words, read_words
from .thunks import MPS

_MPS_RESULTS = {
    "isBuilt": 1, "isAvailable": 1, "hasPrimaryContext": 1, "init": 0, "initMPS": 0, "hasMPS": 1, "isOnMacOSorNewer": 1,
    "deviceCount": 1, "setCurrentDevice": 0, "getCurrentDevice": 0, "exchangeDevice": 0, "maybeExchangeDevice": 0,
    "getDeviceFromPtr": MPS, "deviceSynchronize": 0, "emptyCache": 0,
}

# How a user hides the devices of an accelerator from torch.
_HIDING = {"cuda": "CUDA_VISIBLE_DEVICES=", "xpu": "ZE_AFFINITY_MASK="}


def absent_accelerator(torch) -> "str | None":
    """The accelerator that torch was linked with and that is not there, if any. Refuses one that is there."""
    current = _current(torch)
    if current is None:
        return None
    # device_count() of cuda asks NVML first and initialises nothing, so that a fork still works after it.
    module = getattr(torch, current, None) if current in _HIDING else None
    count = module.device_count() if module is not None else None
    if count == 0:
        return current
    how = f"hide it with {_HIDING[current]} in the environment" if current in _HIDING else "use a torch without it"
    raise TakeoverError(f"torch already has the accelerator {current} here and allows one only; to use mps instead, {how} before Python starts")


def _current(torch) -> "str | None":
    try:
        current = torch._C._accelerator_getAccelerator()
    except RuntimeError:
        return None
    kind = getattr(current, "type", "cpu")
    return None if kind == "cpu" else kind


def prepare(libraries: Libraries, layout: Layout, thunks: "dict[int, int]", absent: "str | None") -> "list[Write]":
    """The writes that make mps built and available, and `absent` not built."""
    symbol = "_ZTVN2at17MPSHooksInterfaceE"
    size = libraries.size(symbol)
    if size != 8 * (len(layout.mps) + 2):
        raise TakeoverError(
            f"torch's mps hooks have {size // 8 - 2} methods, and by {layout.source} they should have {len(layout.mps)}: {layout.disagreement()}"
        )
    hooks = libraries.call("_ZN2at6detail11getMPSHooksEv")
    if not hooks or read_words(hooks, 1)[0] != libraries.address(symbol) + 16:
        raise TakeoverError(
            "torch's mps hooks are not those of a build without Metal, so another package has replaced them; do not import it together with lighter_mps"
        )
    writes = [_replace(libraries, hooks, layout, layout.mps, {name: thunks[value] for name, value in _MPS_RESULTS.items()}, "mps hooks")]
    if absent is not None:
        getter = f"get{absent.upper()}Hooks"
        hooks = libraries.call(f"_ZN2at6detail{len(getter)}{getter}Ev")
        writes.append(_replace(libraries, hooks, layout, layout.accelerator, {"isBuilt": thunks[0]}, f"{absent} hooks"))
    return writes


def _replace(libraries: Libraries, hooks: int, layout: Layout, slots: "list[str]", methods: "dict[str, int]", what: str) -> Write:
    table, = read_words(hooks, 1)
    words = copy_table(libraries, table, layout, len(slots), what)
    # A class derived from the hooks' may have more methods than are known here: they are kept too, up to the end of the vtable.
    while libraries.is_code(word := read_words(table + 8 * (len(words) - 2), 1)[0]):
        words.append(word)
    for slot, name in enumerate(slots):
        if name in methods:
            words[slot + 2] = methods[name]
    return Write(hooks, lasting_words(words) + 16)
