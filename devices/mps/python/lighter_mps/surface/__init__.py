# SPDX-License-Identifier: MIT OR Apache-2.0
"""What Python sees of the mps device beyond operators: `torch.mps`, generators, saving, attention, compiling.

`lighter_mps` calls `install()` once, after its kernels are registered. Each file changes one part of torch and says
which. They speak to the host through `link`, and none of them connects by being installed.
"""

from . import (
    accelerator,
    attention,
    compiler,
    device,
    fork,
    generator,
    marks,
    optimizers,
    scaler,
    serialization,
    storages,
    streams,
)

_PARTS = (
    fork,
    device,
    generator,
    streams,
    marks,
    optimizers,
    accelerator,
    storages,
    serialization,
    attention,
    scaler,
    compiler,
)


def install() -> None:
    """Installs every part."""
    for part in _PARTS:
        part.install()
