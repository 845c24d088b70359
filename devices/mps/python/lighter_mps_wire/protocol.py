# SPDX-License-Identifier: MIT OR Apache-2.0
"""Numbers of the stream protocol: version, message kinds, caps, and how a tensor's address is made.

Used by the client and by the host's worker. A change of any of these is a change of `VERSION`.
"""

VERSION = 1
MAGIC = b"LMPS"

# Flags of the client's hello.
FLAG_RING = 1

# Status of the host's hello and of replies.
OK = 0
REFUSED = 1
ERROR = 1

# Message kinds, client to host.
CALL = 1
FREE = 2
WAIT = 3
DEFINE = 4
RUN = 5
BIND = 6
ALLOC = 7
UPLOAD = 8
UPLOAD_RING = 9
DOWNLOAD = 10
DOWNLOAD_RING = 11
ITEM = 12
GENERATOR = 13
QUERY = 14
EVENT = 15

# What a GENERATOR message wants.
GENERATOR_NEW = 1
GENERATOR_SEED = 2
GENERATOR_GET_STATE = 3
GENERATOR_SET_STATE = 4
GENERATOR_FREE = 5
GENERATOR_INITIAL_SEED = 6
DEFAULT_GENERATOR = 0

# What a QUERY message asks.
QUERY_MEMORY = 1
QUERY_COUNTERS = 2
QUERY_EMPTY_CACHE = 3
QUERY_DEVICE = 4
QUERY_CPU_SECONDS = 5

# What an EVENT message wants.
EVENT_NEW = 1
EVENT_RECORD = 2
EVENT_ELAPSED = 3
EVENT_WAIT = 4
EVENT_QUERY = 5
EVENT_FREE = 6

# How an operator's results are put together.
SHAPE_SINGLE = "s"
SHAPE_TUPLE = "t"
SHAPE_LIST = "l"
SHAPE_VOID = "v"

# Kinds of a call's slots.
SLOT_TENSOR = "T"
SLOT_INT = "i"
SLOT_FLOAT = "f"
SLOT_BOOL = "b"
# struct's code for each; a bool travels as a whole word, so that every slot has eight bytes.
SLOT_FORMATS = {SLOT_TENSOR: "Q", SLOT_INT: "q", SLOT_FLOAT: "d", SLOT_BOOL: "Q"}

# A tensor's address is its storage's number above ADDRESS_BITS, and the byte offset in that storage below.
ADDRESS_BITS = 40
OFFSET_MASK = (1 << ADDRESS_BITS) - 1
# One bit less than there is room for: addresses also travel as signed numbers in values.
MAX_STORAGE_NUMBER = (1 << 23) - 1
MAX_STORAGE_BYTES = 1 << ADDRESS_BITS

# Caps.
MAX_HELLO_BYTES = 64 << 10
MAX_BODY_BYTES = 1 << 20
MAX_LIST_ENTRIES = 65_536
MAX_SLOTS = 65_536
MAX_DEPTH = 8
MAX_GENERATOR_STATE_BYTES = 64 << 10


def address(number: int, offset: int = 0) -> int:
    """The address of a byte of a storage."""
    return number << ADDRESS_BITS | offset
