"""One rank of the benchmark asynchronous.py: does what a Task says, and prints one JSON object.

    rank.py '{"what": "adds", …}'      # a Task, below

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import dataclasses
import json
import os
import sys
import time


@dataclasses.dataclass
class Task:
    what: str  # adds, death, steps or train
    bytes: int = 0  # of the parameters
    rounds: int = 0  # adds: of each operation
    tensors: int = 1  # adds: shared tensors that the parameters are in
    delays: list = None  # steps: seconds that each step computes, for each rank; the steps are as many
    seconds: float = 0  # steps, death: after these no step begins; 0: all are made.  train: of the training
    staleness: int = 0  # 0: no bound
    way: str = ""  # train: synchronous or asynchronous
    seed: int = 0
    rate: float = 0  # train: the learning rate


# --- what four ranks add at once ------------------------------------------------------------------------


def adds(task, rank):
    """Seconds of push_pulls and of additions, in turns, each from behind a barrier."""
    import numpy as np

    import tally
    from tally import _job, _operations
    from tally._calls import USER, Call
    from tally._lib import DTYPE_CODES

    tally.init()
    count, each, dtype = task.bytes // 4, task.bytes // 4 // task.tensors, DTYPE_CODES["float32"]
    tensor, result = np.full(count, rank + 1, np.float32), np.zeros(count, np.float32)
    sums, calls = Call("sum", space=USER), [Call("parameters.%d" % i, space=USER) for i in range(task.tensors)]
    _job.plan(["sum"], [task.bytes], USER)  # as for gradients
    for call in calls:
        _operations.shared_create(call, result.ctypes.data, each, dtype, 0, (each,)).wait()

    def push_pull():
        return [_operations.push_pull(sums, tensor.ctypes.data, result.ctypes.data, count, dtype, (count,))]

    def add():
        return [_operations.shared_add(call, tensor.ctypes.data) for call in calls]

    seconds = {"push_pull": [], "add": []}
    for number in range(1 + task.rounds):
        for name, begin in (("push_pull", push_pull), ("add", add)):
            tally.barrier()
            before = time.perf_counter()
            for operation in begin():
                operation.wait()
            if number:  # the first is for warming up
                seconds[name].append(time.perf_counter() - before)
    tally.barrier()
    total, wrong = sum(range(1, tally.size() + 1)), 0
    for call in calls:
        read = _operations.shared_read(call)
        read.wait()
        values = np.frombuffer((ctypes.c_char * (4 * each)).from_address(read.values()), np.float32)
        wrong += int((values != (1 + task.rounds) * total).sum())
    wrong += int((result != total).sum())
    tally.shutdown()
    return {"seconds": seconds, "wrong": wrong}


# --- additions while a service dies ---------------------------------------------------------------------


def death(task, rank):
    """When each addition began and ended, by the machine's clock."""
    import numpy as np

    import tally
    from tally import _operations
    from tally._calls import USER, Call
    from tally._lib import DTYPE_CODES

    tally.init()
    count = task.bytes // 4
    tensor, call = np.zeros(count, np.float32), Call("parameters", space=USER)
    _operations.shared_create(call, tensor.ctypes.data, count, DTYPE_CODES["float32"], 0, (count,)).wait()
    tensor[:] = rank + 1
    tally.barrier()
    print("ADDING", flush=True)
    begin, times = time.monotonic(), []
    while time.monotonic() - begin < task.seconds:
        before = time.monotonic()
        _operations.shared_add(call, tensor.ctypes.data).wait()
        times.append((before, time.monotonic()))
    added = np.array([len(times) * (rank + 1)], np.int64)
    tally.push_pull(added, name="added", op=0)  # the sum
    read = _operations.shared_read(call)
    read.wait()
    values = np.frombuffer((ctypes.c_char * task.bytes).from_address(read.values()), np.float32)
    wrong = int((values != added[0]).sum())
    tally.barrier()
    tally.shutdown()
    return {"times": times, "wrong": wrong}


# --- steps of given lengths -----------------------------------------------------------------------------


def run_steps(optimizer, delays, until):
    """When each step ended, in seconds from the begin."""
    begin, ended = time.perf_counter(), []
    for delay in delays:
        if until and time.perf_counter() - begin >= until:
            break
        time.sleep(delay)
        optimizer.step()
        ended.append(time.perf_counter() - begin)
    return ended


def steps(task, rank):
    """Steps without communication, and then with an AsyncOptimizer."""
    import torch

    import tally.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(task.bytes // 4))
    parameter.grad = torch.ones_like(parameter)
    plain = torch.optim.SGD([parameter], lr=1.0)
    hvd.barrier()
    alone = run_steps(plain, task.delays[rank], task.seconds)
    with torch.no_grad():
        parameter.zero_()
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([parameter], lr=1.0), [("parameter", parameter)],
                                   staleness=task.staleness or None)
    hvd.barrier()
    ended = run_steps(optimizer, task.delays[rank], task.seconds)
    optimizer.finish()
    made = hvd.allreduce(torch.tensor([float(len(ended))]), op=hvd.Sum).item()
    wrong = int((parameter != -made).sum())
    hvd.shutdown()
    return {"alone": alone, "ended": ended, "wrong": wrong}


# --- a training -----------------------------------------------------------------------------------------


def train(task, rank):
    """(seconds, loss, accuracy) of the test images on rank 0, while the ranks train."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    import tally.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(task.seed))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    test = images[:400], labels[:400]
    images, labels = images[400:], labels[400:]
    torch.manual_seed(task.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=0.9)
    if task.way == "synchronous":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
    else:
        optimizer = hvd.AsyncOptimizer(optimizer, model.named_parameters(), staleness=task.staleness or None)
    draw = torch.Generator().manual_seed(1000 * task.seed + rank)
    curve, made = [], 0

    def look(now):
        with torch.no_grad():
            answers = model(test[0])
            curve.append((now, F.cross_entropy(answers, test[1]).item(), (answers.argmax(1) == test[1]).float().mean().item()))

    hvd.barrier()
    begin = time.perf_counter()
    while True:
        now = time.perf_counter() - begin
        going = torch.tensor([float(now < task.seconds)])
        if task.way == "synchronous":  # all end with the same step
            going = hvd.broadcast(going, 0, name="going")
        if not going:
            break
        if rank == 0 and now >= len(curve) * task.seconds / 40:
            look(now)
        pick = torch.randint(len(labels), (32,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(images[pick]), labels[pick]).backward()
        time.sleep(task.delays[rank])
        optimizer.step()
        made += 1
    if task.way == "asynchronous":
        optimizer.finish()
    look(task.seconds)
    hvd.shutdown()
    return {"curve": curve, "steps": made, "wrong": 0}


def main():
    task, rank = Task(**json.loads(sys.argv[1])), int(os.environ["RANK"])
    print("RESULT " + json.dumps({"adds": adds, "death": death, "steps": steps, "train": train}[task.what](task, rank)), flush=True)


if __name__ == "__main__":
    main()
