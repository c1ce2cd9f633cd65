"""One rank of rest.py: communicates in one way, says so, and does nothing more until it is killed.

    rest_rank.py WAY                    SPDX-License-Identifier: Apache-2.0
"""

import array
import signal
import sys

RESTING = "at rest"
COUNT = 100000


def say():
    print(RESTING, flush=True)


def rest():
    say()
    while True:
        signal.pause()


def call():
    import tally

    tally.init()
    tally.push_pull(array.array("f", [1.0]) * COUNT, name="gradient")
    return tally


def plain():
    call()
    rest()


def wait():
    """All but the last rank wait for it."""
    tally = call()
    if tally.rank() == tally.size() - 1:
        rest()
    say()
    tally.barrier()


def group(backend):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    for asynchronous in (False, True):
        work = dist.all_reduce(torch.ones(COUNT), async_op=asynchronous)
        if asynchronous:
            work.get_future().wait()
    rest()


def optimizer():
    import torch

    import tally.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    own = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(),
                                   cross_barrier=True)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        model(torch.ones(4, 100)).sum().backward()
        own.step()
    rest()


WAYS = {
    "plain": plain,
    "backend": lambda: group("tally"),
    "optimizer": optimizer,
    "wait": wait,
    "gloo": lambda: group("gloo"),
}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
