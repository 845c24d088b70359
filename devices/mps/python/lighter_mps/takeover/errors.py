# SPDX-License-Identifier: MIT OR Apache-2.0
"""The one exception of the takeover."""


class TakeoverError(RuntimeError):
    """torch cannot be given an mps device here. The text is one sentence: what, why, and what to do. torch is as it was."""
