# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures runs of ONNX models on the container's own processor and on the ane device, by shared memory and by stream, in
turns; prints JSON.

usage: ane_bench.py RESNET50.onnx SMALL_RUNS RESNET_RUNS
"""

import json
import os
import statistics
import sys
import time

import numpy
import onnxruntime
from onnx import TensorProto, helper

PROVIDER = "LighterANE"
PLACES = ("own", "shm", "stream")
# As the host's workers have it; and what spins takes the core from the other side.
QUIET = {"session.intra_op.allow_spinning": "0"}


def nothing_to_compute():
    """602 KB in, 4 KB out."""
    nodes = [
        helper.make_node("Reshape", ["x", "all"], ["line"]),
        helper.make_node("Slice", ["line", "from", "to"], ["y"]),
    ]
    constants = [
        helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in (("all", -1), ("from", 0), ("to", 1000))
    ]
    graph = helper.make_graph(
        nodes,
        "nothing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 224, 224])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1000])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def sessions(model, devices):
    made = {}
    for place in PLACES:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        for key, value in QUIET.items():
            options.add_session_config_entry(key, value)
        if place == "own":
            made[place] = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            continue
        options.add_provider_for_devices(devices, {})
        options.add_session_config_entry("ep.lighterane.min_work", "0")
        options.add_session_config_entry("ep.lighterane.transport", place)
        made[place] = onnxruntime.InferenceSession(model, options)
        made[place].disable_fallback()
    return made


def measure(made, feed, runs):
    times = {place: [] for place in PLACES}
    expected = made["own"].run(None, feed)
    for place in PLACES:
        for _ in range(3):
            assert numpy.array_equal(made[place].run(None, feed)[0], expected[0]), place
    # Some in a row: a processor that has just done another's work is slower at one's own.
    row = 20 if runs > 100 else 1
    for _ in range(runs // row):
        for place in PLACES:
            for _ in range(row):
                started = time.perf_counter_ns()
                made[place].run(None, feed)
                times[place].append((time.perf_counter_ns() - started) / 1000)
    return {place: round(statistics.median(taken), 1) for place, taken in times.items()}


def copying(picture):
    """What one copy of the input costs, which a way through memory cannot do without."""
    to, times = numpy.empty_like(picture), []
    for _ in range(500):
        started = time.perf_counter_ns()
        numpy.copyto(to, picture)
        times.append((time.perf_counter_ns() - started) / 1000)
    return round(statistics.median(times), 1)


def main():
    resnet, small_runs, resnet_runs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    onnxruntime.register_execution_provider_library(PROVIDER, os.environ["LIGHTER_ANE_EP"])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    random = numpy.random.default_rng(1)
    picture = random.standard_normal((1, 3, 224, 224)).astype("float32")
    small = sessions(nothing_to_compute(), devices)
    result = {"copy_us": copying(picture), "small_us": measure(small, {"x": picture}, small_runs)}
    big = sessions(resnet, devices)
    result["resnet_us"] = measure(big, {big["own"].get_inputs()[0].name: picture}, resnet_runs)
    print(json.dumps(result), flush=True)
    # For the processor time of the host's side: nothing for a while, then five runs a second.
    time.sleep(3)
    print("idle", flush=True)
    time.sleep(10)
    print("slow", flush=True)
    for _ in range(50):
        small["shm"].run(None, {"x": picture})
        time.sleep(0.2)
    print("done", flush=True)
    time.sleep(600)


main()
