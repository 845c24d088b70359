# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saving tensors that are on mps and loading tensors onto it: `torch.save`, `torch.load`, `map_location`.

A file written here is the file that a Mac writes (tag `mps`), and a Mac's file loads here. The tags are `mps` and
`mps:0` and nothing else: torch's own reader takes whatever begins with `mps`.
"""

import torch
from torch import serialization

from . import storages

# Below the numbers of torch's own packages, so that ours is asked first.
_PRIORITY = 5
_TAGS = ("mps", "mps:0")


def _tag(storage):
    return "mps" if storage.device.type == "mps" else None


def _restore(storage, location):
    location = str(location)
    if location in _TAGS:
        return storages._mps(storage)
    if location.startswith("mps:"):
        raise RuntimeError(
            f"Attempting to deserialize object on {location}, but the mps device has the index 0 only. Please use "
            "torch.load with map_location='mps' to map your storages to it."
        )
    return None


def _is_stock(entry) -> bool:
    """Torch's own package for mps, which would take every tag that ours refuses."""
    return getattr(entry[1], "__name__", "") == "_mps_tag"


def _dlpack(original):
    def __dlpack__(self, *args, **kwargs):
        if self.is_mps:
            raise BufferError(
                "a tensor on mps has no pointer that another library in this process could read: its bytes are on the "
                "host; hand out a copy (tensor.cpu().__dlpack__())"
            )
        return original(self, *args, **kwargs)

    __dlpack__.__doc__ = original.__doc__
    return __dlpack__


def _to_dlpack(original):
    def to_dlpack(tensor, *args, **kwargs):
        return tensor.__dlpack__() if tensor.is_mps else original(tensor, *args, **kwargs)

    to_dlpack.__doc__ = original.__doc__
    return to_dlpack


def install() -> None:
    """Registers the package for mps in place of torch's own, and refuses DLPack."""
    registry = getattr(serialization, "_package_registry", None)
    if registry is not None:
        registry[:] = [entry for entry in registry if not _is_stock(entry)]
    serialization.register_package(_PRIORITY, _tag, _restore)
    torch.Tensor.__dlpack__ = _dlpack(torch.Tensor.__dlpack__)
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = _to_dlpack(torch._C._to_dlpack)
