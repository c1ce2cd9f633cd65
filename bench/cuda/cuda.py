#!/usr/bin/env python3
"""CUDA tensors on their way to the host and back, beside what the bus carries: a job of one rank.

    PYTHONPATH=build/python build/venv/bin/python bench/cuda/cuda.py [--quick] [--json FILE]

For each size three ways take turns:
    limit      plain copies of the same bytes between the device and pinned memory, both ways at once
    staging    copies by tally.torch.device, as of operations other than reductions, which end at once: what chunks, events
               and Python cost
    allreduce  tally.torch.allreduce_() of a job of one rank, by the library's copies, which reads and writes host memory, too
Columns: the way; bytes; the median and least time in microseconds, from the call to the end of the copy back; bytes each
way a second, in 10^9; the share of the limit, by the medians; elements that are wrong, of a tensor that is written
right before and read right after by the current stream.  Without a GPU it says so and measures nothing.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import statistics
import sys
import time

import torch


class _Ended:
    """An operation that is over."""

    def wait(self):
        pass


def timed(call):
    """Microseconds of a call until the device is through."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def ways(length):
    """{way: a call}, and the tensor that two of them work on."""
    import tally.torch
    from tally._calls import Call
    from tally.torch import device

    x = torch.ones(length // 4, device="cuda")
    there, back = (torch.empty(length // 4, pin_memory=True) for _ in range(2))
    y = torch.empty_like(x)
    out, into = torch.cuda.Stream(), torch.cuda.Stream()

    def limit():
        with torch.cuda.stream(out):
            there.copy_(x, non_blocking=True)
        with torch.cuda.stream(into):
            y.copy_(back, non_blocking=True)

    def staging():
        on, call = device.of(x), Call()
        loads = [(call, None, [(x[low:high], x[low:high])], lambda call, hosts: call.then(_Ended()))
                 for _, low, high in device.chunks("x", x.numel(), 4, on)]
        device.begin(call, on, loads).wait()

    def allreduce():
        tally.torch.allreduce_(x, name="x", op=tally.torch.Sum)

    return {"limit": limit, "staging": staging, "allreduce": allreduce}, x


def wrong(way, call, x):
    """How many elements are not what they must be, where the current stream is busy before and after."""
    if way == "limit":
        return 0
    busy = torch.rand(2048, 2048, device="cuda")
    for _ in range(8):
        busy = busy @ busy
    expected = torch.arange(x.numel(), device="cuda", dtype=torch.float32) % 1000
    x.copy_(expected)
    call()
    x.add_(1)
    return int((x != expected + 1).sum())


def main():
    parser = argparse.ArgumentParser(description="CUDA tensors to the host and back, beside what the bus carries")
    parser.add_argument("--quick", action="store_true", help="few sizes and calls")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    arguments = parser.parse_args()
    rows = []
    if torch.cuda.is_available():
        import tally
        tally.init()
        print("Tally %s, PyTorch %s, CUDA %s, %s" % (tally.__version__, torch.__version__, torch.version.cuda,
                                                     torch.cuda.get_device_name()))
        print("%-10s %12s %12s %12s %8s %8s %8s" % ("way", "bytes", "median us", "least us", "GB/s", "share", "wrong"))
        sizes = [4 << 20, 64 << 20] if arguments.quick else [1 << 12, 1 << 20, 8 << 20, 25 << 20, 64 << 20, 256 << 20]
        for length in sizes:
            calls, x = ways(length)
            errors = {way: wrong(way, call, x) for way, call in calls.items()}  # and warms up
            times = {way: [] for way in calls}
            for _ in range(10 if arguments.quick else 40):
                for way, call in calls.items():
                    times[way].append(timed(call))
            limit = statistics.median(times["limit"])
            for way in calls:
                median = statistics.median(times[way])
                row = {"bench": "cuda", "way": way, "bytes": length, "median_us": median, "least_us": min(times[way]),
                       "gb_s": length / median / 1e3, "share": limit / median, "wrong": errors[way],
                       "device": torch.cuda.get_device_name(), "torch": torch.__version__}
                rows.append(row)
                print("%-10s %12d %12.1f %12.1f %8.2f %8.3f %8d" % (way, length, median, row["least_us"], row["gb_s"],
                                                                    row["share"], row["wrong"]), flush=True)
    else:
        print("no GPU here: nothing was measured (torch.cuda.is_available() is false)")
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if any(row["wrong"] for row in rows):
        sys.exit("wrong sums")


if __name__ == "__main__":
    main()
