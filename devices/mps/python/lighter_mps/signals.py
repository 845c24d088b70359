# SPDX-License-Identifier: MIT OR Apache-2.0
"""Short stretches in which no signal's handler may raise: where two steps must both be done or neither.

Used by `hot` and `link` around a few assignments, never around anything that waits. `block` itself raises what is
pending before it blocks. In threads other than the main one handlers never run, and this does no harm.
"""

import signal
from _signal import pthread_sigmask

# Those whose handlers raise in practice; plain numbers, since making enums of a mask costs more than the system call.
_NUMBERS = (signal.SIGINT.value, signal.SIGTERM.value, signal.SIGALRM.value)
_BLOCK, _RESTORE = int(signal.SIG_BLOCK), int(signal.SIG_SETMASK)


def block():
    """What `restore` takes."""
    return pthread_sigmask(_BLOCK, _NUMBERS)


def restore(mask) -> None:
    """Raises what came meanwhile."""
    pthread_sigmask(_RESTORE, mask)
