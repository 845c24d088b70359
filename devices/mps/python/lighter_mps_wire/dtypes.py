# SPDX-License-Identifier: MIT OR Apache-2.0
"""Codes of element types, memory formats and devices on the wire, and torch's own objects for them.

The element codes are torch's `ScalarType` numbers, as its C shims use them. Torch is imported only by `tables()`:
a torch that lacks an element type simply has no entry for it, and the caller refuses that type by its name.
"""

from functools import lru_cache
from typing import NamedTuple

# code -> (name in torch, bytes of an element)
ELEMENTS = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    8: ("complex32", 4),
    9: ("complex64", 8),
    10: ("complex128", 16),
    11: ("bool", 1),
    15: ("bfloat16", 2),
    23: ("float8_e5m2", 1),
    24: ("float8_e4m3fn", 1),
    27: ("uint16", 2),
    28: ("uint32", 4),
    29: ("uint64", 8),
}
# code -> name in torch
FORMATS = {0: "contiguous_format", 1: "preserve_format", 2: "channels_last", 3: "channels_last_3d"}
DEVICE_CPU = 0
DEVICE_MPS = 1
DEVICES = {DEVICE_CPU: "cpu", DEVICE_MPS: "mps"}
LAYOUT_STRIDED = 0


class Tables(NamedTuple):
    """Torch's objects by code and codes by torch's objects, for the torch that is installed."""

    dtypes: dict
    codes: dict
    formats: dict
    format_codes: dict


@lru_cache(maxsize=1)
def tables() -> Tables:
    """Imports torch and gives its tables."""
    import torch

    dtypes = {code: getattr(torch, name) for code, (name, _) in ELEMENTS.items() if hasattr(torch, name)}
    formats = {code: getattr(torch, name) for code, name in FORMATS.items()}
    return Tables(
        dtypes,
        {dtype: code for code, dtype in dtypes.items()},
        formats,
        {memory_format: code for code, memory_format in formats.items()},
    )


def element_name(code: int) -> str:
    """Torch's name of an element type, also where this torch does not know it."""
    return ELEMENTS[code][0] if code in ELEMENTS else f"element type {code}"


def element_bytes(code: int) -> int:
    """Bytes of one element. Raises KeyError for a code that is none."""
    return ELEMENTS[code][1]
