# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs one model on the ane device until /stop appears, and compares each answer with the container's own.

usage: loop.py [--close] MODEL SHAPE…

--close allows for the small differences of another engine's arithmetic; else every answer must be equal to the bit.

Prints one JSON line at the end: {"runs": …, "wrong": …, "failed": …, "slowest_ms": …}.
"""

import json
import os
import sys
import time

import numpy
import onnxruntime

PROVIDER = "LighterANE"


def main():
    arguments = sys.argv[1:]
    close = arguments[0] == "--close"
    path, *shape = arguments[close:]
    shape = [int(dim) for dim in shape]

    def is_right(answer, expected):
        return numpy.allclose(answer, expected, 1e-3, 1e-4) if close else numpy.array_equal(answer, expected)

    onnxruntime.register_execution_provider_library(PROVIDER, os.environ["LIGHTER_ANE_EP"])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(devices, {})
    options.add_session_config_entry("ep.lighterane.min_work", "0")
    own = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    device = onnxruntime.InferenceSession(path, options)
    # An answer of the fall-back must come from the plug-in, not from Python's own second try.
    device.disable_fallback()
    name = own.get_inputs()[0].name
    random = numpy.random.default_rng(1)
    inputs = [{name: random.standard_normal(shape).astype("float32")} for _ in range(4)]
    expected = [own.run(None, one)[0] for one in inputs]
    runs = wrong = failed = 0
    slowest_ms = 0.0
    while not os.path.exists("/stop"):
        started = time.monotonic()
        try:
            answer = device.run(None, inputs[runs % 4])[0]
            wrong += not is_right(answer, expected[runs % 4])
        except Exception as error:
            failed += 1
            print(error, flush=True)
        slowest_ms = max(slowest_ms, (time.monotonic() - started) * 1000)
        runs += 1
        time.sleep(0.01)
    print(json.dumps({"runs": runs, "wrong": wrong, "failed": failed, "slowest_ms": round(slowest_ms)}), flush=True)


main()
