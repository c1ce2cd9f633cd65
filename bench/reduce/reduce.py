"""Summation: Tally's kernels beside the memory's limit, pairwise adding, OpenMPI and NumPy.

    reduce.py [--quick] [--json FILE] [--plot FILE] [--build DIR]
    reduce.py --rows FILE [--plot FILE]

Runs the program bench_reduce (see reduce_bench.c for what is measured and how) over types, numbers of inputs,
sizes and threads, times NumPy for the same rows, prints a table and writes the rows as JSON, one object a line.
With --rows it measures nothing, but takes the rows of an earlier run.  The plot needs matplotlib.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
INPUTS = [2, 4, 8, 16, 32]
NUMPY_TYPES = {"float32": numpy.float32, "float64": numpy.float64, "float16": numpy.float16}
METHODS = ["tally", "limit", "ordinary", "pairwise", "norms", "mpi", "numpy"]


def measure(program, dtype, size, inputs, threads, rounds, most):
    """Rows of bench_reduce for one type and size."""
    command = [program, "--types", dtype, "--bytes", str(size), "--inputs", ",".join(map(str, inputs)),
               "--threads", ",".join(map(str, threads)), "--rounds", str(rounds), "--most", str(most)]
    # The program is no MPI job; it only borrows a function, also as root in a container.
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return [json.loads(line) for line in result.stdout.splitlines()]


def measure_numpy(rows, rounds):
    """A row for NumPy beside each one-threaded row of Tally: the first input copied, each further one added."""
    wanted = [r for r in rows if r["method"] == "tally" and r["threads"] == 1 and r["dtype"] in NUMPY_TYPES]
    if not wanted:
        return []
    dtype, size = wanted[0]["dtype"], wanted[0]["bytes"]
    inputs = [numpy.ones(size // numpy.dtype(dtype).itemsize, dtype=dtype)
              for _ in range(max(r["inputs"] for r in wanted))]
    output = numpy.empty_like(inputs[0])
    added = []
    for row in wanted:
        limit = next(r for r in rows if r["method"] == "limit" and r["threads"] == 1
                     and r["inputs"] == row["inputs"])
        samples = []
        for _ in range(rounds):
            times, start = 0, time.thread_time()
            while times == 0 or time.thread_time() - start < 2e-3:
                numpy.copyto(output, inputs[0])
                for x in inputs[1:row["inputs"]]:
                    numpy.add(output, x, out=output)
                times += 1
            samples.append((time.thread_time() - start) / times)
        seconds = statistics.median(samples)
        rate = row["inputs"] * size / seconds
        added.append(dict(row, method="numpy", variant=numpy.__version__, seconds=seconds,
                          input_GBps=round(rate * 1e-9, 3), Gbitps_per_core=round(rate * 8e-9, 2),
                          fraction_of_limit=round(limit["seconds"] / seconds, 4),
                          tally_over_this=round(seconds / row["seconds"], 3)))
    return added


def human(size):
    for unit in ("B", "KB", "MB"):
        if size < 1024 or unit == "MB":
            return f"{size:g} {unit}"
        size /= 1024


def print_table(rows):
    """A line for each (type, inputs, size, threads): GB/s of input of each method, then Tally in proportion."""
    keys = sorted({(r["dtype"], r["bytes"], r["inputs"], r["threads"]) for r in rows})
    print(f"{'type':9}{'bytes':>9}{'inputs':>7}{'threads':>8}  GB/s of input:"
          + "".join(f"{m:>9}" for m in METHODS) + f"{'Gbit/s/core':>13}{'of limit':>9}{'x pairwise':>11}")
    for dtype, size, inputs, threads in keys:
        cell = {r["method"]: r for r in rows
                if (r["dtype"], r["bytes"], r["inputs"], r["threads"]) == (dtype, size, inputs, threads)}
        rates = "".join(f"{cell[m]['input_GBps']:9.2f}" if m in cell else f"{'-':>9}" for m in METHODS)
        tally = cell["tally"]
        print(f"{dtype:9}{human(size):>9}{inputs:7}{threads:8}  {'':14}{rates}{tally['Gbitps_per_core']:13.1f}"
              f"{tally['fraction_of_limit']:9.2f}{cell['pairwise']['tally_over_this']:11.2f}")


def plot(rows, path):
    """GB/s of input by one thread: over the size for 8 inputs, and over the inputs for the largest size."""
    try:
        import matplotlib
        matplotlib.use("Agg")  # into files, also without a display
        from matplotlib import pyplot
    except ImportError:
        sys.exit("reduce.py: --plot needs matplotlib (pip install matplotlib)")
    types = list(dict.fromkeys(r["dtype"] for r in rows))
    largest = max(r["bytes"] for r in rows)
    figure, panels = pyplot.subplots(2, len(types), figsize=(4.6 * len(types), 7.5), squeeze=False)
    for column, dtype in enumerate(types):
        one = [r for r in rows if r["dtype"] == dtype and r["threads"] == 1]
        for over, at, fixed, panel in (("bytes", "inputs", 8, panels[0][column]),
                                       ("inputs", "bytes", largest, panels[1][column])):
            ticks = sorted({r[over] for r in one if r[at] == fixed})
            for method in METHODS:
                points = sorted((ticks.index(r[over]), r["input_GBps"]) for r in one
                                if r["method"] == method and r[at] == fixed)
                if points:
                    panel.plot(*zip(*points), marker="o", markersize=4, label=method,
                               color=f"C{METHODS.index(method)}", linestyle="--" if method == "limit" else "-")
            panel.set_xticks(range(len(ticks)), [human(t) if over == "bytes" else t for t in ticks])
            if over == "bytes":  # caches are ten times as fast as memory
                panel.set_yscale("log")
                panel.yaxis.set_major_formatter("{x:g}")
            else:
                panel.set_ylim(bottom=0)
            panel.grid(True, which="both", alpha=0.3)
            panel.set(title=f"{dtype}, {human(fixed) + ' each' if at == 'bytes' else f'{fixed} inputs'}",
                      xlabel="size of an input" if over == "bytes" else "inputs", ylabel="GB/s of input, one thread")
        panels[0][column].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(rows, path):
    versions = {m: next((r["variant"] for r in rows if r["method"] == m), "absent") for m in ("tally", "mpi", "numpy")}
    print(f"# kernels {versions['tally']}, up to {max(r['threads'] for r in rows)} threads, MPI: {versions['mpi']}, "
          f"NumPy: {versions['numpy']}")
    print_table(rows)
    if path:
        plot(rows, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows, fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one JSON object a line")
    parser.add_argument("--plot", metavar="FILE", help="draw GB/s over size (.svg, .png, ...)")
    parser.add_argument("--build", metavar="DIR", type=Path, default=ROOT / "build/meson", help="Meson's folder")
    parser.add_argument("--rows", metavar="FILE", help="take the rows from there instead of measuring")
    arguments = parser.parse_args()
    if arguments.rows:
        with open(arguments.rows) as file:
            report([json.loads(line) for line in file], arguments.plot)
        return
    program = arguments.build / "bench/reduce/bench_reduce"

    cores = len(os.sched_getaffinity(0))
    threads = sorted({1 << k for k in range(cores.bit_length()) if 1 << k <= cores} | {cores})
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if arguments.quick:
        sizes, inputs, rounds, threads = [64 << 10, 1 << 20, 32 << 20], [2, 8], 5, [1]
    else:
        sizes, inputs, rounds = [64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20], INPUTS, 9
    rows = []
    for dtype in ("float32", "float16", "bfloat16"):
        for size in sizes:
            got = measure(program, dtype, size, inputs, threads, rounds, min(available // 2, 9 << 30))
            rows += got + measure_numpy(got, 3)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    report(rows, arguments.plot)


if __name__ == "__main__":
    main()
