# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fixed heads of the stream: the two hellos, the replies, and the messages that a client writes rarely.

CALL is not here: the hot path packs it with one `Struct` a signature (`call_struct`).
"""

from struct import Struct, pack

from . import protocol
from .protocol import MAGIC, MAX_HELLO_BYTES, SLOT_FORMATS, VERSION
from .values import WireError, encode

# magic, version, flags or status, length of the body
HELLO = Struct("<4sHHI")
# status, length of the body
REPLY = Struct("<BQ")

# What follows the kind of a message; bodies and data come after these.
HEADS = {
    protocol.CALL: Struct("<I"),
    protocol.FREE: Struct("<I"),
    protocol.WAIT: Struct("<"),
    protocol.DEFINE: Struct("<I"),
    protocol.RUN: Struct("<I"),
    protocol.BIND: Struct("<I"),
    protocol.ALLOC: Struct("<QQB"),
    protocol.UPLOAD: Struct("<IQ"),
    protocol.UPLOAD_RING: Struct("<IQQ"),
    protocol.DOWNLOAD: Struct("<I"),
    protocol.DOWNLOAD_RING: Struct("<IQ"),
    protocol.ITEM: Struct("<I"),
    protocol.GENERATOR: Struct("<IB"),
    protocol.QUERY: Struct("<B"),
    protocol.EVENT: Struct("<IB"),
}


def hello(flags_or_status: int, body: dict) -> bytes:
    """Either side's first bytes."""
    data = encode(body, MAX_HELLO_BYTES)
    return HELLO.pack(MAGIC, VERSION, flags_or_status, len(data)) + data


def parse_hello(head: bytes) -> tuple:
    """Version, flags or status, and the length of the body that follows; refuses strangers and bodies over the cap."""
    magic, version, flags_or_status, size = HELLO.unpack(head)
    if magic != MAGIC:
        raise WireError(f"the other side is no lighter mps: it began with {bytes(magic)!r}")
    if size > MAX_HELLO_BYTES:
        raise WireError(f"hello of {size} bytes is over the limit of {MAX_HELLO_BYTES}")
    return version, flags_or_status, size


def call_struct(slots: str, outputs: int) -> Struct:
    """The whole CALL message of a signature: kind, signature, its slots, then one number for each new output."""
    return Struct("<BI" + "".join(SLOT_FORMATS[kind] for kind in slots) + "Q" * outputs)


def message(kind: int, *fields, body: bytes = b"", data: bytes = b"") -> bytes:
    """One message whose length field, where it has one, is first and counts `body`."""
    head = HEADS[kind]
    if kind in _WITH_BODY:
        fields = (len(body), *fields)
    return bytes((kind,)) + head.pack(*fields) + body + data


_WITH_BODY = {
    protocol.DEFINE,
    protocol.RUN,
    protocol.UPLOAD,
    protocol.UPLOAD_RING,
    protocol.DOWNLOAD,
    protocol.DOWNLOAD_RING,
    protocol.ITEM,
}


def numbers(kind: int, entries) -> bytes:
    """FREE or BIND."""
    entries = tuple(entries)
    return pack(f"<BI{len(entries)}Q", kind, len(entries), *entries)
