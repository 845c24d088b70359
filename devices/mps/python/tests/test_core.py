# SPDX-License-Identifier: MIT OR Apache-2.0
"""The compiled hot path against the one in Python, and what it promises besides. Every case runs in a process of its own.

LIGHTER_TEST_CORE names the library under test. Without a torch for this Python nothing here can run.
"""

import ctypes
import json
import subprocess
import sys
import unittest
from pathlib import Path

import core_behaviour
from core_support import core_library, load_core

FOLDER = Path(__file__).resolve().parent
SECONDS = 300


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs one of the programs beside this file."""
    command = [sys.executable, str(FOLDER / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def makers() -> list:
    """The ways to make tensors that the installed torch has."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    since = {"direct": (2, 14), "steal": (2, 11), "dlpack": (2, 9), "finalizer": (2, 6)}
    return [maker for maker, first in since.items() if version >= first]


class SameAsPython(unittest.TestCase):
    """Misses, results and bytes of the stream are those of the hot path in Python."""

    maxDiff = 2000

    def report(self, *arguments: str) -> dict:
        done = run("core_scenarios.py", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_every_scenario_with_every_maker(self):
        expected = self.report("hot")
        self.assertGreater(len(expected["stream"]), 4000)
        for maker in makers():
            found = self.report("core", maker)
            for name, content in expected.items():
                with self.subTest(maker=maker, scenario=name):
                    self.assertEqual(content, found[name])

    def test_there_is_a_best_maker(self):
        self.assertEqual(self.report("core"), self.report("core", makers()[0]))


class Behaviour(unittest.TestCase):
    """One test for each function of `core_behaviour`."""


def _behaviour(name: str):
    def test(self):
        done = run("core_behaviour.py", name)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, f"done {name}"), done.stderr[-3000:])

    test.__doc__ = getattr(core_behaviour, name).__doc__
    return test


for _name in (
    "calls_leak_nothing", "failing_calls_leak_nothing", "tensors_end", "views_are_torchs", "factories_allocate", "copies_choose",
    "flushes_by_itself", "slow_peers_get_everything", "interrupts_lose_nothing", "lost_peers_are_told", "sockets_come_late",
    "sync_calls_follow", "threads_share_one_stream", "reentrant_calls_keep_order", "forked_children_stay_away", "exits_quietly",
    "exits_quietly_closed", "refuses",
):  # fmt: skip
    setattr(Behaviour, f"test_{_name}", _behaviour(_name))


class Library(unittest.TestCase):
    """What the file itself is."""

    def test_thunks_return_their_numbers(self):
        class Pair(ctypes.Structure):
            _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]

        addresses = load_core().thunk_addresses()
        self.assertEqual(sorted(addresses), [0, 1, 13])
        for number, address in addresses.items():
            pair = ctypes.CFUNCTYPE(Pair)(address)()
            self.assertEqual((pair.first, pair.second), (number, 0))

    def test_it_is_linked_to_neither_torch_nor_python(self):
        done = subprocess.run(["readelf", "-d", str(core_library())], capture_output=True, text=True, check=True)
        needed = [line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
        self.assertTrue(needed)
        self.assertFalse([name for name in needed if "torch" in name or "python" in name or "c10" in name], needed)


if __name__ == "__main__":
    unittest.main()
