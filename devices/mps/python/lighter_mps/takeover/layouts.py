# SPDX-License-Identifier: MIT OR Apache-2.0
"""The order of the methods in the three vtables of torch that the takeover needs, for the installed torch.

Called by `guard` and `hooks` through `install()`. The first source is torch's own headers in the installed package. Debian's
python3-torch brings them in libtorch-dev, which it only recommends; where they are absent, `known` has the order for the releases
that lighter-mps was tested with. Refuses a torch that has neither, and headers that do not read as expected.
"""

import hashlib
import os

from . import headers
from .errors import TakeoverError
from .known import KNOWN

_GUARD = ("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
_ACCELERATOR = ("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
_MPS = ("ATen/detail/MPSHooksInterface.h", "MPSHooksInterface")
_TABLE = "the table of lighter-mps"

# The methods without which a layout is not the one of the class in question.
_GUARD_METHODS = ("type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice", "getStream", "exchangeStream", "deviceCount")
# torch 2.6 has neither isBuilt nor isAvailable.
_HOOKS_METHODS = ("hasPrimaryContext", "deviceCount", "getCurrentDevice", "getDeviceFromPtr", "hasMPS")


class Layout:
    """The slots of the device guard's vtable, of all accelerators' hooks', and of the MPS hooks'; and where they are from."""

    __slots__ = ("guard", "accelerator", "mps", "source")

    def __init__(self, guard: "list[str]", accelerator: "list[str]", mps: "list[str]", source: str):
        self.guard = guard
        self.accelerator = accelerator
        self.mps = mps
        self.source = source

    def digest(self) -> str:
        """The same for the same three orders, wherever they are from."""
        text = ";".join(" ".join(slots) for slots in (self.guard, self.accelerator, self.mps))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def disagreement(self) -> str:
        """What it means that the libraries are not of this order, and what to do."""
        if self.source == _TABLE:
            return "this is not the torch release that its version says; install its headers (Debian: libtorch-dev) or a torch wheel from PyPI"
        return "torch's headers and libraries are of different versions; reinstall torch"

    def is_known(self, version: "tuple[int, int]") -> bool:
        """Is this the order that lighter-mps was tested with for that torch?"""
        known = known_layout(version)
        return known is not None and known.digest() == self.digest()


def known_layout(version: "tuple[int, int]") -> "Layout | None":
    """The order of a torch release that was tested, if that one was."""
    found = KNOWN.get(version)
    if found is None:
        return None
    return Layout(*(text.split() for text in found), _TABLE)


def read(include: str) -> "Layout | None":
    """The order that the headers in the folder `include` give; none if there are no headers."""
    sources = []
    for name, _ in (_GUARD, _ACCELERATOR, _MPS):
        try:
            with open(os.path.join(include, name), encoding="utf-8", errors="replace") as file:
                sources.append(file.read())
        except OSError:
            return None
    guard, accelerator, mps = (headers.parse(text, name) for text, (_, name) in zip(sources, (_GUARD, _ACCELERATOR, _MPS)))
    return Layout(headers.order(guard), headers.order(accelerator), headers.order(accelerator, mps), "torch's headers")


def find(torch_folder: str, torch_version: str, version: "tuple[int, int]") -> Layout:
    """The order for the installed torch."""
    include = os.path.join(torch_folder, "include")
    try:
        layout = read(include)
    except headers.HeaderError as error:
        raise TakeoverError(
            f"the headers in {include} do not read as torch {torch_version}'s are expected to ({error}); "
            "install a torch release that lighter-mps knows, or a newer lighter-mps"
        ) from None
    layout = layout or known_layout(version)
    if layout is None:
        raise TakeoverError(
            f"torch {torch_version} is newer than this lighter-mps and has no headers in {include}; "
            "install its headers (Debian: libtorch-dev) or a newer lighter-mps"
        )
    for slots, needed, what in (
        (layout.guard, _GUARD_METHODS, "device guard"), (layout.accelerator, _HOOKS_METHODS[:-1], "accelerator hooks"),
        (layout.mps, _HOOKS_METHODS, "mps hooks"),
    ):
        wrong = [name for name in needed if slots.count(name) != 1]
        if wrong:
            raise TakeoverError(
                f"the {what} of torch {torch_version} have not one {', '.join(wrong)}, so where their methods are is not known; "
                "install a torch release that lighter-mps knows, or a newer lighter-mps"
            )
    return layout
