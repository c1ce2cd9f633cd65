#!/usr/bin/env python3
"""Draws each step's part of the optimum over time, a panel for each scenario; what changed in the network is marked.

    bench/adapt/draw.py STEPS.json FIGURE.png       # what adapt.py --json wrote; needs matplotlib

SPDX-License-Identifier: Apache-2.0
"""

import importlib.util
import json
import sys

FEW = 10  # more events than these are not marked


def available():
    return importlib.util.find_spec("matplotlib") is not None


def draw(found, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (name, run) in zip(axes.flat, found.items()):
        at = [step["at_s"] for step in run["steps"]]
        axis.step(at, [step["fraction"] for step in run["steps"]], where="pre")
        for event in run["events_s"] if len(run["events_s"]) <= FEW else []:
            axis.axvline(event, color="gray", linestyle=":")
        axis.axhline(0.95, color="gray", linewidth=0.5)
        axis.set(title=f"{name}, {len(run['changes'])} changes", xlabel="s", ylabel="of the optimum", ylim=(0, 1.05))
    figure.tight_layout()
    figure.savefig(file)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: draw.py STEPS.json FIGURE.png")
    if not available():
        sys.exit("draw: there is no matplotlib")
    with open(sys.argv[1], encoding="utf-8") as text:
        draw(json.load(text), sys.argv[2])


if __name__ == "__main__":
    main()
