# SPDX-License-Identifier: MIT OR Apache-2.0
"""From what the host answers to the exception that the user sees, with the user's own line.

Called by `link` for each reply that is an error, and by `signatures` to remember where a signature was first used: an
error comes back later than the call that caused it, so the traceback alone would name an innocent line.
"""

import os
import sys

import torch

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

# The line of first use, by signature; an entry is replaced when its number is used again.
_lines: dict = {}

# Names that a host may give; anything else becomes a RuntimeError.
_KINDS = {
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
    "IndexError": IndexError,
    "NotImplementedError": NotImplementedError,
    "AssertionError": AssertionError,
    "ZeroDivisionError": ZeroDivisionError,
    "OverflowError": OverflowError,
    "LinAlgError": torch.linalg.LinAlgError,
    "_LinAlgError": torch.linalg.LinAlgError,
    "OutOfMemoryError": getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError),
}

FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)


class HostLost(RuntimeError):
    """The connection to the host's worker is gone, and with it everything that was on the device."""


def user_line():
    """Where the user's own code is now: `file:line`, or None in a thread that has none (backward's)."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH, "<frozen", "<eval_with_key")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def remember_line(signature: int) -> None:
    """Notes the user's line for a new signature."""
    _lines[signature] = user_line()


def forget_lines() -> None:
    """All signatures are gone."""
    _lines.clear()


def from_reply(body) -> Exception:
    """The exception for the body of a reply with status 1."""
    if type(body) is not dict:
        return RuntimeError(f"lighter-mps: the host answered with an error that says nothing: {body!r}")
    message = str(body.get("message") or "the host gave no reason")
    operator, signature = body.get("op"), body.get("signature")
    where = _lines.get(signature) if signature else None
    if operator and operator not in message:
        message += f"\n(operator {operator}" + (f", first used so at {where})" if where else ")")
    elif where:
        message += f"\n(first used so at {where})"
    return _KINDS.get(body.get("kind"), RuntimeError)(message)


def refuse_float64() -> None:
    """MPS has no float64; the text is torch's own."""
    raise TypeError(FLOAT64)
