# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of the two hot paths share: one of them alone in a process, before a peer that records.

Imported by `core_scenarios.py` and the programs in `test_core*.py`, which run in processes of their own because a hot path is
configured once. Only the takeover of torch's device is real besides: no link, no host, no kernels. LIGHTER_TEST_CORE
names the library; without it the one in the package is taken.
"""

import importlib.machinery
import importlib.util
import os
import socket
import struct
import sys
import threading
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALL, FREE, ALLOC = 1, 2, 7


def core_library() -> Path:
    """The library under test; an error names what to do where there is none."""
    given = os.environ.get("LIGHTER_TEST_CORE")
    found = [Path(given)] if given else sorted((ROOT / "lighter_mps").glob("_core*.so"))
    if not found or not found[0].is_file():
        raise FileNotFoundError(
            "no compiled core to test: set LIGHTER_TEST_CORE to the library that "
            "`cargo rustc -p lighter-mps-core --lib --crate-type cdylib` makes"
        )
    return found[0]


def bare_package() -> None:
    """Makes `lighter_mps` importable without what its `__init__` does."""
    if "lighter_mps" in sys.modules:
        return
    sys.path.insert(0, str(ROOT))
    package = types.ModuleType("lighter_mps")
    package.__path__ = [str(ROOT / "lighter_mps")]
    sys.modules["lighter_mps"] = package


def load_core():
    """The module `lighter_mps._core`."""
    bare_package()
    path = str(core_library())
    loader = importlib.machinery.ExtensionFileLoader("lighter_mps._core", path)
    spec = importlib.util.spec_from_file_location("lighter_mps._core", path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["lighter_mps._core"] = module
    return module


class Peer:
    """The other end of a socket: reads all the time and keeps or drops what comes."""

    def __init__(self, keep=True):
        self.ours, self.theirs = socket.socketpair()
        self.received = bytearray()
        self.keep = keep
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        while data := self.theirs.recv(1 << 16):
            with self.changed:
                if self.keep:
                    self.received += data
                self.changed.notify_all()

    def wait_for(self, size: int, timeout=30) -> bool:
        """Whether so many bytes came in time."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.received) >= size, timeout)

    def finish(self) -> bytes:
        """Ends the stream and gives all of it."""
        self.ours.close()
        self.thread.join(30)
        return bytes(self.received)


class HotPath:
    """One hot path, configured: `hot`, its peer, and a `miss` that learns by the functions of `answers`."""

    def __init__(self, name: str, sync_call=None, peer=None, no_socket=None, flush_bytes=2048, maker=None):
        bare_package()
        import torch
        from lighter_mps import takeover

        takeover.install()
        if name == "core":
            self.hot = load_core()
        else:
            from lighter_mps import hot

            self.hot = hot
        self.peer = peer or Peer()
        self.answers = {}
        self.misses = []
        library = os.path.join(os.path.dirname(torch.__file__), "lib")
        more = {"maker": maker} if maker else {}
        self.hot.configure(
            library, torch.Tensor, torch.nn.Parameter, self.miss, sync_call, no_socket or self.no_socket, flush_bytes, **more
        )
        self.hot.set_socket(self.peer.ours.fileno())

    def miss(self, index, args, kwargs, cacheable):
        self.misses.append((index, cacheable))
        return self.answers[index](*args, **kwargs)

    def no_socket(self, error):
        raise RuntimeError(f"no socket: {error}")

    def kernel(self, answer, dynamic=(), names=(), never=False, lazy=False):
        """A kernel whose misses `answer(*args, **kwargs)` gets; it gives (result, plan or None). It takes up to six
        positional arguments, of which the first are dynamic or not as given."""
        index = len(self.answers)
        self.answers[index] = answer
        positions = [*dynamic, *[False] * (6 - len(dynamic))]
        return self.hot.kernel(index, positions, list(names), never, lazy)

    def new(self, *sizes, code=6):
        """A new dense tensor, of float32 unless told otherwise."""
        strides, step = [], 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= max(size, 1)
        return self.hot.new_tensor(sizes, strides, code)

    def everything_sent(self) -> bytes:
        """All bytes of the stream; ends it."""
        self.hot.flush()
        return self.peer.finish()


def messages(stream: bytes, slots: dict):
    """The CALLs, FREEs and ALLOCs of a stream: (kind, …). `slots` says how many words each signature has."""
    at = 0
    while at < len(stream):
        kind = stream[at]
        if kind == CALL:
            (signature,) = struct.unpack_from("<I", stream, at + 1)
            size = 8 * slots[signature]
            yield CALL, signature, struct.unpack_from(f"<{slots[signature]}Q", stream, at + 5)
            at += 5 + size
        elif kind == FREE:
            (count,) = struct.unpack_from("<I", stream, at + 1)
            yield FREE, struct.unpack_from(f"<{count}Q", stream, at + 5)
            at += 5 + 8 * count
        elif kind == ALLOC:
            yield ALLOC, *struct.unpack_from("<QQB", stream, at + 1)
            at += 18
        else:
            raise ValueError(f"message kind {kind} at byte {at}")
