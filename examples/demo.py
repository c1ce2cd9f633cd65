"""Trains a convolutional network on Fashion-MNIST over several ranks, and checks what Tally did for it.

    build/bin/tally run -n 4 -k 2 -- build/venv/bin/python examples/demo.py

`make demo` runs it so, after installing the images (Debian's package dataset-fashion-mnist).  Rank 0 says how the
training goes, then what it found: test accuracy, images per second, whether all ranks hold the same parameters,
whether the sums of a step have the bits of a plain reference, and what each service summed beside its planned share.
The exit status is 1 if one of these is not as it must be.

The reference nests sums as Tally does with equally many ranks on each machine; other layouts are refused.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import gzip
import hashlib
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import tally.torch as hvd

PART_BYTES = 16 << 10  # small, so that a small model is split finely
TEST_BATCH = 1000


# --- images ------------------------------------------------------------------------------------------------


def read_idx(path):
    """An array from a gzipped file in MNIST's format: magic with type and number of dimensions, sizes, bytes."""
    with gzip.open(path, "rb") as file:
        data = file.read()
    if data[:3] != b"\0\0\x08":
        raise ValueError("%s is no idx file of bytes" % path)
    sizes = np.frombuffer(data, ">u4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)


def load(folder, part):
    """Images [N, 1, 28, 28] float32, about zero mean and unit variance, and labels [N]."""
    try:
        images = read_idx(folder / (part + "-images-idx3-ubyte.gz"))
        labels = read_idx(folder / (part + "-labels-idx1-ubyte.gz"))
    except FileNotFoundError as reason:
        sys.exit("demo: %s is not there; install the images (apt-get install dataset-fashion-mnist), or name their "
                 "folder with --data" % reason.filename)
    images = (torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 255 - 0.286) / 0.353
    return images, torch.tensor(labels, dtype=torch.int64)


# --- training ----------------------------------------------------------------------------------------------


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(32 * 7 * 7, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def batches(count, epochs, batch):
    """(epoch, this rank's indices) of each step; the ranks deal out one common order."""
    everyone = batch * hvd.size()
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, count - everyone + 1, everyone):
            mine = start + batch * hvd.rank()
            yield epoch, order[mine:mine + batch]


def train(model, optimizer, images, labels, args):
    """Returns (steps, seconds)."""
    steps = args.epochs * (len(images) // (args.batch * hvd.size()))
    began = told = time.monotonic()
    for step, (epoch, index) in enumerate(batches(len(images), args.epochs, args.batch), 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[index]), labels[index])
        loss.backward()  # gradients leave for the services as backward makes them
        optimizer.step()
        now = time.monotonic()
        if hvd.rank() == 0 and (now - told >= 1 or step == steps):
            told = now
            print("epoch %d of %d  step %3d of %d  loss %.3f  %6.0f images/s" %
                  (epoch + 1, args.epochs, step, steps, loss.item(),
                   step * args.batch * hvd.size() / (now - began)), flush=True)
    return steps, time.monotonic() - began


def accuracy(model, images, labels):
    """Of all ranks together, each on its share of the test images."""
    right = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        for start in range(hvd.rank() * TEST_BATCH, len(images), hvd.size() * TEST_BATCH):
            end = start + TEST_BATCH
            right += (model(images[start:end]).argmax(1) == labels[start:end]).sum()
    return hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(images)


# --- checks ------------------------------------------------------------------------------------------------


def tree(inputs):
    """T(0, n): T(lo, lo + m) + T(lo + m, hi), m the largest power of two below hi - lo."""
    if len(inputs) == 1:
        return inputs[0]
    m = 1 << ((len(inputs) - 1).bit_length() - 1)
    return tree(inputs[:m]) + tree(inputs[m:])


def reference_average(inputs):
    """Each machine's ranks along their tree, then the machines along theirs; divided once."""
    each = len(inputs) // hvd.cross_size()
    machines = [tree(inputs[i:i + each]) for i in range(0, len(inputs), each)]
    return tree(machines) / np.float32(len(inputs))


def checked_step(model, optimizer, taken, images, labels):
    """One more step.  Returns (gradients' elements, how many differ from the reference in any bit)."""
    optimizer.zero_grad()
    taken.update(dict.fromkeys(model.parameters()))
    F.cross_entropy(model(images), labels).backward()
    optimizer.synchronize()
    elements = wrong = 0
    for name, p in model.named_parameters():
        own = taken[p].reshape(1, -1)
        inputs = hvd.allgather(own, name="check." + name).numpy()
        expected = reference_average(list(inputs)).view(np.uint32)
        wrong += int((expected != p.grad.numpy().reshape(-1).view(np.uint32)).sum())
        elements += expected.size
    taken.clear()
    with optimizer.skip_synchronize():
        optimizer.step()
    return elements, wrong


def parameter_hashes(model):
    """The hash of each rank's parameters."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    every = hvd.allgather(torch.tensor(list(digest.digest()), dtype=torch.uint8).unsqueeze(0), name="hash")
    return [bytes(row.tolist()).hex() for row in every]


def service_table(before, after, pushed):
    """Lines of what each service summed beside the plan's, and the largest deviation in bytes."""
    lines, worst = [], 0
    for number, (old, new) in enumerate(zip(before["services"], after["services"])):
        summed = new["bytes_summed"] - old["bytes_summed"]
        planned = new["share"] * pushed
        worst = max(worst, abs(summed - planned))
        kind = "tallyd" if new["kind"] == "tallyd" else "in a rank"
        lines.append("  service %d, %-9s %12d bytes, planned %14.1f (%5.2f%% of all)" %
                     (number, kind, summed, planned, 100 * new["share"]))
    return lines, worst


def report():
    """Rank 0's view of the services, while no operation is under way."""
    facts = hvd.report() if hvd.rank() == 0 else None
    hvd.barrier()
    return facts


def main(args):
    torch.set_num_threads(1)
    images, labels = load(args.data, "train")
    test_images, test_labels = load(args.data, "t10k")
    hvd.init(settings={"TALLY_PART_BYTES": PART_BYTES})
    if hvd.size() != hvd.cross_size() * hvd.local_size():
        sys.exit("demo: wants equally many ranks on each machine")
    torch.manual_seed(hvd.rank())  # ranks differ until the broadcast
    model = make_model()
    # Notes each gradient as backward made it; set before the optimizer's own hook, so it runs before that.
    taken = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: taken.update({p: p.grad.detach().clone()}) if p in taken else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    before = report()
    steps, seconds = train(model, optimizer, images, labels, args)
    after = report()
    own = slice(hvd.rank() * args.batch, (hvd.rank() + 1) * args.batch)
    elements, wrong = checked_step(model, optimizer, taken, images[own], labels[own])
    wrong = hvd.allreduce(torch.tensor(wrong), op=hvd.Sum, name="wrong").item()
    hashes = parameter_hashes(model)
    reached = accuracy(model, test_images, test_labels)

    ok = True
    if hvd.rank() == 0:
        def line(good, text):
            nonlocal ok
            ok &= good
            print("%-6s %s" % ("ok" if good else "FAILED", text))

        pushed = steps * sum(p.numel() * 4 for p in model.parameters())
        table, worst = service_table(before, after, pushed)
        print("%d ranks on %d machines, %d tallyd; %d steps in %.1f s, %.0f images/s" %
              (hvd.size(), hvd.cross_size(), after["tallyd"], steps, seconds,
               steps * args.batch * hvd.size() / seconds))
        line(reached >= args.least, "test accuracy %.4f, wanted %.2f" % (reached, args.least))
        line(len(set(hashes)) == 1, "parameters of all ranks: " + ", ".join(sorted({h[:16] for h in hashes})))
        line(wrong == 0, "bits of a checked step: %d of %d sums on %d ranks differ from the reference" %
             (wrong, elements, hvd.size()))
        line(worst <= steps * PART_BYTES, "bytes summed, at most %.0f a step from the plan (a part is %d):" %
             (worst / steps, PART_BYTES))
        print("\n".join(table), flush=True)
    ok = hvd.broadcast_object(ok)
    hvd.shutdown()
    return 0 if ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on Fashion-MNIST and check Tally's work")
    parser.add_argument("--data", type=pathlib.Path, default="/usr/share/datasets/fashion-mnist",
                        help="folder with the four idx files")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images of one rank in one step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--least", type=float, default=0.85, help="test accuracy that must be reached")
    sys.exit(main(parser.parse_args()))
