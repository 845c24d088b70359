# SPDX-License-Identifier: MIT OR Apache-2.0
"""The codec of values: everything on the stream that is not a plain number in a fixed place.

`encode` and `decode` are called by the client for signatures and replies, and by the host for what the client sent.
Decoding refuses, with `WireError`: unknown tags, lengths past the end, lists over `MAX_LIST_ENTRIES`, nesting over
`MAX_DEPTH`, text that is not UTF-8, repeated keys, unknown codes, negative sizes, and bytes left over.
"""

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from struct import pack, unpack_from

from .dtypes import DEVICES, ELEMENTS, FORMATS, LAYOUT_STRIDED
from .protocol import MAX_BODY_BYTES, MAX_DEPTH, MAX_LIST_ENTRIES

NONE, FALSE, TRUE, INT, FLOAT, COMPLEX, STR, BYTES, LIST, DICT = range(10)
DTYPE, DEVICE, FORMAT, LAYOUT, TENSOR, SCALAR, GENERATOR = range(10, 17)


class WireError(ValueError):
    """Bytes that are no value, or a value that has no bytes; the text says which and where."""


@dataclass(frozen=True)
class Dtype:
    """An element type, by its code."""

    code: int


@dataclass(frozen=True)
class Device:
    """The container's own cpu (0) or the mps device (1)."""

    code: int


@dataclass(frozen=True)
class MemoryFormat:
    """A memory format, by its code."""

    code: int


@dataclass(frozen=True)
class Layout:
    """A tensor layout; only strided exists on the wire."""

    code: int = LAYOUT_STRIDED


@dataclass(frozen=True)
class TensorSlot:
    """A tensor argument: which slot of the call holds its address, and how the bytes there are to be read."""

    slot: int
    dtype: int
    sizes: tuple
    strides: tuple


@dataclass(frozen=True)
class ScalarSlot:
    """A number argument that each call brings itself, in that slot."""

    slot: int


@dataclass(frozen=True)
class Generator:
    """A random number generator, by the number that the client gave it (0: the default one)."""

    number: int


_U16 = Struct("<BH")
_U32 = Struct("<BI")
_I64 = Struct("<Bq")
_F64 = Struct("<Bd")
_C128 = Struct("<Bdd")
_TENSOR = Struct("<BHBB")


def encode(value, limit: int = MAX_BODY_BYTES) -> bytes:
    """The bytes of a value; `WireError` where it has none or they are more than `limit`."""
    out = bytearray()
    try:
        _encode(out, value, 0)
    except (StructError, OverflowError) as error:
        raise WireError(f"a number does not fit the wire: {error}") from None
    if len(out) > limit:
        raise WireError(f"value of {len(out)} bytes is over the limit of {limit}")
    return bytes(out)


def _encode(out: bytearray, value, depth: int) -> None:
    kind = type(value)
    if value is None:
        out.append(NONE)
    elif kind is bool:
        out.append(TRUE if value else FALSE)
    elif kind is int:
        out += _I64.pack(INT, value)
    elif kind is float:
        out += _F64.pack(FLOAT, value)
    elif kind is str:
        out += _U32.pack(STR, len(text := _utf8(value)))
        out += text
    elif kind is list or kind is tuple:
        _check_container(len(value), depth)
        out += _U32.pack(LIST, len(value))
        for entry in value:
            _encode(out, entry, depth + 1)
    elif kind is TensorSlot:
        rank = len(value.sizes)
        if rank != len(value.strides):
            raise WireError(f"tensor slot with {rank} sizes and {len(value.strides)} strides")
        out += _TENSOR.pack(TENSOR, value.slot, value.dtype, rank)
        out += pack(f"<{2 * rank}q", *value.sizes, *value.strides)
    elif kind is dict:
        _check_container(len(value), depth)
        out += _U32.pack(DICT, len(value))
        for key, entry in value.items():
            if type(key) is not str:
                raise WireError(f"a dictionary's key is a {type(key).__name__}, not a str")
            out += pack("<I", len(text := _utf8(key)))
            out += text
            _encode(out, entry, depth + 1)
    elif kind in (bytes, bytearray, memoryview):
        out += _U32.pack(BYTES, memoryview(value).nbytes)
        out += value
    elif kind is complex:
        out += _C128.pack(COMPLEX, value.real, value.imag)
    elif kind is ScalarSlot:
        out += _U16.pack(SCALAR, value.slot)
    elif kind is Generator:
        out += _U32.pack(GENERATOR, value.number)
    elif kind in _CODED:
        out += pack("<BB", _CODED[kind], value.code)
    else:
        raise WireError(f"a {kind.__name__} has no form on the wire")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"text is no UTF-8: {error.reason}") from None


