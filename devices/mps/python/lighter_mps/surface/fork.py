# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether this process was forked from one that was using the device.

Such a child must leave the device alone: the connection is its parent's. `link` refuses every use; torch itself asks
here before it seeds the device (`torch.manual_seed` in the worker of a data loader).
"""

import os

from .. import link

_forked = False


def in_forked_child() -> bool:
    """True in a child of a process that had connected."""
    return _forked


def _in_child() -> None:
    global _forked
    _forked = _forked or link._State.socket is not None


def install() -> None:
    """Watches for forks."""
    os.register_at_fork(after_in_child=_in_child)
