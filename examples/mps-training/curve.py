# SPDX-License-Identifier: MIT OR Apache-2.0
"""Draws loss curves as an SVG file, for the examples beside it. Needs nothing but Python."""

import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 20, 40, 45
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")
# Below each other they would hide each other: the later ones are dashed.
DASHES = ("", "7 5", "2 4")


def draw(path: str, title: str, curves: dict[str, list[float]], marks: dict[int, str] | None = None) -> None:
    """`curves` are losses by name; `marks` are words at steps."""
    steps = max(map(len, curves.values()))
    highest = max(max(losses) for losses in curves.values())
    unit = 10 ** math.floor(math.log10(highest))
    unit = unit if highest / unit >= 3 else unit / 2

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps - 1, 1)

    def y(loss):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">step (of {steps})</text>',
    ]
    for line in range(int(highest / unit) + 1):
        at = y(line * unit)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{line * unit:g}</text>')
    for step, word in (marks or {}).items():
        parts.append(f'<path d="M{x(step):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#999"/>')
        parts.append(f'<text x="{x(step) + 5:.1f}" y="{HEIGHT - BOTTOM - 8}">{word}</text>')
    for number, (name, losses) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        style = f'stroke="{COLOURS[number]}" stroke-dasharray="{DASHES[number]}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        below = TOP + 12 + 18 * number
        parts.append(f'<path d="M{WIDTH - 230} {below - 4}h34" {style}/><text x="{WIDTH - 188}" y="{below}">{name}</text>')
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
