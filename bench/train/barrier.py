#!/usr/bin/env python3
"""What training without the optimizer's barrier costs where communication is free: steps of 161 small parameters.

    bench/train/barrier.py [--quick] [--json FILE] [--build DIR]

Starts one rank, two that share a machine, and two with a tallyd.  In each rank steps take turns with the barrier and
without, over two models alike: 53 convolutions and batch normalizations and a linear layer, as many parameters as
ResNet-50 has.  Layers sleep, a third in forward and the rest in backward, so that a step takes about 100 ms; with
`--step 0` they don't.  README.md beside this file says more.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAYOUTS = ((1, 0), (2, 0), (2, 1))  # ranks, tallyd
BLOCKS = 53


def make_model(sleep_s):
    """sleep_s: of all layers, in a step."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(sleep_s / 3 / BLOCKS)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(sleep_s * 2 / 3 / BLOCKS)
            return gradient

    class Layer(torch.nn.Module):
        def forward(self, x):
            return Sleep.apply(x) if sleep_s else x

    torch.manual_seed(0)
    layers = []
    for _ in range(BLOCKS):
        layers += [torch.nn.Conv2d(2, 2, 1, bias=False), torch.nn.BatchNorm2d(2), Layer()]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(2 * 2 * 2, 2))


def measure(arguments):
    """Body of a rank."""
    import torch

    import tally.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    ways = {}
    for way in ("barrier", "crossed"):
        model = make_model(arguments.step / 1e3)
        assert len(list(model.parameters())) == 161
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
                                             [(way + name, p) for name, p in model.named_parameters()],
                                             cross_barrier=way == "crossed")
        ways[way] = model, optimizer
    x = torch.ones(2, 2, 2, 2)
    spent = {way: [] for way in ways}
    for number in range((20 if arguments.quick else 100) if arguments.step else 60 if arguments.quick else 600):
        for way in sorted(ways, reverse=number % 2):
            model, optimizer = ways[way]
            hvd.barrier()
            begin, thread = time.perf_counter(), time.thread_time()
            for _ in range(2):  # the updates of the first are made in the second
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            optimizer.synchronize() if way == "crossed" else None
            spent[way].append(((time.perf_counter() - begin) / 2, (time.thread_time() - thread) / 2))
    if hvd.rank() == 0:
        report(arguments, spent)
    hvd.shutdown()


def report(arguments, spent):
    skip = len(spent["barrier"]) // 10
    time_s, thread_s = ({way: statistics.median(one[which] for one in spent[way][skip:]) for way in spent}
                        for which in (0, 1))
    extra = [a[0] - b[0] for a, b in zip(spent["crossed"][skip:], spent["barrier"][skip:])]
    row = {"bench": "barrier", "ranks": arguments.ranks, "tallyd": arguments.servers,
           "barrier_us": round(time_s["barrier"] * 1e6), "extra_us": round(statistics.median(extra) * 1e6),
           "thread_us": round((thread_s["crossed"] - thread_s["barrier"]) * 1e6),
           "share": round(statistics.median(extra) / (time_s["barrier"] if arguments.step else 0.1), 5),
           "step_ms": arguments.step}
    print("%5d %6d %12d %10d %10d %9.2f%%" % (row["ranks"], row["tallyd"], row["barrier_us"], row["extra_us"],
                                             row["thread_us"], 100 * row["share"]), flush=True)
    if arguments.json:
        with open(arguments.json, "a") as out:
            out.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description="what training without the barrier costs where communication is free")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--step", type=float, default=100, metavar="MS", help="that layers sleep in a step (100)")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # set in the ranks
    parser.add_argument("--servers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks:
        return measure(arguments)
    print("# 161 parameters; us for a step; layers sleep for %g ms; %d CPUs, load %.1f"
          % (arguments.step, os.cpu_count(), os.getloadavg()[0]))
    print("%5s %6s %12s %10s %10s %10s" % ("ranks", "tallyd", "with barrier", "on top", "thread",
                                           "of it" if arguments.step else "of 100 ms"), flush=True)
    if arguments.json:
        open(arguments.json, "w").close()
    environment = dict(os.environ, TALLY_LOG="warning", OMP_NUM_THREADS="1")
    for ranks, servers in LAYOUTS:
        command = [os.path.join(arguments.build, "src", "cli", "tally"), "run", "--no-prefix", "-n", str(ranks),
                   "-k", str(servers), "--tallyd", os.path.join(arguments.build, "src", "tallyd", "tallyd")]
        command += ["--machines", "1"] * (servers == 0)
        command += ["--", sys.executable, os.path.abspath(__file__), "--ranks", str(ranks), "--servers", str(servers),
                    "--step", str(arguments.step)]
        command += ["--quick"] * arguments.quick
        command += ["--json", os.path.abspath(arguments.json)] if arguments.json else []
        subprocess.run(command, check=True, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
