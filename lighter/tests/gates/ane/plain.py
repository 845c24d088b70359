# SPDX-License-Identifier: MIT OR Apache-2.0
"""A program that knows nothing of lighter: runs a model on random inputs and prints a digest of all outputs.

usage: plain.py MODEL RUNS SHAPE      the shape as 1x3x224x224
"""

import hashlib
import sys

import numpy
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
shape = [int(size) for size in sys.argv[3].split("x")]
dice = numpy.random.default_rng(7)
digest = hashlib.sha256()
for _ in range(int(sys.argv[2])):
    inputs = {session.get_inputs()[0].name: dice.random(shape, numpy.float32)}
    for output in session.run(None, inputs):
        digest.update(output.tobytes())
print("digest", digest.hexdigest())
