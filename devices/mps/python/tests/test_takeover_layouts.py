# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the order of methods comes from, and which torch is refused for it. Needs the files of a torch, and does not import it."""

import importlib.util
import os
import re
import shutil
import tempfile
import unittest

from takeover_support import takeover

layouts = takeover("layouts")
known = takeover("known")
TakeoverError = takeover().TakeoverError

HEADERS = ("c10/core/impl/DeviceGuardImplInterface.h", "ATen/detail/AcceleratorHooksInterface.h", "ATen/detail/MPSHooksInterface.h")


def torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise unittest.SkipTest("no torch to import")
    return os.path.dirname(spec.origin)


class TheTable(unittest.TestCase):
    def test_each_release_is_whole(self):
        self.assertEqual(min(known.KNOWN), (2, 6))
        for version in known.KNOWN:
            layout = layouts.known_layout(version)
            self.assertTrue(layout.is_known(version))
            self.assertEqual(layout.mps[:len(layout.accelerator)], layout.accelerator)
            for slots in (layout.guard, layout.accelerator, layout.mps):
                self.assertEqual(len(set(slots)), len(slots))
            # Ends in no folder: the release needs no headers.
            self.assertEqual(layouts.find("/nowhere", "x", version).digest(), layout.digest())

    def test_the_installed_torch_has_that_order(self):
        folder = torch_folder()
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            version = tuple(map(int, re.search(r"__version__ = '(\d+)\.(\d+)", file.read()).groups()))
        layout = layouts.read(os.path.join(folder, "include"))
        if layout is None:
            self.skipTest("this torch has no headers")
        self.assertTrue(layout.is_known(version), f"{version}: {layout.guard} {layout.accelerator} {layout.mps}")
        self.assertEqual(layout.source, "torch's headers")


class ATorch(unittest.TestCase):
    """A folder with headers of this test's making."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        layout = layouts.known_layout((2, 15))
        own = layout.mps[len(layout.accelerator):]
        self.write(0, "struct C10_API DeviceGuardImplInterface", layout.guard)
        self.write(1, "struct TORCH_API AcceleratorHooksInterface", layout.accelerator)
        self.write(2, "struct TORCH_API MPSHooksInterface : AcceleratorHooksInterface", own)

    def write(self, which: int, head: str, slots, rest: str = ""):
        path = os.path.join(self.folder, "include", HEADERS[which])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        name = re.search(r"(\w+)( :.*)?$", head)[1]
        methods = [f"virtual ~{name}() = default;" if slot == "~" else f"virtual int {slot}() const;" for slot in slots if slot != "~delete"]
        with open(path, "w", encoding="utf-8") as file:
            file.write(head + " {\n" + "\n".join(methods) + rest + "\n};\n")

    def find(self, version=(2, 99)):
        return layouts.find(self.folder, "2.99.0", version)

    def test_is_read(self):
        layout = self.find()
        self.assertEqual(layout.digest(), layouts.known_layout((2, 15)).digest())
        self.assertFalse(layout.is_known((2, 99)))
        self.assertFalse(layout.is_known((2, 7)))
        self.assertTrue(layout.is_known((2, 15)))

    def test_a_new_method_is_another_layout(self):
        self.write(0, "struct DeviceGuardImplInterface", ["new"] + layouts.known_layout((2, 15)).guard)
        layout = self.find((2, 15))
        self.assertEqual(layout.guard[:2], ["new", "type"])
        self.assertFalse(layout.is_known((2, 15)))

    def test_headers_go_before_the_table(self):
        self.write(0, "struct DeviceGuardImplInterface", ["new"] + layouts.known_layout((2, 15)).guard)
        self.assertIn("new", self.find((2, 15)).guard)

    def test_no_headers_and_a_new_release(self):
        os.remove(os.path.join(self.folder, "include", HEADERS[2]))
        with self.assertRaisesRegex(TakeoverError, "2.99.0 is newer than this lighter-mps and has no headers.*libtorch-dev"):
            self.find()
        self.assertEqual(self.find((2, 6)).digest(), layouts.known_layout((2, 6)).digest())

    def test_headers_that_cannot_be_read_as_expected(self):
        self.write(2, "struct MPSHooksInterface : AcceleratorHooksInterface", [], "\n#if X\n#endif\n")
        with self.assertRaisesRegex(TakeoverError, "conditional compilation.*install a torch release"):
            self.find((2, 15))

    def test_a_method_that_is_needed_is_not_there_or_twice(self):
        guard = layouts.known_layout((2, 15)).guard
        self.write(0, "struct DeviceGuardImplInterface", [slot for slot in guard if slot != "getStream"])
        with self.assertRaisesRegex(TakeoverError, "device guard of torch 2.99.0 .* getStream"):
            self.find()
        self.write(0, "struct DeviceGuardImplInterface", guard + ["type"])
        with self.assertRaisesRegex(TakeoverError, "not one type"):
            self.find()


if __name__ == "__main__":
    unittest.main()
