# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators of one name and schema whose results mean something else in another version of torch.

What a forward operator of the host's torch keeps for its gradient is read by the formulas of the container's. Where the
two do not agree on what it is, the results are brought into the container's form here. `kernels` asks for each operator
that it registers; between versions that agree, nothing is changed.
"""

import torch

from . import link


def number(version: str) -> tuple:
    """(2, 11) of "2.11.0+cu130"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


_OWN = number(str(torch.__version__))
# From here on `_linalg_solve_ex` gives the factors of the matrix itself; before, those of its transpose where the matrix
# is contiguous and real.
_SOLVE_FACTORS_ITSELF = (2, 11)


def _solve(kernel):
    """`_linalg_solve_ex` with the factors that this torch's gradient formula reads."""
    factors = torch.ops.aten.linalg_lu_factor_ex.default

    def solve(matrix, right, **options):
        results = kernel(matrix, right, **options)
        host = number(link.limits().get("torch", "") or str(torch.__version__))
        agree = (host >= _SOLVE_FACTORS_ITSELF) == (_OWN >= _SOLVE_FACTORS_ITSELF)
        if agree or not matrix.is_contiguous() or matrix.is_complex():
            return results
        lu, pivots, _ = factors(matrix if _OWN >= _SOLVE_FACTORS_ITSELF else matrix.mT)
        return results[0], lu, pivots, results[3]

    return solve


_ADAPTED = {"_linalg_solve_ex": _solve}


def adapted(base: str, kernel):
    """The kernel to register for an operator."""
    adapt = _ADAPTED.get(base)
    return adapt(kernel) if adapt else kernel
