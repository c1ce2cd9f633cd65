#!/usr/bin/env python3
"""What a call costs in Python: a job of one rank, in which the data goes nowhere far, so that what is left is the call.

    bench/python_call.py [--quick] [--json FILE]

Columns: the call; microseconds a call, median and 99th percentile over batches; batches; calls in a batch.
`submit` is the part before the wait, which is all that a training loop's thread pays while backward runs.  It
contains the C library's, which with tensors as small as these already sends them.  `binding` is the same
with the C function replaced by an empty one: what Python adds.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import contextlib
import ctypes
import json
import statistics
import time

import numpy as np
import torch

import tally
import tally.torch as hvd
from tally import _lib, _operations


def measure(call, batches, length, settle=lambda results: None):
    """Microseconds a call, batch by batch; settle() gets what the calls of a batch returned, outside the clock."""
    times = []
    for _ in range(batches + 2):
        results = [None] * length
        begin = time.perf_counter()
        for i in range(length):
            results[i] = call(i)
        times.append((time.perf_counter() - begin) / length * 1e6)
        settle(results)
    times = sorted(times[2:])  # the first two warm up
    return statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.99))]


@contextlib.contextmanager
def without_library():
    """Within it the C function that submits does nothing, through the same conversion of arguments."""
    real = _lib.lib.tally_push_pull
    empty = ctypes.PYFUNCTYPE(real.restype, *real.argtypes)(("getpagesize", ctypes.PyDLL(None)))
    defaults = _operations.push_pull.__defaults__
    _operations.push_pull.__defaults__ = tuple(empty if value is real else value for value in defaults)
    try:
        yield
    finally:
        _operations.push_pull.__defaults__ = defaults


def forget(handles):
    """Handles of nothing: there is nothing to free."""
    for handle in handles:
        handle._ended = True


def main():
    parser = argparse.ArgumentParser(description="cost of a call in Python")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    arguments = parser.parse_args()
    batches, length = (20, 100) if arguments.quick else (200, 200)

    hvd.init()
    tensors = [torch.ones(1) for _ in range(length)]
    arrays = [np.ones(1, np.float32) for _ in range(length)]
    names = ["tensor.%d" % i for i in range(length)]
    waited = [hvd.allreduce_async_(tensors[i], name=names[i]) for i in range(length)]
    for handle in waited:
        handle.wait()

    def settle(handles):
        for handle in handles:
            handle.wait()

    def nothing(results):
        pass

    calls = {
        "tally.torch.allreduce_async_": lambda i: hvd.allreduce_async_(tensors[i], name=names[i]),
        "tally.torch.allreduce_async": lambda i: hvd.allreduce_async(tensors[i], name=names[i]),
        "tally.push_pull_async of NumPy": lambda i: tally.push_pull_async(arrays[i], names[i]),
    }
    cases = [("tally.torch.rank()", lambda i: hvd.rank(), nothing),
             ("tally.torch.poll, ended", lambda i: hvd.poll(waited[i]), nothing)]
    cases += [(name + ", binding", call, forget) for name, call in calls.items()]
    cases += [(name + ", submit", call, settle) for name, call in calls.items()]
    cases += [("tally.torch.allreduce_, to the end", lambda i: hvd.allreduce_(tensors[i], name=names[i]), nothing)]
    rows = []
    print("# one rank; Tally %s, PyTorch %s, NumPy %s" % (tally.__version__, torch.__version__, np.__version__))
    print("%-42s %10s %10s %8s %8s" % ("call", "median us", "p99 us", "batches", "calls"))
    for call, function, after in cases:
        with without_library() if after is forget else contextlib.nullcontext():
            median, p99 = measure(function, batches, length, after)
        rows.append({"bench": "python_call", "call": call, "median_us": round(median, 3), "p99_us": round(p99, 3),
                     "batches": batches, "calls": length, "tally": tally.__version__, "torch": torch.__version__,
                     "numpy": np.__version__})
        print("%-42s %10.2f %10.2f %8d %8d" % (call, median, p99, batches, length), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as out:
            for row in rows:
                out.write(json.dumps(row) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
