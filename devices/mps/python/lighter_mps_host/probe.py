# SPDX-License-Identifier: MIT OR Apache-2.0
"""Says, in one line of JSON, what this Python's torch can compute on and which files a worker must be able to read.

Run by `lighter doctor` and by the service before it starts workers; a Python without torch is an answer, not an error.
"""

import json
import os
import platform
import sys
import sysconfig


def probe() -> int:
    """Prints the answer."""
    facts = {"python": platform.python_version(), "executable": sys.executable}
    try:
        import torch
    except Exception as error:
        print(json.dumps({"missing": "torch", "reason": f"{type(error).__name__}: {error}"[:2000], **facts}))
        return 0
    facts.update(torch=str(torch.__version__), devices=devices(torch), paths=paths(torch), libraries=libraries())
    print(json.dumps(facts))
    return 0


def devices(torch) -> list:
    """What torch can compute on, best first."""
    found = []
    if torch.backends.mps.is_available():
        found.append({"name": "mps", "description": f"Apple GPU of {platform.machine()}"})
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            for index in range(module.device_count()):
                found.append({"name": f"{kind}:{index}", "description": module.get_device_name(index)})
    cores = os.cpu_count() or 1
    found.append({"name": "cpu", "description": f"{platform.processor() or platform.machine()}, {cores} threads"})
    return found


def paths(torch) -> list:
    """Folders that a worker reads: the interpreter, its library, torch, and every folder modules come from."""
    wanted = [sys.executable, os.path.realpath(sys.executable), sys.prefix, sys.base_prefix, sys.exec_prefix]
    wanted += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("LIBDIR")]
    wanted += [os.path.dirname(torch.__file__), os.path.join(os.path.dirname(torch.__file__), "lib"), *sys.path]
    wanted += [os.path.dirname(path) for path in libraries()]
    unique = dict.fromkeys(os.path.abspath(path) for path in wanted if path)
    return [path for path in unique if os.path.exists(path)]


def libraries() -> list:
    """Libraries that are loaded by now; empty where the system has no such list."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(path for path in mapped if ".so" in os.path.basename(path) and os.path.exists(path))
