# SPDX-License-Identifier: MIT OR Apache-2.0
"""Starts the host's program both from its folder and from a zip with both packages, whose root holds a copy of this.

Isolated mode (-I) looks neither at PYTHONPATH nor at the current folder, so the place of the packages is put first here.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = os.path.dirname(HERE) if os.path.basename(HERE) == "lighter_mps_host" else HERE
if sys.path[0:1] == [HERE]:
    del sys.path[0]
sys.path.insert(0, PACKAGES)

from lighter_mps_host.program import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
