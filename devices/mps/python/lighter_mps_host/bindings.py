# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds torch's own quick Python function for an operator overload, and proves that it is the same call.

Calling an overload by its handle goes through a general converter of arguments; `torch.add` and `Tensor.add_` have parsers
of their own and take little more than half the time. But they choose the overload themselves. So a candidate is called
once with a signature's own arguments under a dispatch mode that records what would run and stops there: only where that
is the same overload with the same arguments may the candidate be used. The choice follows from the arguments' types and
metadata, which a signature fixes.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SPACES = (torch._C._VariableFunctions, torch._C._nn)


class Stopped(Exception):
    """Ends a candidate before anything ran."""


class Recorder(TorchDispatchMode):
    """Records the first operator that would run, and runs nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping the method below for its compiler, whose import takes seconds at the first call."""
        return False

    def __init__(self):
        super().__init__()
        self.seen = None

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.seen = (function, arguments, keywords or {})
        raise Stopped


def candidates(operator, arguments: list):
    """Functions that bear the operator's name."""
    name = operator.name.split("::")[1].split(".")[0]
    if arguments and isinstance(arguments[0], torch.Tensor) and operator.positional[:1] == ["self"]:
        method = getattr(torch._C.TensorBase, name, None)
        if method is not None:
            yield method
    for space in SPACES:
        function = getattr(space, name, None)
        if function is not None:
            yield function


def quick(operator, arguments: list, keywords: dict):
    """A function that may be called instead of the overload with arguments like these, or None."""
    for candidate in candidates(operator, arguments):
        recorder = Recorder()
        try:
            with recorder:
                candidate(*arguments, **keywords)
        except Exception:
            # Stopped is the good case; anything else is a candidate that does not take these arguments.
            pass
        if recorder.seen is None:
            continue
        function, given, named = recorder.seen
        if function is operator.overload and complete(operator, given, named, arguments, keywords):
            return candidate
    return None


def complete(operator, given, named: dict, arguments: list, keywords: dict) -> bool:
    """Whether two ways of calling an operator mean the same, with defaults filled in."""
    ours = dict(zip(operator.positional, arguments, strict=False)) | keywords
    theirs = dict(zip(operator.positional, given, strict=False)) | named
    for name, argument in operator.arguments.items():
        default = argument.default_value if argument.has_default_value() else None
        if not same(ours.get(name, default), theirs.get(name, default)):
            return False
    return True


def same(one, other) -> bool:
    """Whether two arguments are the same: tensors by identity, numbers by value and type."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    return one == other or (one != one and other != other)
