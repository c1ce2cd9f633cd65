"""Theorem 2 of BytePS: ranks that add differences are the same as a parameter server, under the same order.

Services log the order in which they add and answer (TALLY_SHARED_LOG).  A replay of it in this process must have the same bits.  A
parameter server with one optimizer for each rank, which gets gradients in that order, must agree to 1e-12."""

import collections
import glob
import random
import time

import pytest
import torch

import jobs

STEPS = 6
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
}


def model_of(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).to(dtype)  # 5 parts of float64


def gradients(model, rank, step):
    """A backward of a rank's own data."""
    data = torch.randn(11, 40, generator=torch.Generator().manual_seed(1000 * rank + step))
    model.zero_grad()
    model(data.to(next(model.parameters()).dtype)).square().mean().backward()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(kind, overlap, dtype):
    """What a rank has sent, by round; what it has got, by round; and its parameters at the end."""
    import tally.torch as hvd
    model = model_of(hvd.rank(), dtype)
    optimizer = hvd.AsyncOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), overlap=overlap)
    [share] = optimizer._tally_shares
    sent, got, send, land = [None], [flat(model)], share.send, share.land

    def note():
        if share.operation is not None:
            share.operation.wait()
            got.append(share.newest().clone())

    def send_and_note(begun):
        note()
        sent.append(share.change.clone())
        send(begun)

    def land_and_note():
        note()
        land()

    share.send, share.land = send_and_note, land_and_note
    pause = random.Random(hvd.rank())
    for step in range(1, STEPS + 1):
        gradients(model, hvd.rank(), step)
        time.sleep(pause.random() / 50)
        optimizer.step()
    optimizer.finish()
    return [[one.numpy() for one in list] for list in (sent[1:], got, [flat(model)])]


def results_of(job, *arguments):
    """trained() on all ranks, with tensors."""
    return [([None, *map(torch.from_numpy, sent)], list(map(torch.from_numpy, got)), torch.from_numpy(ended))
            for sent, got, [ended] in job(trained, *arguments)]


def read_log(prefix, element):
    """{part: [(what, rank, round)] in order}, and {part: its slice of the elements}."""
    events, lengths = collections.defaultdict(list), {}
    for path in glob.glob(prefix + ".*"):
        with open(path) as file:
            for line in file:
                what, _, _, part, _, length, _, rank, _, number = line.split()
                events[int(part)].append((what, int(rank), int(number)))
                lengths[int(part)] = int(length) // element
    begin, places = 0, {}
    for part in sorted(lengths):
        places[part] = slice(begin, begin + lengths[part])
        begin += lengths[part]
    return dict(events), places


def replayed(results, events, places):
    """The parameters after all additions.  Each answer must have had the bits of its moment."""
    values = results[0][1][0].clone()
    for part, lines in events.items():
        mine = values[places[part]]
        for what, rank, number in lines:
            sent, got, _ = results[rank]
            if what == "add":
                mine += sent[number][places[part]]
            else:
                assert torch.equal(got[number][places[part]], mine), (part, rank, number)
    return values


class _Worker:
    """A rank as a parameter server sees it: the parameters that it has pulled, and its optimizer at the server."""

    def __init__(self, rank, kind, overlap, begun):
        self.rank, self.overlap = rank, overlap
        self.model = model_of(0)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.pulled = [begun.clone()] + [torch.zeros_like(begun) for _ in range(STEPS + 1)]
        self.missing = [0] + [begun.numel()] * (STEPS + 1)
        self.updates = [None]

    def pull(self, number, place, values):
        self.pulled[number][place] = values
        self.missing[number] -= values.numel()

    def update(self, number):
        """The update of its gradient of this round, or None: it has not yet pulled what the gradient is of."""
        while len(self.updates) <= number:
            step = len(self.updates)
            of = max(0, step - 1 - self.overlap)
            if self.missing[of]:
                return None
            # A step that does not wait has only its own last update besides.
            ahead = self.updates[-1] if self.overlap and step > 1 else 0
            torch.nn.utils.vector_to_parameters(self.pulled[of] + ahead, self.model.parameters())
            gradients(self.model, self.rank, step)
            before = flat(self.model)
            self.optimizer.step()
            self.updates.append(flat(self.model) - before)
        return self.updates[number]


def served(kind, overlap, results, events, places):
    """The parameters of a server that gets all ranks' gradients in the order of the log."""
    values = results[0][1][0].clone()
    workers = [_Worker(rank, kind, overlap, values) for rank in range(len(results))]
    queues = {part: collections.deque(lines) for part, lines in events.items()}
    while any(queues.values()):
        before = sum(map(len, queues.values()))
        for part, queue in queues.items():
            while queue:
                what, rank, number = queue[0]
                if what == "get":
                    if number <= STEPS:
                        workers[rank].pull(number, places[part], values[places[part]])
                else:
                    update = workers[rank].update(number)
                    if update is None:
                        break
                    values[places[part]] += update[places[part]]
                queue.popleft()
        assert sum(map(len, queues.values())) < before, "the log has an answer before what it answers"
    return values


@pytest.mark.parametrize("ranks, services", [(2, 0), (3, 1), (4, 2), (5, 3)])
def test_same_as_a_parameter_server(ranks, services, tmp_path):
    job = jobs.Ranks(ranks, services, env={"TALLY_SHARED_LOG": str(tmp_path / "log"), "TALLY_PART_BYTES": "4096"})
    try:
        for kind in OPTIMIZERS:
            for overlap in (False, True):
                results = results_of(job, kind, overlap, torch.float64)
                events, places = read_log(str(tmp_path / "log"), 8)
                assert len(events) > 4 and sum(map(len, events.values())) >= len(events) * ranks * (2 * STEPS + 1)
                ended = replayed(results, events, places)
                assert all(torch.equal(one[2], ended) for one in results)
                close = served(kind, overlap, results, events, places)
                assert (close - ended).abs().max() < 1e-12
                assert (ended - results[0][1][0]).abs().max() > 1e-3
                for path in glob.glob(str(tmp_path / "log.*")):
                    open(path, "w").close()
    finally:
        job.close()


def test_replay_of_float32(tmp_path):
    job = jobs.Ranks(3, 1, env={"TALLY_SHARED_LOG": str(tmp_path / "log"), "TALLY_PART_BYTES": "4096"})
    try:
        results = results_of(job, "Adam", True, torch.float32)
        ended = replayed(results, *read_log(str(tmp_path / "log"), 4))
        assert all(torch.equal(one[2], ended) for one in results)
    finally:
        job.close()
