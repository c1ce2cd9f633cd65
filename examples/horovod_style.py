"""A training script as one writes it for Horovod; what makes it Tally's is the import line.

    build/bin/tally run -n 4 -k 2 -- python3 examples/horovod_style.py

Trains a small network on scikit-learn's handwritten digits, each rank on its own share, and prints rank 0's loss and
accuracy.  --save FILE writes rank 0's parameters; --single computes the same in one process instead, batch by batch
over all ranks' shares, for comparison.

SPDX-License-Identifier: Apache-2.0
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    """1797 images of 8 x 8; the last 297 for the test."""

    def __init__(self, train):
        data = load_digits()
        cut = slice(0, 1500) if train else slice(1500, None)
        self.images = torch.tensor(data.images[cut], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(data.target[cut])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 10))


def accuracy(model):
    test = Digits(train=False)
    with torch.no_grad():
        return (model(test.images).argmax(1) == test.labels).float().mean().item()


def train(args):
    import tally.torch as hvd

    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # ranks differ until the broadcast
    data = Digits(train=True)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True,
                        multiprocessing_context="fork" if args.workers else None)
    model = make_model()
    # The learning rate grows with the batch.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print("epoch %d  loss %.4f  accuracy %.3f" % (epoch + 1, mean, accuracy(model)), flush=True)
    if args.save and hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)
    hvd.shutdown()


def train_single(args):
    """The same steps in one process: the gradient of a step is the mean over the shares'."""
    torch.manual_seed(args.seed)
    data = Digits(train=True)
    samplers = [DistributedSampler(data, num_replicas=args.single, rank=rank, seed=args.seed)
                for rank in range(args.single)]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * args.single, momentum=0.9)
    for epoch in range(args.epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, args.batch, sampler=sampler, drop_last=True) for sampler in samplers]
        for shares in zip(*loaders):
            optimizer.zero_grad()
            for images, labels in shares:
                (F.cross_entropy(model(images), labels) / args.single).backward()
            optimizer.step()
        print("epoch %d  accuracy %.3f" % (epoch + 1, accuracy(model)), flush=True)
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Horovod-style training on handwritten digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="images of one rank in one step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that load data, forked")
    parser.add_argument("--save", metavar="FILE", help="write the parameters")
    parser.add_argument("--single", type=int, metavar="RANKS", help="one process doing what RANKS ranks do")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train_single(arguments) if arguments.single else train(arguments)
