#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds and reads the text in a picture with two ONNX models, and draws what it found.

usage: detect.py --models FOLDER --out PICTURE [--compare] PICTURE

With the ane device (LIGHTER_ANE_EP is set) the models run on the host's engine, without it on the container's own
processor: the same program either way. --compare runs both and says how far the two differ; it ends with 1 where a
line of text does. Needs onnxruntime 1.24 or newer, numpy and Pillow.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from PIL import Image, ImageDraw

PROVIDER = "LighterANE"
# What the detector was trained with.
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
LONGEST_SIDE, LARGEST_SCALE = 960, 3.0
THRESHOLD, SURE, SMALLEST_SIDE = 0.3, 0.6, 3
# The detector marks the middle of a line of text; this much of it belongs around.
SPREAD = 1.6
LINE_HEIGHT = 48


def session(path, on_device):
    """A session for the model, on the device where it is there and wanted."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if on_device:
        devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
        options.add_provider_for_devices(devices, {})
    else:
        options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options)


class Reader:
    """The two models on one place to run."""

    def __init__(self, models, on_device):
        self.detector = session(models / "ch_PP-OCRv4_det_infer.onnx", on_device)
        self.recognizer = session(models / "ch_PP-OCRv4_rec_infer.onnx", on_device)
        # The model carries its own alphabet. 0 is "nothing here", the last one a space.
        alphabet = self.recognizer.get_modelmeta().custom_metadata_map["character"].splitlines()
        self.alphabet = ["", *alphabet, " "]

    def boxes(self, picture):
        """Where lines of text are: left, top, right, bottom, in pixels, in reading order."""
        # Small print is only seen when it is made larger.
        scale = min(LARGEST_SCALE, LONGEST_SIDE / max(picture.size))
        size = [max(32, round(side * scale / 32) * 32) for side in picture.size]
        pixels = np.asarray(picture.resize(size), np.float32) / 255
        planes = ((pixels - MEAN) / DEVIATION).astype(np.float32).transpose(2, 0, 1)[None]
        likely = self.detector.run(None, {self.detector.get_inputs()[0].name: planes})[0][0, 0]
        across, down = picture.width / size[0], picture.height / size[1]
        found = []
        for left, top, right, bottom in spots(likely > THRESHOLD):
            width, height = right - left, bottom - top
            spot = likely[top:bottom, left:right]
            if min(width, height) < SMALLEST_SIDE or spot[spot > THRESHOLD].mean() < SURE:
                continue
            around = width * height * SPREAD / (2 * (width + height))
            box = (left - around) * across, (top - around) * down, (right + around) * across, (bottom + around) * down
            found.append(tuple(int(round(value)) for value in clip(box, picture)))
        return sorted(found, key=lambda box: (box[1] // 12, box[0]))

    def text(self, picture, box):
        """What the line in the box says, and how sure that is (0 to 1)."""
        line = picture.crop(box)
        width = max(LINE_HEIGHT, round(line.width * LINE_HEIGHT / line.height))
        pixels = np.asarray(line.resize((width, LINE_HEIGHT)), np.float32) / 127.5 - 1
        planes = pixels.transpose(2, 0, 1)[None]
        chances = self.recognizer.run(None, {self.recognizer.get_inputs()[0].name: planes})[0][0]
        letters, sureness, before = [], [], 0
        for best, chance in zip(chances.argmax(1), chances.max(1)):
            if best not in (0, before):
                letters.append(self.alphabet[best])
                sureness.append(chance)
            before = best
        return "".join(letters), float(np.mean(sureness)) if sureness else 0.0

    def read(self, picture):
        """Every line of text: box, words, sureness."""
        return [(box, *self.text(picture, box)) for box in self.boxes(picture)]


def clip(box, picture):
    left, top, right, bottom = box
    return max(left, 0), max(top, 0), min(right, picture.width), min(bottom, picture.height)


def spots(mask):
    """Bounding boxes of the connected spots of a mask: runs of each row, joined with those that touch in the row above."""
    parent, boxes, above = [], [], []

    def root(spot):
        while parent[spot] != spot:
            spot = parent[spot]
        return spot

    for row, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.view(np.int8), [0]))))
        runs = []
        for left, right in edges.reshape(-1, 2):
            spot = len(parent)
            parent.append(spot)
            boxes.append([left, row, right, row + 1])
            for other_left, other_right, other in above:
                if other_left <= right and left <= other_right and root(other) != root(spot):
                    keep, gone = sorted((root(other), root(spot)))
                    parent[gone] = keep
                    one, two = boxes[keep], boxes[gone]
                    boxes[keep] = [min(one[0], two[0]), min(one[1], two[1]), max(one[2], two[2]), max(one[3], two[3])]
            runs.append((left, right, spot))
        above = runs
    return [boxes[spot] for spot in range(len(parent)) if parent[spot] == spot]


def draw(picture, lines):
    """The picture with a box around each line, and what was read beneath it in a column of its own."""
    canvas = Image.new("RGB", (picture.width * 2, picture.height), "white")
    canvas.paste(picture, (0, 0))
    pen = ImageDraw.Draw(canvas)
    for box, words, _ in lines:
        pen.rectangle(box, outline=(220, 30, 30), width=2)
        # Pillow's own font has Latin letters only.
        pen.text((picture.width + box[0], box[1]), words.encode("latin-1", "replace").decode("latin-1"), fill=(20, 20, 20))
    return canvas


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", action="store_true")
    wanted = parser.parse_args()

    library = os.environ.get("LIGHTER_ANE_EP")
    if library:
        ort.register_execution_provider_library(PROVIDER, library)
    picture = Image.open(wanted.picture).convert("RGB")
    places = [True] if library else [False]
    if wanted.compare and library:
        places.append(False)
    results = []
    for on_device in places:
        reader = Reader(wanted.models, on_device)
        reader.read(picture)
        started = time.perf_counter()
        lines = reader.read(picture)
        took_ms = (time.perf_counter() - started) * 1000
        where = "the ane device" if on_device else "the container's processor"
        print(f"{len(lines)} lines in {took_ms:.0f} ms on {where}", flush=True)
        results.append(lines)
    for box, words, sure in results[0]:
        print(f"  {sure:4.0%}  {box}  {words}")
    draw(picture, results[0]).save(wanted.out)
    print(f"drawn in {wanted.out}")
    if len(results) == 2:
        same = [one[1] for one in results[0]] == [two[1] for two in results[1]]
        print("both read the same" if same else "the two read differently")
        return 0 if same else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
