# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes many sessions of one model on the ane device, and runs each once.

usage: sessions.py MODEL TOGETHER ALONE      so many that live at one time, and so many one after the other

Prints `N sessions, N equal`: how many answered as the container's own processor does.
"""

import os
import sys

import numpy
import onnxruntime

PROVIDER = "LighterANE"


def main():
    path, together, alone = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    onnxruntime.register_execution_provider_library(PROVIDER, os.environ["LIGHTER_ANE_EP"])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    own = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {own.get_inputs()[0].name: numpy.random.default_rng(1).standard_normal((1, 3, 48, 192)).astype("float32")}
    expected = own.run(None, inputs)[0]

    def session():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_provider_for_devices(devices, {"min_work": "0"})
        made = onnxruntime.InferenceSession(path, options)
        made.disable_fallback()
        return made

    def is_equal(one):
        return numpy.array_equal(one.run(None, inputs)[0], expected)

    living = [session() for _ in range(together)]
    equal = sum(map(is_equal, living))
    del living
    equal += sum(is_equal(session()) for _ in range(alone))
    print(f"{together + alone} sessions, {equal} equal", flush=True)


main()
