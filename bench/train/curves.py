#!/usr/bin/env python3
"""Draws what train.py found: above samples per second over the number of CPU machines, below the losses of all ways over
the steps; a column for each model and number of ranks.

    bench/train/curves.py ROWS.json FIGURE.png      # what train.py --json wrote; needs matplotlib

SPDX-License-Identifier: Apache-2.0
"""

import json
import sys


def columns(rows):
    """{title: ({way: [(k, samples/s)]}, {way: losses})}.  A way without CPU machines is a level line; `eq. 7` is what
    Gloo's would be if its steps were nothing but communication in the best split's time."""
    found = {}
    for row in rows:
        where = f"{row['n']} workers, {row['rate']}" if row["n"] > 1 else f"one machine, {row['ranks']} ranks"
        speeds, losses = found.setdefault(f"{row['model']}: {where}", ({}, {}))
        speeds.setdefault(row["way"], {})[row["k"]] = row["samples_per_s"]
        losses[row["way"]] = row["losses"]
        if row["eq_7"] and row["over_gloo"]:
            speeds.setdefault("eq. 7", {})[row["k"]] = row["samples_per_s"] / row["over_gloo"] * row["eq_7"]
    for speeds, _ in found.values():
        most = max(k for points in speeds.values() for k in points)
        for points in speeds.values():
            if list(points) == [0]:
                points[most] = points[0]
    return {
        title: ({way: sorted(points.items()) for way, points in speeds.items()}, losses)
        for title, (speeds, losses) in found.items()
    }


def draw(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = columns(rows)
    if not found:
        return
    figure, axes = pyplot.subplots(2, len(found), figsize=(4.5 * len(found), 7), squeeze=False)
    for (above, below), (title, (speeds, losses)) in zip(axes.T, found.items()):
        for way, points in speeds.items():
            style = {"linestyle": "--", "color": "black"} if way == "eq. 7" else {"marker": "o"}
            above.plot(*zip(*points), label=way, **style)
        above.set(title=title, xlabel="CPU machines", ylabel="samples/s")
        above.xaxis.get_major_locator().set_params(integer=True)
        above.set_ylim(bottom=0)
        for way, curve in losses.items():
            below.plot(curve, label=way)
        below.set(xlabel="step", ylabel="loss, mean of the ranks")
        above.legend()
        below.legend()
        above.title.set_fontsize("small")
    figure.tight_layout()
    figure.savefig(file)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: curves.py ROWS.json FIGURE.png")
    with open(sys.argv[1], encoding="utf-8") as lines:
        draw([row for row in map(json.loads, lines) if row.get("bench") == "train"], sys.argv[2])


if __name__ == "__main__":
    main()
