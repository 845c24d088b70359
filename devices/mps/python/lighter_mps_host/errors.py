# SPDX-License-Identifier: MIT OR Apache-2.0
"""The two ways in which something a client asked for goes wrong, and how each is told.

A `Violation` breaks the stream's rules and ends it. A `Failure` is one operator's error, which the client gets as the
exception it would have had from its own torch.
"""

MAX_MESSAGE_CHARACTERS = 8192


class Violation(Exception):
    """The client broke the protocol: the stream ends, with this text as the reason."""


class Refusal(Exception):
    """An operator, or an argument of it, that this host does not run; the text says which and why."""


class OutOfMemory(Exception):
    """More memory was asked for than this client may hold."""


class Failed(Exception):
    """A failure that is known already: an argument is the result of an operator that failed, or a prediction is wrong."""

    def __init__(self, failure: "Failure"):
        super().__init__(failure.message)
        self.failure = failure


class Failure:
    """What the client is told of an operator that failed."""

    __slots__ = ("kind", "message", "operator", "signature")

    def __init__(self, operator: str, kind: str, message: str, signature: int = 0):
        self.operator, self.kind, self.signature = operator, kind, signature
        self.message = message[:MAX_MESSAGE_CHARACTERS]

    def body(self) -> dict:
        """The reply's value."""
        return {"op": self.operator, "kind": self.kind, "message": self.message, "signature": self.signature}


def failure_of(error: BaseException, operator: str, signature: int = 0) -> Failure:
    """The failure that an exception of torch, or one of ours, is."""
    if isinstance(error, Failed):
        return error.failure
    message = str(error) or type(error).__name__
    kind = type(error).__name__.lstrip("_")
    if isinstance(error, Refusal):
        kind = "NotImplementedError"
    elif isinstance(error, (OutOfMemory, MemoryError)) or "can't allocate memory" in message:
        kind = "OutOfMemoryError"
        if "out of memory" not in message:
            message = f"MPS backend out of memory: the host said: {message}"
    return Failure(operator, kind, message.encode(errors="replace").decode(), signature)
