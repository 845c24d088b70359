# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the cases share: a host to start and to end, sessions with and without the device, and counting.

LIGHTER_TEST_ANE_EP names the library under test, LIGHTER_TEST_HOST_PYTHONPATH where the host's ONNX Runtime lies.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy
import onnxruntime

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.environ["LIGHTER_TEST_ANE_EP"]
MODELS = os.environ.get("LIGHTER_TEST_MODELS", "")
FOLDER = tempfile.mkdtemp(prefix="lighter-ane-")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
EP = "LighterANE"


def register():
    onnxruntime.register_execution_provider_library("lighter", LIBRARY)
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == EP]


class Host:
    """A service in its own process, that of host.py."""

    is_real = False
    count = 0

    def __init__(self, mischief=None):
        Host.count += 1
        self.socket = os.path.join(FOLDER, f"socket{Host.count}")
        self.log = os.path.join(FOLDER, f"log{Host.count}")
        self.start(mischief)

    def start(self, mischief=None):
        before = len(self.events("ready"))
        paths = os.environ["LIGHTER_TEST_HOST_PYTHONPATH"]
        command = [sys.executable, os.path.join(HERE, "host.py"), self.socket, self.log, *([mischief] if mischief else [])]
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
        while len(self.events("ready")) == before:
            assert self.process.poll() is None, "the host did not start"
            time.sleep(0.02)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        if self.process.poll() is None:
            self.kill()

    def events(self, kind):
        if not os.path.exists(self.log):
            return []
        with open(self.log) as log:
            return [event for event in map(json.loads, log.read().splitlines()) if event["event"] == kind]

    @property
    def runs(self):
        return len(self.events("run"))


class Service(Host):
    """The real service and its workers: the example ane_serve, which LIGHTER_TEST_ANE_SERVE names, with the
    libonnxruntime of LIGHTER_TEST_HOST_LIBRARY."""

    is_real = True

    def start(self, mischief=None):
        library = os.environ["LIGHTER_TEST_HOST_LIBRARY"]
        command = [os.environ["LIGHTER_TEST_ANE_SERVE"], self.socket, library, tempfile.mkdtemp(dir=FOLDER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while not os.path.exists(self.socket):
            assert self.process.poll() is None, "the service did not start"
            time.sleep(0.02)

    @property
    def report(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    @property
    def runs(self):
        """A worker tells its counters a little after the run."""
        seen, calls = -1, 0
        while calls != seen:
            seen = calls
            time.sleep(0.7)
            calls = sum(container["calls"] for container in self.report["containers"].values())
        return calls


def options(**entries):
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 3
    # Processors are few, and other tests run.
    made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in entries.items():
        made.add_session_config_entry(name, value)
    return made


def reference(model):
    return onnxruntime.InferenceSession(model, options(), providers=["CPUExecutionProvider"])


def session(model, devices, host, transport="shm", min_work="0", fallback=1, **more):
    made = options()
    settings = {"socket": host if isinstance(host, str) else host.socket, "transport": transport, "min_work": min_work}
    made.add_provider_for_devices(devices, {**settings, **more})
    return onnxruntime.InferenceSession(model, made, enable_fallback=fallback)


def same(got, expected):
    assert len(got) == len(expected), (len(got), len(expected))
    for one, other in zip(got, expected):
        assert one.dtype == other.dtype and one.shape == other.shape, (one.dtype, one.shape, other.dtype, other.shape)
        assert one.tobytes() == other.tobytes(), f"differs by {numpy.abs(one.astype(float) - other.astype(float)).max()}"


def feed(made, random, **dims):
    """Random inputs for a session; `dims` gives names of free dimensions a number, 1 otherwise."""
    kinds = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(int32)": "int32"}
    inputs = {}
    for one in made.get_inputs():
        shape = [dim if isinstance(dim, int) else dims.get(dim, 1) for dim in one.shape]
        kind = kinds[one.type]
        values = random.standard_normal(shape) if kind.startswith("float") else random.integers(0, 255, shape)
        inputs[one.name] = numpy.asarray(values).astype(kind).reshape(shape)
    return inputs
