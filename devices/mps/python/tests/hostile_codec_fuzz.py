# SPDX-License-Identifier: MIT OR Apache-2.0
"""A coverage-guided fuzz target for the wire's codec: any bytes are refused by name, or a value with those very bytes.

Run by hand, in a Python that has atheris (`pip install atheris`): python3 hostile_codec_fuzz.py -max_total_time=60
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports():
    from lighter_mps_wire import frames, values


def one(data: bytes) -> None:
    try:
        frames.parse_hello(data[: frames.HELLO.size].ljust(frames.HELLO.size, b"\0"))
    except values.WireError:
        pass
    try:
        value = values.decode(data)
    except values.WireError:
        return
    assert values.encode(value) == data, value


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
