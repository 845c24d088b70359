# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line of the host's program: `worker` or `probe`, and `--path` for a torch outside site-packages."""

import argparse
import sys


def main(arguments: list) -> int:
    """Runs the program; gives its exit status."""
    parser = argparse.ArgumentParser(prog="lighter_mps_host", description="lighter's mps device: the host's part")
    parser.add_argument("role", choices=["worker", "probe"])
    parser.add_argument(
        "--path", action="append", default=[], metavar="DIR", help="a folder with torch, looked at before site-packages"
    )
    options = parser.parse_args(arguments)
    # After the folder of these packages, which __main__ put first.
    sys.path[1:1] = options.path
    if options.role == "probe":
        from .probe import probe

        return probe()
    from .control import worker

    return worker()
