#!/usr/bin/env python3
"""Draws goodput over the number of CPU machines, like figure 12 of BytePS (OSDI 2020): a panel for each cluster and
list of tensors, a line for each system, the optimum above them.

    bench/goodput/plot.py ROWS.json FIGURE.png      # what goodput.py --json wrote; needs matplotlib

SPDX-License-Identifier: Apache-2.0
"""

import importlib.util
import json
import sys


def available():
    return importlib.util.find_spec("matplotlib") is not None


def panels(rows):
    """{title: {system: [(k, Mbit/s)]}}, the optimum among the systems.  What uses no CPU machines reaches the same
    with any number of them, so its one point becomes a level line."""
    found = {}
    for row in rows:
        cards = " ".join(row["rate_of"].values()) or row["rate"]
        title = f"{row['n']} workers, {cards}: {row['work']}, {row['bytes'] / 2**20:.0f} MB"
        lines = found.setdefault(title, {})
        mbit = 8e-6 * row["bytes"]
        lines.setdefault("optimum", {})[row["k"]] = mbit / row["optimum_s"]
        lines.setdefault(row["system"], {})[row["k"]] = mbit / row["time_s"]
    for lines in found.values():
        most = max(lines["optimum"])
        for points in lines.values():
            if list(points) == [0]:
                points[most] = points[0]
    return {title: {name: sorted(p.items()) for name, p in lines.items()} for title, lines in found.items()}


def draw(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = panels(rows)
    if not found:
        return
    columns = min(3, len(found))
    rows_of_panels = -(-len(found) // columns)
    figure, axes = pyplot.subplots(rows_of_panels, columns, figsize=(5 * columns, 4 * rows_of_panels), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (title, lines) in zip(axes.flat, found.items()):
        for name, points in lines.items():
            style = {"linestyle": "--", "color": "black"} if name == "optimum" else {"marker": "o"}
            axis.plot(*zip(*points), label=name, **style)
        axis.set(title=title, xlabel="CPU machines", ylabel="goodput, Mbit/s")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylim(bottom=0)
        axis.legend()
        axis.title.set_fontsize("small")
    figure.tight_layout()
    figure.savefig(file)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: plot.py ROWS.json FIGURE.png")
    if not available():
        sys.exit("plot: there is no matplotlib")
    with open(sys.argv[1], encoding="utf-8") as lines:
        draw([row for row in map(json.loads, lines) if row.get("bench") == "goodput"], sys.argv[2])


if __name__ == "__main__":
    main()
