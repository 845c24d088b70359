# SPDX-License-Identifier: MIT OR Apache-2.0
"""Optimizers and gradient clipping: whether they take all parameters in one call.

Torch leaves that to a list of device types on which such calls (`_foreach_…`) are faster. Whether they are on mps depends on
what computes on the host: a GPU with kernels for lists does a step in a third of the calls. A host's processor and Apple's GPU
take the tensors one by one either way, and keep torch's own choice for mps, so that their results stay equal to the bit.
"""

import importlib

from .. import link

# Host devices whose torch has kernels for lists of tensors.
_WITH_KERNELS = ("cuda", "xpu")
# Where the list is, and where torch looks it up besides; `torch.optim` hides its module of that name.
_HOME = "torch.utils._foreach_utils"
_READERS = (_HOME, "torch.optim.optimizer", "torch.optim.swa_utils")
_NAME = "_get_foreach_kernels_supported_devices"


def install() -> None:
    """Adds mps to the list while the host is such a one."""
    own = getattr(importlib.import_module(_HOME), _NAME)

    def supported():
        # Whoever has tensors on mps is connected; nobody is connected by asking.
        device = str(link.limits().get("device", ""))
        return own() + ["mps"] if device.split(":")[0] in _WITH_KERNELS else own()

    for name in _READERS:
        module = importlib.import_module(name)
        if getattr(module, _NAME, None) is own:
            setattr(module, _NAME, supported)
