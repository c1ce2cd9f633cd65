#!/usr/bin/env python3
"""Draws rows of schedule.py: speed over bandwidth, as figure 13 of ByteScheduler's paper; and a step's timeline.

    bench/models/pictures.py ROWS.json FIGURE.png

SPDX-License-Identifier: Apache-2.0
"""

import importlib.util
import json
import sys

COLORS = {"forward": "tab:green", "backward": "tab:olive"}


def available():
    return importlib.util.find_spec("matplotlib") is not None


def panels(rows):
    """{(model, k): {system: [(Gbit/s, speed)]}}, with the ideal and a GPU alone."""
    found = {}
    for row in rows:
        for k in {r["k"] for r in rows} if row["system"] == "ddp" else [row["k"]]:
            lines = found.setdefault((row["model"], k), {})
            lines.setdefault(row["system"], {})[row["equivalent_gbit"]] = row["speed"]
            if row["k"] == k:
                lines.setdefault("ideal", {})[row["equivalent_gbit"]] = row["ideal_speed"]
                lines.setdefault("no communication", {})[row["equivalent_gbit"]] = row["alone_speed"]
    return {key: {name: sorted(points.items()) for name, points in lines.items()} for key, lines in found.items()}


def draw_speeds(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = panels(rows)
    models, ks = list(dict.fromkeys(model for model, _ in found)), sorted({k for _, k in found})
    units = {row["model"]: row["unit"] for row in rows}
    figure, axes = pyplot.subplots(len(ks), len(models), figsize=(4 * len(models), 3.4 * len(ks)), squeeze=False)
    for across, k in zip(axes, ks):
        for axis, model in zip(across, models):
            for name, points in found.get((model, k), {}).items():
                style = {"ideal": {"ls": "--", "color": "black"}, "no communication": {"ls": ":", "color": "gray"}}
                axis.plot(*zip(*points), label=name, **style.get(name, {"marker": "o", "markersize": 3}))
            axis.set(title=f"{model}, k = {k}", xscale="log", xlabel="Gbit/s", ylabel=f"{units[model]}/s of a GPU")
            axis.set_ylim(bottom=0)
            axis.title.set_fontsize("small")
    axes[0][0].legend(fontsize="xx-small")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def draw_timeline(cell, told, file):
    """told: {system: a turn of rank 0}.  From a backward's begin to the next one's: computing above, and below it a line for
    each tensor from its submission to its sum, first used at the top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{cell['name']}/{name}" for layer in cell["profile"].layers for name, _ in layer.tensors]
    names = [name for name in names if all(name in t["ended"] for t in told.values())]
    figure, axes = pyplot.subplots(len(told), 1, figsize=(9, 3 * len(told)), sharex=True, squeeze=False)
    for axis, (system, t) in zip(axes.flat, told.items()):
        zero, until = t["begun"][0], t["begun"][1]
        for begin, end, _, phase in t["marks"]:
            if begin >= zero - 1e-9 and begin < until:
                axis.barh(-len(names) / 12, end - begin, height=len(names) / 12, left=begin - zero, color=COLORS[phase])
        for place, name in enumerate(names):
            begin, end = t["submitted"][name] - zero, t["ended"][name] - zero
            axis.barh(place, end - begin, left=begin, height=0.9, color="tab:blue")
        axis.set(title=f"{cell['name']}, {'with' if system == 'priority' else 'without'} barrier: "
                       f"{until - zero:.3f} s", ylabel="tensors, first used on top")
        axis.invert_yaxis()
        axis.title.set_fontsize("small")
    axes[-1][0].set_xlabel("seconds from the begin of backward; green forward, olive backward")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: pictures.py ROWS.json FIGURE.png")
    if not available():
        sys.exit("pictures: there is no matplotlib")
    with open(sys.argv[1], encoding="utf-8") as lines:
        draw_speeds([row for row in map(json.loads, lines) if row.get("bench") == "models"], sys.argv[2])


if __name__ == "__main__":
    main()
