# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs ONNX's own node tests on the ane device and compares with the container's own processor.

usage: nodes.py [PART PARTS]      only each PARTS-th test, from the PART-th on

What a test expects by its own account is not looked at: only whether both give the same, to the bit or rounded. A test that the
container's own processor does not load or run, or whose inputs are of kinds that numpy does not have, cannot be
compared. Prints one JSON line: how many tests of each kind, which answered otherwise or failed, and how many runs were
where by the plug-in's account.
"""

import collections
import json
import os
import re
import sys
import tempfile
import warnings

import numpy
import onnxruntime
from onnx import TensorProto
from onnx.backend.test.case.node import collect_testcases

PROVIDER = "LighterANE"
CLAIMED = re.compile(r"lighter-ane: .*: (\d+) of (\d+) nodes in \d+ groups go to the host")
RAN = re.compile(r"lighter-ane: .*: (\d+) runs on the host, (\d+) in the container")


class Said:
    """What is written to standard error, by whichever library."""

    def __init__(self):
        self.file = tempfile.TemporaryFile()
        self.own = os.dup(2)
        os.dup2(self.file.fileno(), 2)
        self.read_bytes = 0

    def since(self):
        text = os.pread(self.file.fileno(), 1 << 24, self.read_bytes)
        self.read_bytes += len(text)
        return text.decode(errors="replace")

    def end(self):
        os.dup2(self.own, 2)


def options():
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 4
    made.intra_op_num_threads = 1
    return made


def is_same(one, other):
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if not isinstance(one, numpy.ndarray):
        return type(one) is type(other) and one == other
    if not isinstance(other, numpy.ndarray) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.dtype == object:
        return one.tolist() == other.tolist()
    return one.tobytes() == other.tobytes() or numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def fed(value):
    """As the runtime takes it: tests also have plain numbers."""
    return value if value is None or isinstance(value, list) else numpy.asarray(value)


def is_close(one, other):
    """The same but for the last digits of floats, which two releases' kernels may round otherwise."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return all(map(is_close, one, other))
    if not all(isinstance(value, numpy.ndarray) and value.dtype.kind == "f" for value in (one, other)):
        return is_same(one, other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    digits = 1e-3 if one.dtype == numpy.float16 else 1e-5
    return numpy.allclose(one, other, rtol=digits, atol=digits, equal_nan=True)


def own_answers(case, model):
    """Inputs and answers of the container's own processor; a word when there are none."""
    try:
        session = onnxruntime.InferenceSession(model, options(), providers=["CPUExecutionProvider"])
    except Exception:
        return "not_loaded"
    names = [one.name for one in session.get_inputs()]
    answers = []
    for inputs, _ in case.data_sets:
        if any(isinstance(value, TensorProto) for value in inputs):
            return "no_arrays"
        feed = {name: value for name, value in zip(names, map(fed, inputs)) if value is not None}
        try:
            answers.append((feed, session.run(None, feed)))
        except Exception:
            return "not_run"
    return answers


def main():
    part, parts = map(int, sys.argv[1:3] if len(sys.argv) > 2 else (0, 1))
    warnings.simplefilter("ignore")
    onnxruntime.register_execution_provider_library(PROVIDER, os.environ["LIGHTER_ANE_EP"])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    counts = collections.Counter()
    lists = {"different": [], "rounded": [], "failed": [], "in_container": []}
    said = Said()
    for case in collect_testcases(None)[part::parts]:
        counts["tests"] += 1
        model = case.model.SerializeToString()
        answers = own_answers(case, model)
        if isinstance(answers, str):
            counts[answers] += 1
            continue
        counts["compared"] += 1
        said.since()
        made = options()
        made.add_provider_for_devices(devices, {"min_work": "0", "report": "1"})
        try:
            session = onnxruntime.InferenceSession(model, made)
            session.disable_fallback()
            for got, expected in [(session.run(None, feed), expected) for feed, expected in answers]:
                if not is_same(got, expected):
                    lists["rounded" if is_close(got, expected) else "different"].append(case.name)
        except Exception as error:
            lists["failed"].append(f"{case.name}: {error}")
        # Its end makes the plug-in say what ran where.
        session = None
        text = said.since()
        claims = [(int(one), int(all_)) for one, all_ in CLAIMED.findall(text)]
        counts["on_device"] += any(one for one, _ in claims)
        counts["whole_on_device"] += bool(claims) and claims[0][0] == claims[0][1]
        for on_host, in_container in RAN.findall(text):
            counts["runs_on_host"] += int(on_host)
            counts["runs_in_container"] += int(in_container)
            if int(in_container):
                lists["in_container"].append(case.name)
    said.end()
    print(json.dumps({"ort": onnxruntime.__version__, **counts, **lists}), flush=True)


main()