def _check_container(entries: int, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise WireError(f"values are nested more than {MAX_DEPTH} deep")
    if entries > MAX_LIST_ENTRIES:
        raise WireError(f"{entries} entries are over the limit of {MAX_LIST_ENTRIES}")


_CODED = {Dtype: DTYPE, Device: DEVICE, MemoryFormat: FORMAT, Layout: LAYOUT}


def decode(data, limit: int = MAX_BODY_BYTES):
    """The value that these bytes are, all of them; lists come back as lists, sizes and strides as tuples."""
    data = bytes(data) if len(data) <= limit else _too_long(len(data), limit)
    try:
        value, at = _decode(data, 0, 0)
    except StructError:
        raise WireError(f"value of {len(data)} bytes ends too early") from None
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes are left over after a value")
    return value


def _too_long(size: int, limit: int):
    raise WireError(f"value of {size} bytes is over the limit of {limit}")


def _decode(data: bytes, at: int, depth: int):
    (tag,) = unpack_from("<B", data, at)
    if tag > GENERATOR:
        raise WireError(f"unknown tag {tag} at byte {at}")
    return _READERS[tag](data, at + 1, depth)


def _read_int(data: bytes, at: int, _depth: int):
    return unpack_from("<q", data, at)[0], at + 8


def _read_float(data: bytes, at: int, _depth: int):
    return unpack_from("<d", data, at)[0], at + 8


def _read_complex(data: bytes, at: int, _depth: int):
    return complex(*unpack_from("<dd", data, at)), at + 16


def _read_bytes(data: bytes, at: int, _depth: int):
    (size,) = unpack_from("<I", data, at)
    at += 4
    if size > len(data) - at:
        raise WireError(f"{size} bytes are announced at byte {at}, {len(data) - at} are left")
    return data[at : at + size], at + size


def _read_str(data: bytes, at: int, depth: int):
    text, end = _read_bytes(data, at, depth)
    try:
        return text.decode(), end
    except UnicodeDecodeError:
        raise WireError(f"text at byte {at} is no UTF-8") from None


def _read_entries(data: bytes, at: int, depth: int, smallest: int):
    """The number of entries, checked against the cap, the depth, and the bytes that so many need at least."""
    (entries,) = unpack_from("<I", data, at)
    _check_container(entries, depth)
    if entries * smallest > len(data) - at - 4:
        raise WireError(f"{entries} entries are announced at byte {at}, {len(data) - at - 4} bytes are left")
    return entries, at + 4


def _read_list(data: bytes, at: int, depth: int):
    entries, at = _read_entries(data, at, depth, 1)
    out = []
    for _ in range(entries):
        value, at = _decode(data, at, depth + 1)
        out.append(value)
    return out, at


def _read_dict(data: bytes, at: int, depth: int):
    entries, at = _read_entries(data, at, depth, 5)
    out = {}
    for _ in range(entries):
        key, at = _read_str(data, at, depth)
        if key in out:
            raise WireError(f"key {key[:64]!r} comes twice")
        out[key], at = _decode(data, at, depth + 1)
    return out, at


def _coded(kind, codes, what: str):
    def read(data: bytes, at: int, _depth: int):
        (code,) = unpack_from("<B", data, at)
        if code not in codes:
            raise WireError(f"unknown {what} {code} at byte {at}")
        return kind(code), at + 1

    return read


def _read_tensor(data: bytes, at: int, _depth: int):
    slot, dtype, rank = unpack_from("<HBB", data, at)
    numbers = unpack_from(f"<{2 * rank}q", data, at + 4)
    if dtype not in ELEMENTS:
        raise WireError(f"unknown element type {dtype} at byte {at}")
    if rank and min(numbers) < 0:
        raise WireError(f"negative size or stride at byte {at}")
    return TensorSlot(slot, dtype, numbers[:rank], numbers[rank:]), at + 4 + 16 * rank


def _read_scalar(data: bytes, at: int, _depth: int):
    return ScalarSlot(unpack_from("<H", data, at)[0]), at + 2


def _read_generator(data: bytes, at: int, _depth: int):
    return Generator(unpack_from("<I", data, at)[0]), at + 4


_READERS = (
    lambda data, at, depth: (None, at),
    lambda data, at, depth: (False, at),
    lambda data, at, depth: (True, at),
    _read_int,
    _read_float,
    _read_complex,
    _read_str,
    _read_bytes,
    _read_list,
    _read_dict,
    _coded(Dtype, ELEMENTS, "element type"),
    _coded(Device, DEVICES, "device"),
    _coded(MemoryFormat, FORMATS, "memory format"),
    _coded(Layout, (LAYOUT_STRIDED,), "layout"),
    _read_tensor,
    _read_scalar,
    _read_generator,
)
