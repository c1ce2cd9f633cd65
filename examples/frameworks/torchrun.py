"""PyTorch's DistributedDataParallel under torchrun, in two ways:

    torchrun --standalone --nproc-per-node 2 examples/frameworks/torchrun.py --way backend
    torchrun --standalone --nproc-per-node 2 examples/frameworks/torchrun.py --way hook

SPDX-License-Identifier: Apache-2.0
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tally.torch

from problem import batches, make_model, report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("backend", "hook"), default="backend")
    way = parser.parse_args().way

    dist.init_process_group("tally" if way == "backend" else "gloo")
    model = DistributedDataParallel(make_model())
    if way == "hook":
        model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    report(model.module, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
