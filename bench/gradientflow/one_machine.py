#!/usr/bin/env python3
"""Small gradients among the ranks of one machine: a step's exchange, by the bytes at which a range ends.

    bin/tally run -n 4 -- python3 bench/gradientflow/one_machine.py [--list small|resnet50] [--lazy default 0 32768]

Each way has a model of its own, whose backward makes all gradients anew and computes nothing else.  The ways take turns, a step
each.  Rank 0 prints a line for each way: the median and the least of the slowest rank's times, and the ranges of the layout.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch

import tally.torch as hvd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models"))

import profiles  # noqa: E402


def counts_of(name):
    """Elements of each tensor of a list."""
    if name == "small":
        return [1024] * 1000
    return [count for layer in profiles.profile(name).layers for _, count in layer.tensors]


class Way:
    """Steps with one `lazy`."""

    def __init__(self, counts, lazy):
        self.parameters = [torch.nn.Parameter(torch.zeros(count)) for count in counts]
        self.factors = [torch.ones(count) for count in counts]
        named = [(str(i), p) for i, p in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=0.0), named, lazy=lazy)
        self.times = []

    def step(self):
        """Seconds from the beginning of backward until all gradients are reduced."""
        self.optimizer.zero_grad()
        losses = [(p * factor).sum() for p, factor in zip(self.parameters, self.factors)]
        hvd.barrier()
        begin = time.perf_counter()
        torch.autograd.backward(losses)
        self.optimizer.synchronize()
        mine = time.perf_counter() - begin
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return hvd.allreduce(torch.tensor(mine, dtype=torch.float64), op=hvd.Max, name="time").item()


def main():
    parser = argparse.ArgumentParser(description="small gradients among the ranks of one machine")
    parser.add_argument("--list", choices=["small", *profiles.MODELS], default="small")
    parser.add_argument("--lazy", nargs="+", default=["default", "0", "32768"], metavar="BYTES", help="(default 0 32768)")
    parser.add_argument("--steps", type=int, default=30, help="of each way that are timed, behind 6 (30)")
    a = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    counts = counts_of(a.list)
    ways = {word: Way(counts, None if word == "default" else int(word)) for word in a.lazy}
    for step in range(6 + a.steps):
        for way in ways.values():
            took = way.step()
            if step >= 6:
                way.times.append(took)
    for word, way in ways.items():
        if hvd.rank() == 0:
            ranges = len(way.optimizer._tally_layout.ranges)
            median, least = statistics.median(way.times) * 1e3, min(way.times) * 1e3
            print(f"{a.list}, lazy {word}: median {median:.1f} ms, least {least:.1f} ms, {ranges} ranges", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
