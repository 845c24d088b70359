# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs ONNX models on the ane device and on the container's own processor and prints one JSON line for each.

usage: models.py RUNS MODEL…

A line: {"model": …, "runs": …, "equal": whether every output was bit-identical, "difference": the largest one}.
"""

import json
import os
import sys

import numpy
import onnxruntime

PROVIDER = "LighterANE"
# For dimensions that a model leaves open, by the model's name; else 1.
PICTURES = {
    "ch_PP-OCRv4_det_infer": (1, 3, 160, 160),
    "ch_PP-OCRv4_rec_infer": (1, 3, 48, 160),
    "ch_ppocr_mobile_v2.0_cls_infer": (1, 3, 48, 192),
}


def value(model, one, random):
    kinds = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(int32)": "int32"}
    kind = kinds[one.type]
    if one.name == "sr":
        return numpy.array(16000, kind)
    if one.name in ("state", "h", "c"):
        return numpy.zeros([dim if isinstance(dim, int) else 1 for dim in one.shape], kind)
    if "silero" in model:
        return (random.standard_normal((1, 576 if "context" in one.name else 512)) * 0.1).astype(kind)
    shape = PICTURES.get(model) or [dim if isinstance(dim, int) else 1 for dim in one.shape]
    if kind.startswith("int"):
        return random.integers(0, 250, shape).astype(kind)
    return random.standard_normal(shape).astype(kind)


def main():
    runs = int(sys.argv[1])
    library = os.environ.get("LIGHTER_ANE_EP")
    if not library:
        sys.exit("no ane device: LIGHTER_ANE_EP is not set")
    onnxruntime.register_execution_provider_library(PROVIDER, library)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    random = numpy.random.default_rng(1)
    for path in sys.argv[2:]:
        model = os.path.basename(path).removesuffix(".onnx")
        quiet = onnxruntime.SessionOptions()
        quiet.log_severity_level = 3
        own = onnxruntime.InferenceSession(path, quiet, providers=["CPUExecutionProvider"])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_provider_for_devices(devices, {})
        # Models so small that sending them costs more than it saves are sent all the same.
        options.add_session_config_entry("ep.lighterane.min_work", "0")
        device = onnxruntime.InferenceSession(path, options)
        equal, difference = True, 0.0
        for _ in range(runs):
            inputs = {one.name: value(model, one, random) for one in own.get_inputs()}
            for expected, got in zip(own.run(None, inputs), device.run(None, inputs), strict=True):
                if expected.shape != got.shape or expected.dtype != got.dtype:
                    sys.exit(f"{model}: {got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}")
                if not numpy.array_equal(expected, got, equal_nan=expected.dtype.kind == "f"):
                    equal = False
                    gap = numpy.abs(expected.astype("float64") - got.astype("float64"))
                    difference = max(difference, float(gap.max()))
        print(json.dumps({"model": model, "runs": runs, "equal": equal, "difference": difference}), flush=True)


main()
