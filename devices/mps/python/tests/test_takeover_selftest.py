# SPDX-License-Identifier: MIT OR Apache-2.0
"""When the self-test runs, what is kept of it, and what its ends are told as. Programs stand in for Python here: no torch is needed."""

import os
import platform
import shutil
import stat
import sys
import tempfile
import types
import unittest
from unittest import mock

from takeover_support import takeover

selftest = takeover("selftest")
layouts = takeover("layouts")
TakeoverError = takeover().TakeoverError

LAYOUT = layouts.known_layout((2, 15))
TORCH = types.SimpleNamespace(__version__="2.99.0", version=types.SimpleNamespace(git_version="abc"), _C=types.SimpleNamespace(__file__=__file__))


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.cache = os.path.join(self.folder, "cache")
        patch = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": self.cache})
        patch.start()
        self.addCleanup(patch.stop)
        os.environ.pop("LIGHTER_MPS_SELFTEST", None)


class Running(Folder):
    """With a program that writes down that it was started, and ends as the test wishes."""

    def program(self, ending: str) -> None:
        path = os.path.join(self.folder, "python")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\ncat >{self.folder}/task\necho run >>{self.folder}/runs\necho step one\n{ending}\n")
        os.chmod(path, 0o755)
        patch = mock.patch.object(sys, "executable", path)
        patch.start()
        self.addCleanup(patch.stop)

    def runs(self) -> int:
        try:
            with open(os.path.join(self.folder, "runs"), encoding="utf-8") as file:
                return len(file.readlines())
        except FileNotFoundError:
            return 0

    def check(self, wish=None, is_tested=False, torch=TORCH, layout=LAYOUT):
        with mock.patch.dict(os.environ, {} if wish is None else {"LIGHTER_MPS_SELFTEST": wish}):
            selftest.check(torch, layout, is_tested)

    def test_a_good_result_is_kept(self):
        self.program("echo ok")
        self.check()
        self.check()
        self.assertEqual(self.runs(), 1)

    def test_another_torch_or_layout_is_tried_anew(self):
        self.program("echo ok")
        self.check()
        self.check(torch=types.SimpleNamespace(**{**vars(TORCH), "__version__": "2.99.1"}))
        self.check(layout=layouts.known_layout((2, 6)))
        self.assertEqual(self.runs(), 3)

    @unittest.skipUnless(platform.machine() in selftest._TESTED_MACHINES, "not a processor on which layouts were tested")
    def test_a_tested_layout_is_not_tried(self):
        self.program("echo ok")
        self.check(is_tested=True)
        self.assertEqual(self.runs(), 0)

    def test_on_another_processor_it_is(self):
        self.program("echo ok")
        with mock.patch.object(platform, "machine", lambda: "other"):
            self.check(is_tested=True)
        self.assertEqual(self.runs(), 1)

    def test_the_variable(self):
        self.program("echo ok")
        self.check("0")
        self.assertEqual(self.runs(), 0)
        self.check("1", is_tested=True)
        self.check("1", is_tested=True)
        self.assertEqual(self.runs(), 2)

    def test_a_bad_result_is_told_and_not_kept(self):
        self.program("echo 'failed AssertionError: the accelerator is cuda'; exit 1")
        for _ in range(2):
            with self.assertRaisesRegex(TakeoverError, 'torch 2.99.0 fails .* at the step "one": AssertionError: the accelerator is cuda; install'):
                self.check()
        self.assertEqual(self.runs(), 2)

    def test_a_crash_is_told_as_one(self):
        self.program("kill -SEGV $$")
        with self.assertRaisesRegex(TakeoverError, r'at the step "one": the process crashed \(SIGSEGV\).*LIGHTER_MPS_SELFTEST=0'):
            self.check()

    def test_one_that_does_not_end(self):
        self.program("exec sleep 60")
        with mock.patch.object(selftest, "_LIMIT_S", 0.5), self.assertRaisesRegex(TakeoverError, "did not end"):
            self.check()

    def test_no_program(self):
        for path in ("", "/nowhere/python"):
            with mock.patch.object(sys, "executable", path), self.assertRaisesRegex(TakeoverError, "no Python program to try it with"):
                self.check()

    def test_one_that_is_no_program(self):
        path = os.path.join(self.folder, "text")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\x7fELF")
        os.chmod(path, 0o755)
        with mock.patch.object(sys, "executable", path), self.assertRaisesRegex(TakeoverError, "cannot be started"):
            self.check()

    def test_without_a_folder_it_still_runs(self):
        self.program("echo ok")
        with mock.patch.object(selftest, "cache_folder", lambda: None):
            self.check()
            self.check()
        self.assertEqual(self.runs(), 2)


