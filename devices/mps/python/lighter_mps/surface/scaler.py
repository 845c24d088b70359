# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.amp.GradScaler` on mps in the torch versions that divide the scale in float64, which mps does not have.

Newer versions divide in single precision on mps by themselves; they are left alone.
"""

import functools

import torch


class _InSinglePrecision:
    """Stands in for the scale while `unscale_` runs: its `double()` stays what it is."""

    def __init__(self, scale):
        self._scale = scale

    def double(self):
        return self._scale

    def __getattr__(self, name):
        return getattr(self._scale, name)


def _unscale(original):
    @functools.wraps(original)
    def unscale_(self, optimizer):
        scale = self._scale
        if scale is None or not scale.is_mps:
            return original(self, optimizer)
        self._scale = _InSinglePrecision(scale)
        try:
            return original(self, optimizer)
        finally:
            self._scale = scale

    return unscale_


def install() -> None:
    """Wraps `unscale_` where it knows nothing of mps."""
    scaler = torch.amp.GradScaler
    if "mps:0" not in scaler.unscale_.__code__.co_consts:
        scaler.unscale_ = _unscale(scaler.unscale_)
