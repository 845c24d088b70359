# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs at the start of every Python whose PYTHONPATH names this folder; then the image's own sitecustomize, if any.

With LIGHTER_ANE_AUTO=1 it makes onnxruntime use the ane device unasked, see lighter_ane_auto.py. Does nothing otherwise,
and never keeps a program from starting.
"""

import os
import sys


def _start():
    here = os.path.dirname(os.path.abspath(__file__))
    if os.environ.get("LIGHTER_ANE_AUTO") == "1":
        try:
            import lighter_ane_auto

            lighter_ane_auto.install()
        except Exception as error:
            sys.stderr.write("lighter-ane: LIGHTER_ANE_AUTO has no effect: %s\n" % error)
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_start()
