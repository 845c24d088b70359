# SPDX-License-Identifier: MIT OR Apache-2.0
"""`import lighter_mps` gives a stock Linux torch the device "mps": the host's PyTorch, over a socket.

The import installs everything once: settings, the takeover of torch's MPS key, the hot path, the kernels, and the parts
of torch's Python surface that belong to the device. Nothing is connected before the first tensor is made there.
"""

import atexit
import os
import threading

import torch

from . import settings as _settings

__all__ = ["statistics", "synchronize"]

_install_lock = threading.Lock()
_installed = False
_hot = None


def _choose(settings):
    """The Rust core where there is one and it is wanted, else the same in Python."""
    if settings.core:
        try:
            from . import _core

            return _core
        except ImportError:
            pass
    from . import hot

    return hot


def _install() -> None:
    global _installed, _hot
    with _install_lock:
        if _installed:
            return
        settings = _settings.read()
        from . import takeover

        hot = _hot = _choose(settings)
        takeover.install(hot if hasattr(hot, "thunk_addresses") else None)
        from . import kernels, link, local, ring, signatures

        hot.configure(
            os.path.join(os.path.dirname(torch.__file__), "lib"),
            torch.Tensor,
            torch.nn.Parameter,
            signatures.miss,
            link.wait if settings.sync else None,
            link.no_socket,
        )
        link.install(hot, settings, ring.make)
        local.install(hot)
        from . import surface
        from .surface import cpu_generator, generator

        signatures.install(hot, local.new_storage, generator.number_of, cpu_generator.draws_here, cpu_generator.run)
        kernels.install(hot)
        atexit.register(hot.close)
        surface.install()
        _installed = True


def statistics() -> dict:
    """Totals since the start: calls, round_trips, bytes_sent, flushes, signatures."""
    from . import link, signatures

    return {**_hot.counters(), **link.statistics(), **signatures.statistics()}


def synchronize() -> None:
    """Waits for the device; raises the first error of what was sent."""
    from . import link

    link.wait()


_install()