class Reading(unittest.TestCase):
    def test_good(self):
        self.assertIsNone(selftest.reading(0, "step one\nok\n", "a warning"))

    def test_the_last_step_is_the_place(self):
        self.assertEqual(selftest.reading(1, "step one\nstep two\nfailed X: y\n", ""), 'at the step "two": X: y')

    def test_an_end_without_a_word(self):
        self.assertEqual(selftest.reading(0, "", ""), "before its first step: exit status 0")
        self.assertEqual(selftest.reading(3, "", "a\nb\n"), "before its first step: b")

    def test_ok_that_was_not_the_end(self):
        self.assertIsNotNone(selftest.reading(0, "ok\nstep two\n", ""))
        self.assertIsNotNone(selftest.reading(1, "ok\n", ""))

    def test_an_unknown_signal(self):
        self.assertIn("signal 99", selftest.reading(-99, "step one\n", ""))


class Cache(Folder):
    def test_is_private(self):
        folder = selftest.cache_folder()
        self.assertEqual(folder, os.path.join(self.cache, "lighter-mps"))
        self.assertEqual(stat.S_IMODE(os.stat(folder).st_mode), 0o700)
        self.assertFalse(selftest.is_remembered(folder, "x"))
        selftest.remember(folder, "x")
        self.assertTrue(selftest.is_remembered(folder, "x"))
        self.assertFalse(selftest.is_remembered(folder, "y"))

    def test_without_the_variable_it_is_in_the_home_folder(self):
        with mock.patch.dict(os.environ, {"HOME": self.folder}):
            for value in ("", "relative"):
                with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": value}):
                    self.assertEqual(selftest.cache_folder(), os.path.join(self.folder, ".cache", "lighter-mps"))

    def test_where_the_home_folder_cannot_be_written_it_is_in_the_temporary_one(self):
        with open(self.cache, "w", encoding="utf-8"):
            pass  # a file where a folder should be: it stops root too
        with mock.patch.object(tempfile, "tempdir", self.folder):
            self.assertEqual(selftest.cache_folder(), os.path.join(self.folder, f"lighter-mps-{os.geteuid()}"))

    def test_a_folder_that_others_can_write_is_not_trusted(self):
        folder = selftest.cache_folder()
        os.chmod(folder, 0o777)
        with mock.patch.object(tempfile, "tempdir", self.folder):
            other = selftest.cache_folder()
            self.assertNotEqual(other, folder)
            os.chmod(other, 0o770)
            self.assertIsNone(selftest.cache_folder())

    def test_a_link_is_not_trusted(self):
        mine = os.path.join(self.folder, "mine")
        os.mkdir(mine, 0o700)
        os.mkdir(self.cache)
        os.symlink(mine, os.path.join(self.cache, "lighter-mps"))
        with mock.patch.object(tempfile, "tempdir", os.path.join(self.folder, "missing")):
            self.assertNotEqual(selftest.cache_folder(), os.path.join(self.cache, "lighter-mps"))

    def test_a_forged_result_is_not_trusted(self):
        folder = selftest.cache_folder()
        selftest.remember(folder, "x")
        path = selftest._file(folder, "x")
        os.chmod(path, 0o666)
        self.assertFalse(selftest.is_remembered(folder, "x"))
        os.chmod(path, 0o600)
        self.assertTrue(selftest.is_remembered(folder, "x"))
        os.rename(path, path + "-2")
        os.symlink(path + "-2", path)
        self.assertFalse(selftest.is_remembered(folder, "x"))
        os.remove(path)
        os.mkfifo(path)
        self.assertFalse(selftest.is_remembered(folder, "x"))

    @unittest.skipUnless(os.geteuid() == 0, "only root can give files away")
    def test_another_users_folder_and_file_are_not_trusted(self):
        folder = selftest.cache_folder()
        selftest.remember(folder, "x")
        os.chown(selftest._file(folder, "x"), 12345, 12345)
        self.assertFalse(selftest.is_remembered(folder, "x"))
        os.chown(folder, 12345, 12345)
        with mock.patch.object(tempfile, "tempdir", self.folder):
            self.assertNotEqual(selftest.cache_folder(), folder)


if __name__ == "__main__":
    unittest.main()
