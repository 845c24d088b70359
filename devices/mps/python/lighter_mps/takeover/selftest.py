# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tries the takeover in a process of its own before this one is touched: a wrong vtable order crashes, and a crash cannot be caught.

A trial costs an `import torch`, two seconds or more, which a container that is thrown away would pay at each run. So a layout that equals
the one lighter-mps was tested with for that torch release (`known`), and that the libraries agree with, is not tried; any other is, once
a user: the good result is kept in the cache folder. `LIGHTER_MPS_SELFTEST=1` tries always, `=0` never. Called by `install()` before its
first write; refuses a torch that fails. The trial itself is `trial`.
"""

import hashlib
import json
import os
import platform
import signal
import stat
import subprocess
import sys
import tempfile

from .errors import TakeoverError
from .layouts import Layout

# Part of the cache's key: to be raised when a result of an older takeover says nothing about this one.
_FORMAT = 1
_LIMIT_S = 180
# Processors on which a known layout needs no trial.
_TESTED_MACHINES = ("x86_64",)
_WAY_OUT = "install a torch release that lighter-mps knows or a newer lighter-mps, or set LIGHTER_MPS_SELFTEST=0 to go on at your own risk"


def check(torch, layout: Layout, is_tested: bool, core_file: "str | None" = None) -> None:
    """Returns if this torch bears the takeover; raises `TakeoverError` if not. `is_tested`: nothing is unusual about the layout."""
    wish = os.environ.get("LIGHTER_MPS_SELFTEST", "")
    if wish == "0":
        return
    if wish != "1" and is_tested and platform.machine() in _TESTED_MACHINES:
        return
    text = key(torch, layout, core_file)
    folder = cache_folder()
    if wish != "1" and folder is not None and is_remembered(folder, text):
        return
    run(torch.__version__, layout, core_file)
    if folder is not None:
        remember(folder, text)


def key(torch, layout: Layout, core_file: "str | None") -> str:
    """What a good result is about: it holds for this text only."""
    extension = os.stat(torch._C.__file__)
    return json.dumps([
        _FORMAT, torch.__version__, getattr(torch.version, "git_version", None), extension.st_size, extension.st_mtime_ns,
        platform.machine(), sys.implementation.cache_tag, layout.digest(), core_file is not None,
    ])


def run(torch_version: str, layout: Layout, core_file: "str | None" = None) -> None:
    """One trial."""
    if not sys.executable or not os.access(sys.executable, os.X_OK):
        raise TakeoverError(
            f"torch {torch_version} is one that lighter-mps must try first, and this process has no Python program to try it with; {_WAY_OUT}"
        )
    task = json.dumps({
        "path": [entry or os.getcwd() for entry in sys.path], "guard": layout.guard, "accelerator": layout.accelerator, "mps": layout.mps,
        "core": core_file,
    })
    # Nothing of the user's start-up files may run in it: one that imports lighter_mps would start a trial in the trial.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT")}
    environment.update(TORCH_DEVICE_BACKEND_AUTOLOAD="0", OMP_NUM_THREADS="1", LIGHTER_MPS_SELFTEST="0")
    command = [sys.executable, "-S", "-s", os.path.join(os.path.dirname(os.path.abspath(__file__)), "trial.py")]
    try:
        result = subprocess.run(
            command, input=task, env=environment, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TakeoverError(f"torch {torch_version} did not end lighter-mps's self-test within {_LIMIT_S} s; {_WAY_OUT}") from None
    except OSError as error:
        raise TakeoverError(f"lighter-mps's self-test for torch {torch_version} cannot be started ({error}); {_WAY_OUT}") from None
    failure = reading(result.returncode, result.stdout, result.stderr)
    if failure is not None:
        raise TakeoverError(f"torch {torch_version} fails lighter-mps's self-test {failure}; {_WAY_OUT}")


def reading(code: int, output: str, errors: str) -> "str | None":
    """What went wrong in a trial that ended like this; nothing if all went well."""
    lines = output.splitlines()
    if code == 0 and lines[-1:] == ["ok"]:
        return None
    steps = [line[len("step "):] for line in lines if line.startswith("step ")]
    where = f"at the step \"{steps[-1]}\"" if steps else "before its first step"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"{where}: the process crashed ({name})"
    failed = [line[len("failed "):] for line in lines if line.startswith("failed ")]
    told = failed[-1] if failed else (errors.strip().splitlines() or [f"exit status {code}"])[-1]
    return f"{where}: {told[:300]}"


def cache_folder() -> "str | None":
    """A folder that is this user's alone, or none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    for folder in (os.path.join(base, "lighter-mps"), os.path.join(tempfile.gettempdir(), f"lighter-mps-{os.geteuid()}")):
        if not os.path.isabs(folder):
            continue
        try:
            os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                pass
            if _is_mine(os.lstat(folder), stat.S_ISDIR) and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    return None


def is_remembered(folder: str, text: str) -> bool:
    """Does the folder hold a good result for `text`?"""
    try:
        descriptor = os.open(_file(folder, text), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        return _is_mine(os.fstat(descriptor), stat.S_ISREG) and file.read(len(text) + 4096) == text + "\n"


def remember(folder: str, text: str) -> None:
    """Keeps a good result; a folder that does not take it costs another trial next time, and nothing else."""
    try:
        descriptor, name = tempfile.mkstemp(dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, _file(folder, text))
    except OSError:
        pass


def _file(folder: str, text: str) -> str:
    return os.path.join(folder, "selftest-" + hashlib.sha256(text.encode()).hexdigest()[:24])


def _is_mine(status: os.stat_result, is_kind) -> bool:
    # Who can write to it could name a torch that crashes as a good one.
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
