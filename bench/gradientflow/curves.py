#!/usr/bin/env python3
"""Accuracy with coarse-grained sparse communication: trainings of four ranks, played by one process, on Fashion-MNIST.

    bench/gradientflow/curves.py [--quick] [--json FILE] [--models mlp convnet] [--seeds 0 1 2 3 4] [--epochs 3]
    bench/gradientflow/curves.py --summary FILE        # what --json wrote, also in several runs

Ways of one seed have the same initial parameters and the same images in each step.  simulation.py has the bits of a job of
ranks.  README.md beside this file explains ways and columns.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples"), str(HERE.parents[1] / "build" / "python")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import demo  # noqa: E402
from simulation import Simulation  # noqa: E402

from tally.torch import SparseChunks  # noqa: E402

DATA = "/usr/share/datasets/fashion-mnist"
RANKS, BATCH = 4, 32  # images of a rank in a step
LEARNING_RATE, MOMENTUM, DECAY = 0.05, 0.9, 5e-4
WARM_UP = 0.05  # of the steps
WAYS = {"dense": 1, "30%": 0.3, "15%": 0.15, "10%": 0.1, "Algorithm 1, 15%": 0.15}
WIDTH = 512
CHUNK = {"mlp": 4096, "convnet": 1024}


def make_model(name, seed):
    torch.manual_seed(seed)
    if name == "convnet":
        return demo.make_model()
    layers = [torch.nn.Flatten()]
    for before in (784, WIDTH, WIDTH):
        layers += [torch.nn.Linear(before, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))


def accuracy(model, images, labels):
    """Percent of the test images."""
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(1000), labels.split(1000)))
    return 100 * right / len(images)


def train(name, way, seed, epochs, data, limit):
    """One training, a row of the table."""
    (images, labels), test = data
    model = make_model(name, seed)
    steps = min(len(images) // (RANKS * BATCH), limit)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    options = SparseChunks(WAYS[way], int(WARM_UP * epochs * steps), CHUNK[name])
    simulation = Simulation(model, optimizer, options, RANKS, dense=math.inf if way == "dense" else 0,
                            keep=MOMENTUM if way.startswith("Algorithm") else 1.0)
    row = {"bench": "curves", "model": name, "way": way, "seed": seed, "ranks": RANKS, "batch": BATCH, "epochs": epochs,
           "steps": epochs * steps, "warm_up": options.warm_up, "chunk": options.chunk, "chunks": simulation.chunks.count,
           "losses": [], "accuracies": []}
    sent, began = 0, time.monotonic()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        total = 0.0
        for step in range(steps):
            def backward(rank):
                nonlocal total
                index = order[(step * RANKS + rank) * BATCH:][:BATCH]
                loss = F.cross_entropy(model(images[index]), labels[index])
                loss.backward()
                total += loss.item()

            simulation.step(backward)
            sent += sum(end - begin for begin, end, one in simulation.chunks.runs(simulation.chunks.sent) if one)
            scheduler.step()
        row["losses"].append(total / (steps * RANKS))
        row["accuracies"].append(accuracy(model, *test))
    row["sent"] = sent / (epochs * steps * simulation.chunks.layout.length)
    row["time_s"] = time.monotonic() - began
    return row


def summary(rows):
    """The table: means over seeds, and the differences from the dense training of the same seed."""
    print("%-8s %-17s %6s %6s %9s %9s   %s"
          % ("model", "way", "chunks", "sent", "loss", "accuracy", "points from dense, by seed"))
    for name in CHUNK:
        dense = {row["seed"]: row["accuracies"][-1] for row in rows if row["model"] == name and row["way"] == "dense"}
        for way in WAYS:
            mine = sorted((row for row in rows if (row["model"], row["way"]) == (name, way)), key=lambda row: row["seed"])
            if not mine:
                continue
            points = [row["accuracies"][-1] - dense[row["seed"]] for row in mine if row["seed"] in dense]
            text = "%+.2f  (%s)" % (statistics.mean(points), " ".join("%+.2f" % one for one in points)) if points else ""
            print("%-8s %-17s %6d %6.3f %9.4f %8.2f%%   %s"
                  % (name, way, mine[0]["chunks"], statistics.mean(row["sent"] for row in mine),
                     statistics.mean(row["losses"][-1] for row in mine),
                     statistics.mean(row["accuracies"][-1] for row in mine), "" if way == "dense" else text))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CHUNK, default=[*CHUNK])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--json", metavar="FILE", help="append the rows, one object a line")
    parser.add_argument("--summary", metavar="FILE", help="print the table of the rows in FILE, and train nothing")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed")
    arguments = parser.parse_args()
    if arguments.summary:
        summary([json.loads(line) for line in pathlib.Path(arguments.summary).read_text(encoding="utf-8").splitlines()])
        return
    torch.set_num_threads(1)
    limit = 1 << 30
    if arguments.quick:
        arguments.epochs, arguments.seeds, limit = 1, [0], 10
    data = [demo.load(pathlib.Path(arguments.data), part) for part in ("train", "t10k")]
    rows = []
    for name in arguments.models:
        for seed in arguments.seeds:
            for way in arguments.ways:
                rows.append(train(name, way, seed, arguments.epochs, data, limit))
                if arguments.json:
                    with open(arguments.json, "a", encoding="utf-8") as out:
                        print(json.dumps(rows[-1]), file=out)
    summary(rows)


if __name__ == "__main__":
    main()
