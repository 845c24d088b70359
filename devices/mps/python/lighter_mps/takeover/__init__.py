# SPDX-License-Identifier: MIT OR Apache-2.0
"""Gives a stock Linux torch a `torch.device("mps")`: the device guard and the hooks, without a compiler.

`lighter_mps` calls `install()` once at import, before it registers kernels. Refuses, with one sentence in a `TakeoverError` and torch untouched:
a system that is not Linux, a processor that is neither x86_64 nor aarch64, a free-threaded Python, a subinterpreter, a torch older than 2.6 or with
an unknown layout, a torch whose own accelerator is present, an mps device that somebody else has made, and a torch on which the self-test fails.
"""

import ctypes
import os
import platform
import re
import sys
import sysconfig
import threading

from . import guard, hooks, layouts, selftest, thunks
from .errors import TakeoverError
from .native import Libraries

__all__ = ["TakeoverError", "install"]

_OLDEST_TORCH = (2, 6)
_lock = threading.Lock()


def install(core=None) -> None:
    """Makes mps torch's accelerator. `core` is the module `lighter_mps._core`, if there is one. The second call does nothing."""
    import torch

    with _lock:
        check_interpreter()
        version = torch_version(torch.__version__)
        libraries = Libraries(torch._C.__file__)
        if guard.is_ours(libraries):
            return
        layout = layouts.find(os.path.dirname(torch.__file__), torch.__version__, version)
        is_tested = layout.is_known(version) and guard.counts_agree(libraries, layout)
        core_file = getattr(core, "__file__", None)
        prepare_and_write(torch, libraries, layout, core, lambda: selftest.check(torch, layout, is_tested, core_file))


def prepare_and_write(torch, libraries: Libraries, layout: "layouts.Layout", core=None, check=None) -> None:
    """Builds everything, checks it, and only then writes to torch."""
    absent = hooks.absent_accelerator(torch)
    constants = thunks.addresses(platform.machine(), core)
    writes = hooks.prepare(libraries, layout, constants, absent) + guard.prepare(libraries, layout, constants)
    if check is not None:
        check()
    for write in writes:
        write.perform()


def torch_version(text: str) -> "tuple[int, int]":
    """Major and minor of torch's version; refuses those without the pieces that mps tensors are made of."""
    match = re.match(r"(\d+)\.(\d+)", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _OLDEST_TORCH:
        raise TakeoverError(f"torch {text} is too old to be given an mps device; install torch {'.'.join(map(str, _OLDEST_TORCH))} or newer")
    return version


def check_interpreter() -> None:
    """Refuses an operating system or a kind of Python that the takeover does not work in."""
    if sys.platform != "linux":
        raise TakeoverError(f"lighter_mps is for Linux containers and this is {sys.platform}; a Mac's own torch has mps already")
    if sys.maxsize < 1 << 32 or sys.byteorder != "little":
        raise TakeoverError("lighter_mps needs a 64-bit little-endian Python and this is another; use an x86_64 or aarch64 image")
    if sys.implementation.name != "cpython":
        raise TakeoverError(f"lighter_mps needs CPython and this is {sys.implementation.name}; use CPython 3.10 or newer")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise TakeoverError("lighter_mps does not support a free-threaded Python yet; use the ordinary build of the same version")
    current = ctypes.pythonapi.PyInterpreterState_Get
    current.restype, current.argtypes = ctypes.c_void_p, ()
    number = ctypes.pythonapi.PyInterpreterState_GetID
    number.restype, number.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
    if number(current()) != 0:
        raise TakeoverError("lighter_mps does not work in a subinterpreter, for torch has one state in a process; import it in the main interpreter")
