"""Hugging Face Accelerate over the backend "tally", or over Gloo with the hook on the model that it has prepared:

    torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py --way backend
    torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py --way hook
    torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py --way cross_barrier

SPDX-License-Identifier: Apache-2.0
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

import tally.torch  # for the backend alone not needed where Tally was installed by pip

from problem import BATCH, STEPS, dataset, make_model, report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("backend", "hook", "cross_barrier"), default="backend")
    way = parser.parse_args().way
    if way == "backend":
        dist.init_process_group("tally")  # before Accelerate makes a group of its own
    views = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)] if way == "cross_barrier" else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=views)
    model = make_model()
    loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    if way == "hook":
        model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)
    if way == "cross_barrier":
        tally.torch.cross_barrier(model, optimizer)
    for _, (x, y) in zip(range(STEPS), loader):
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        if way != "cross_barrier":  # a norm needs all gradients, and step() would have nothing left to put off
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    report(accelerator.unwrap_model(model), accelerator.process_index)
    assert accelerator.num_processes == dist.get_world_size()
    assert dist.get_backend() == ("tally" if way == "backend" else "gloo")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
