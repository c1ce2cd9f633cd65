"""Theorem 2 of BytePS: ranks that add differences are the same as a parameter server, under the same order.

Services log the order in which they add and answer (TALLY_SHARED_LOG).  A replay of it in this process must have the same bits.  A
parameter server with one optimizer for each rank, which gets gradients in that order, must agree to 1e-12."""

import collections
import glob
import os
import pickle
import random
import signal
import subprocess
import time

import pytest
import torch

import jobs
import warm

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


def trained(kind, overlap, dtype, staleness=None, every=1, disturb=lambda step: None):
    """What a rank has sent, by round; what it has got, by round; and its parameters at the end."""
    import tally.torch as hvd
    model = model_of(hvd.rank(), dtype)
    optimizer = hvd.AsyncOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), staleness, every, overlap)
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
        disturb(step)
        optimizer.step()
    optimizer.finish()
    return [[one.numpy() for one in list] for list in (sent[1:], got, [flat(model)])]


def tensors(told):
    """trained()'s results of all ranks."""
    return [([None, *map(torch.from_numpy, sent)], list(map(torch.from_numpy, got)), torch.from_numpy(ended))
            for sent, got, [ended] in told]


def results_of(job, *arguments):
    return tensors(job(trained, *arguments))


def read_log(prefix, element):
    """{part: [(what, rank, round)] in order}, and {part: its slice of the elements}.

    Values that a service has taken have come from a version of another one.  What that did later is void."""
    lines, lengths, taken = collections.defaultdict(list), {}, {}
    for path in glob.glob(prefix + ".*"):
        with open(path) as file:
            for line in file:
                _, _, part, _, length, _, epoch, count, what, *more = line.split()
                lengths[int(part)] = int(length) // element
                if what == "take":
                    taken[int(part), int(epoch)] = int(more[1]), int(more[2])
                else:
                    lines[int(part), int(epoch)].append((int(count), (what, int(more[1]), int(more[3]))))
    begin, places, events = 0, {}, {}
    for part in sorted(lengths):
        places[part] = slice(begin, begin + lengths[part])
        begin += lengths[part]
        epoch, most, events[part] = max(of for one, of in {*lines, *taken} if one == part), None, []
        while epoch is not None:
            events[part][:0] = [event for count, event in lines[part, epoch] if most is None or count <= most]
            epoch, most = taken.get((part, epoch), (None, None))
        last = {event: i for i, event in enumerate(events[part])}  # of several answers the last one has come
        events[part] = [event for i, event in enumerate(events[part]) if event[0] == "add" or last[event] == i]
    return events, places


def check(results, events, places, kind, overlap, every=1):
    """Each addition counts once, the answers have the bits of a replay, and a parameter server agrees."""
    last = STEPS // every + 1  # the addition of finish(), of zeros
    additions = sorted((rank, number) for rank in range(len(results)) for number in range(1, last + 1))
    assert not any(sent[last].any() for sent, _, _ in results)
    for lines in events.values():
        assert sorted(event[1:] for event in lines if event[0] == "add") == additions
    ended = replayed(results, events, places)
    assert all(torch.equal(one[2], ended) for one in results)
    assert (served(kind, overlap, every, results, events, places) - ended).abs().max() < 1e-12
    assert (ended - results[0][1][0]).abs().max() > 1e-3


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

    def __init__(self, rank, kind, overlap, every, begun):
        self.rank, self.overlap, self.every = rank, overlap, every
        self.model = model_of(0)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.pulled = [begun.clone()] + [torch.zeros_like(begun) for _ in range(STEPS + 1)]
        self.missing = [0] + [begun.numel()] * (STEPS + 1)
        self.updates = [None]

    def pull(self, number, place, values):
        self.pulled[number][place] = values
        self.missing[number] -= values.numel()

    def update(self, number):
        """The update of its gradients of this round, or None: it has not yet pulled what the first of them is of."""
        while len(self.updates) <= number:
            round = len(self.updates)
            if round * self.every > STEPS:
                self.updates.append(torch.zeros_like(self.pulled[0]))
                break
            of = max(0, round - 1 - self.overlap)
            if self.missing[of]:
                return None
            # A step that does not wait has only its own last update besides.
            ahead = self.updates[-1] if self.overlap and round > 1 else 0
            torch.nn.utils.vector_to_parameters(self.pulled[of] + ahead, self.model.parameters())
            before = flat(self.model)
            for step in range((round - 1) * self.every, round * self.every):
                gradients(self.model, self.rank, step + 1)
                self.optimizer.step()
            self.updates.append(flat(self.model) - before)
        return self.updates[number]


