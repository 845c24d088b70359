# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of the takeover share: the package without lighter_mps's own start, and cases in forked processes.

A takeover cannot be undone and a wrong one crashes, so each case has a process of its own. Forking one that has imported torch
costs milliseconds, importing torch seconds.
"""

import importlib
import json
import os
import resource
import signal
import sys
import traceback

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "lighter_mps")
TRIAL = os.path.join(PACKAGE, "takeover", "trial.py")


def takeover(name: str = ""):
    """The package `takeover`, or a module of it."""
    if PACKAGE not in sys.path:
        sys.path.append(PACKAGE)
    return importlib.import_module("takeover" + (name and "." + name))


def in_child(case, *arguments):
    """What `case` returns in a forked process; an AssertionError with its traceback, or the name of the signal, if it fails there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.stdout.flush()
        # What a crash writes is no part of the tests' output; what fails is in the answer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            answer = [True, case(*arguments)]
        except BaseException:
            answer = [False, traceback.format_exc()]
        with open(writer, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise AssertionError(signal.Signals(os.WTERMSIG(status)).name)
    succeeded, answer = json.loads(text)
    if not succeeded:
        raise AssertionError(answer)
    return answer
