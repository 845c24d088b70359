# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes a model with more weights than a protobuf can hold, in a file beside it, and runs it on the ane device.

usage: big.py FOLDER MATRICES      each matrix has 256 MiB

Prints one JSON line: {"weights": bytes, "runs": …, "equal": how many were as the container's own processor's}.
"""

import json
import os
import sys

import numpy
import onnxruntime
from onnx import TensorProto, helper

PROVIDER = "LighterANE"
SIDE = 8192
RUNS = 2


def make(folder, count):
    """A chain of products; the weights are written as they are made."""
    random = numpy.random.default_rng(1)
    nodes, weights = [], []
    with open(os.path.join(folder, "weights"), "wb") as file:
        for index in range(count):
            name, source = f"w{index}", "x" if index == 0 else f"y{index - 1}"
            nodes.append(helper.make_node("MatMul", [source, name], [f"y{index}"]))
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[SIDE, SIDE], data_location=TensorProto.EXTERNAL)
            matrix = (random.random((SIDE, SIDE), dtype="float32") - 0.5) / 20
            for key, value in (("location", "weights"), ("offset", file.tell()), ("length", matrix.nbytes)):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, str(value)
            file.write(matrix.data)
            weights.append(tensor)
    shape = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIDE]) for name in ("x", f"y{count - 1}")]
    graph = helper.make_graph(nodes, "big", shape[:1], shape[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with open(os.path.join(folder, "model.onnx"), "wb") as file:
        file.write(model.SerializeToString())
    return os.path.getsize(os.path.join(folder, "weights"))


def main():
    folder, count = sys.argv[1], int(sys.argv[2])
    weights = make(folder, count)
    path = os.path.join(folder, "model.onnx")
    onnxruntime.register_execution_provider_library(PROVIDER, os.environ["LIGHTER_ANE_EP"])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    random = numpy.random.default_rng(2)
    inputs = [{"x": random.standard_normal((1, SIDE)).astype("float32")} for _ in range(RUNS)]
    own = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = [own.run(None, one)[0] for one in inputs]
    # One of the two at a time is enough for the memory.
    del own
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(devices, {"report": "1"})
    device = onnxruntime.InferenceSession(path, options)
    device.disable_fallback()
    equal = sum(numpy.array_equal(device.run(None, one)[0], answer) for one, answer in zip(inputs, expected))
    print(json.dumps({"weights": weights, "runs": RUNS, "equal": equal}), flush=True)


main()
