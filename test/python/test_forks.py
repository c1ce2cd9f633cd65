"""Forks of a process that has joined a job."""

import os

import numpy as np

from test_ops import fails, hvd


class Squares:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError
        import torch
        return torch.tensor([index * index], dtype=torch.float32)


def load_data():
    import torch
    t = hvd()
    handle = t.allreduce_async(torch.ones(1000), name="across the fork", op=t.Sum)
    total = torch.zeros(1)
    for workers in (2, 1):
        loader = torch.utils.data.DataLoader(Squares(40), batch_size=4, num_workers=workers,
                                             multiprocessing_context="fork")
        for batch in loader:
            total += t.allreduce(batch.sum(0), name="batch", op=t.Sum)
    assert t.synchronize(handle).eq(t.size()).all()
    assert total.item() == 2 * t.size() * sum(i * i for i in range(40))


def test_data_loader_with_forked_workers(four):
    four(load_data)


def fork():
    """A fork is told that it may not, by every way in, and its end does no harm."""
    import torch
    import tally
    t = hvd()
    handle = t.allreduce_async(torch.ones(10), name="forked", op=t.Sum)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model = torch.nn.Linear(1, 1)
            for call in (t.init, t.rank, t.barrier, lambda: t.allreduce(torch.ones(1)),
                         lambda: t.broadcast(torch.ones(1), 0), lambda: t.allgather(torch.ones(1)),
                         lambda: t.broadcast_parameters(model.state_dict(), 0), lambda: t.broadcast_object(1),
                         lambda: tally.push_pull(np.ones(1)), tally.report,
                         lambda: t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))):
                fails(RuntimeError, call, str(os.getppid()), str(os.getpid()))
            assert not t.is_initialized()
            t.shutdown()
            del handle
            os.write(writer, b"good")
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "good"
    assert t.synchronize(handle).eq(t.size()).all()
    assert t.allreduce(torch.ones(10), op=t.Sum).eq(t.size()).all()


def test_use_in_a_fork(four):
    four(fork)