def served(kind, overlap, every, results, events, places):
    """The parameters of a server that gets all ranks' gradients in the order of the log."""
    values = results[0][1][0].clone()
    workers = [_Worker(rank, kind, overlap, every, values) for rank in range(len(results))]
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


@pytest.mark.parametrize("ranks, services", [(2, 0), pytest.param(3, 1, marks=pytest.mark.long), (4, 2),
                                             pytest.param(5, 3, marks=pytest.mark.long)])
def test_same_as_a_parameter_server(ranks, services, tmp_path):
    job = jobs.Ranks(ranks, services, env={"TALLY_SHARED_LOG": str(tmp_path / "log"), "TALLY_PART_BYTES": "4096"})
    try:
        for kind in OPTIMIZERS:
            for overlap in (False, True):
                results = results_of(job, kind, overlap, torch.float64)
                events, places = read_log(str(tmp_path / "log"), 8)
                assert len(events) > 4
                check(results, events, places, kind, overlap)
                for path in glob.glob(str(tmp_path / "log.*")):
                    open(path, "w").close()
    finally:
        job.close()


@pytest.mark.parametrize("overlap, staleness, every", [(False, 1, 2), (True, 1, 1)])
def test_same_with_a_bound_and_several_steps(overlap, staleness, every, tmp_path):
    job = jobs.Ranks(3, 1, env={"TALLY_SHARED_LOG": str(tmp_path / "log"), "TALLY_PART_BYTES": "4096"})
    try:
        results = results_of(job, "Adam", overlap, torch.float64, staleness, every)
        check(results, *read_log(str(tmp_path / "log"), 8), "Adam", overlap, every)
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


def killing(path, kind, overlap, *services):
    """trained(), written into a file.  Rank i kills the i-th tallyd in its third step."""
    import tally.torch as hvd
    hvd.init()

    def disturb(step):
        if step == 3 and hvd.rank() < len(services):
            os.kill(services[hvd.rank()], signal.SIGKILL)

    told = trained(kind, overlap == "True", torch.float64, disturb=disturb)
    with open("%s.%d" % (path, hvd.rank()), "wb") as file:
        pickle.dump(told, file)
    hvd.shutdown()


@pytest.mark.parametrize("kind, overlap, ranks, services", [
    ("momentum", True, 4, 2), pytest.param("AdamW", False, 3, 3, marks=pytest.mark.long)])
def test_same_while_tallyd_die(kind, overlap, ranks, services, tmp_path):
    """`tally run` would end the job with a tallyd."""
    def start(name, arguments, **env):
        env = jobs.environment({"TALLY_COORD": "127.0.0.1:%d" % port, "TALLY_HOST_ID": name, "TALLY_SERVERS": str(services),
                                "TALLY_SHARED_LOG": str(tmp_path / "log"), "TALLY_PART_BYTES": "4096", **env})
        return subprocess.Popen(list(map(str, arguments)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    port = jobs.free_port()
    tallyds = [start("tallyd-%d" % i, [jobs.BUILD / "bin" / "tallyd"]) for i in range(services)]
    program = "import sys, test_async_order as of; of.killing(*sys.argv[1:4], *map(int, sys.argv[4:]))"
    arguments = [*warm.python(), "-c", program, tmp_path / "told", kind, overlap, *[one.pid for one in tallyds]]
    processes = [start("rank-%d" % i, arguments, RANK=str(i), WORLD_SIZE=str(ranks)) for i in range(ranks)]
    try:
        outputs = [one.communicate(timeout=100)[0] for one in processes]
        assert all(one.returncode == 0 for one in processes), outputs
        assert [one.wait(10) for one in tallyds] == [-signal.SIGKILL] * services
        told = [pickle.loads((tmp_path / ("told.%d" % i)).read_bytes()) for i in range(ranks)]
        check(tensors(told), *read_log(str(tmp_path / "log"), 8), kind, overlap)
        assert "take" in "".join(path.read_text() for path in tmp_path.glob("log.*"))
    finally:
        for process in [*tallyds, *processes]:
            process.kill()
            process.communicate()
