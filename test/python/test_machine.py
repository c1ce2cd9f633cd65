"""Ranks of one machine: one of them killed while children of it live on, and what they cost while nothing goes on."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import jobs
import warm
from test_ops import hvd

RANKS = 3
NOTICED_S = 5  # promised is one; the rest is for machines on which everything is slow

TRAIN = textwrap.dedent("""
    import os, sys, time, torch
    import tally.torch as hvd

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1 << 20
        def __getitem__(self, index):
            if index >= 8000:
                time.sleep(3600)  # at its work, it would not even notice that its parent is gone
            return torch.full((64,), float(index))

    victim, moment = int(sys.argv[1]), sys.argv[2]
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters())
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=4, multiprocessing_context="fork",
                                               prefetch_factor=2))
    workers = [worker.pid for worker in batches._workers]
    last = time.monotonic()
    try:
        for step in range(10**6):
            loss = model(next(batches) if step < 20 else torch.ones(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == 10:
                print("workers", *workers, flush=True)
            if step >= 10 and hvd.rank() == victim and moment == "between":
                time.sleep(3600)  # until it is killed; the others wait inside of the step
            last = time.monotonic()
            optimizer.step()
    except hvd.Error as error:
        print("error", "%.3f" % (time.monotonic() - last), error, flush=True)
        hvd.shutdown()  # rank 0 stays until all have heard
        os._exit(0)
""")


def is_alive(pid):
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def until(stream, word):
    """The first line that begins with `word`, without it."""
    lines = []
    for line in stream:
        if line.startswith(word + " "):
            return line[len(word) + 1:].strip()
        lines.append(line)
    raise AssertionError("no line '%s …':\n%s" % (word, "".join(lines)))


@pytest.mark.parametrize("victim, moment", [
    (2, "anywhere"),
    *(pytest.param(*more, marks=pytest.mark.long) for more in ((2, "between"), (0, "between"), (0, "anywhere"))),
])
def test_killed_with_data_loader_workers(tmp_path, victim, moment):
    """kill -9 of a rank whose four DataLoader workers live on: the others hear of it at once, while these live, and its
    ports, also the coordinator's, are free."""
    port, *own = (jobs.free_port() for _ in range(1 + RANKS))
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")

    def start(rank):
        return subprocess.Popen([*warm.python(), str(script), str(victim), moment], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True,
                                env=jobs.environment({"RANK": str(rank), "WORLD_SIZE": str(RANKS),
                                                      "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
                                                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
                                                      "TALLY_PORT": str(port),
                                                      "TALLY_PORTS": f"{own[rank]}-{own[rank]}"}))

    ranks = [start(rank) for rank in range(RANKS)]
    try:
        orphans = [int(pid) for pid in until(ranks[victim].stdout, "workers").split()]
        for rank in set(range(RANKS)) - {victim}:
            until(ranks[rank].stdout, "workers")
        killed = time.monotonic()
        ranks[victim].kill()
        ranks[victim].wait()
        for rank in set(range(RANKS)) - {victim}:
            said = until(ranks[rank].stdout, "error")
            assert time.monotonic() - killed < NOTICED_S, "not by the end of its connections"
            assert "rank %d" % victim in said
            assert ranks[rank].wait(60) == 0
        assert len(orphans) == 4 and all(is_alive(pid) for pid in orphans)
        for free in (port, own[victim]):
            with socket.socket() as listener:  # they have it no more
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", free))
                listener.listen()
    finally:
        for process in ranks:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            process.stdout.close()


def idle():
    """(changes of threads a second, share of a core) of this process between two steps."""
    import resource
    import time
    t = hvd()
    import torch
    for size in (1, 1 << 20):
        t.allreduce(torch.ones(size), name="idle %d" % size)
    t.barrier()
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(2)
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - begin
    t.barrier()
    return ((after.ru_nvcsw - before.ru_nvcsw) / seconds,
            (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds)


def test_idle_ranks_use_no_processor(machine):
    """Threads that look again and again would change thousands of times a second, or keep a core; those that sleep
    have their ticks, five a second and loop."""
    for changes, share in machine(idle):
        assert changes < 100 and share < 0.05


def memory_group():
    """A folder in which this process may make groups with memory limits, the limit's file in them; or None."""
    for line in open("/proc/self/cgroup", encoding="ascii"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers == "memory":
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif not controllers:
            root, name = "/sys/fs/cgroup", "memory.max"
        else:
            continue
        folder = root + path if os.path.isdir(root + path) else root
        try:
            group = os.path.join(folder, "tally-test-%d" % os.getpid())
            os.mkdir(group)
        except OSError:
            continue
        if os.path.exists(os.path.join(group, name)) and os.access(os.path.join(group, name), os.W_OK):
            return group, name
        os.rmdir(group)
    return None


@pytest.fixture
def limited_group():
    """A control group with a limit of 1 GB."""
    found = memory_group()
    if found is None:
        pytest.skip("no control group with a limit of memory can be made here")
    group, name = found
    with open(os.path.join(group, name), "w", encoding="ascii") as limit:
        limit.write(str(1 << 30))
    yield group
    os.rmdir(group)


def start_in(group, code):
    """A job of one rank in the control group, that goes on with `code`."""
    begin = """
        import os, sys, time, tally, tally.torch as hvd
        with open(sys.argv[1] + "/cgroup.procs", "w") as procs:
            procs.write("0")
        hvd.init()
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(code), group],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=jobs.environment({"RANK": "0", "WORLD_SIZE": "1", "TALLY_PORT": str(jobs.free_port())}))


def test_limit_of_a_cgroup(limited_group):
    """More than the group's limit leaves is refused with a sentence that names it, and nobody is killed."""
    process = start_in(limited_group, """
        kept = hvd.alloc(32 << 20)
        try:
            hvd.alloc(1 << 30)
            print("not refused")
        except MemoryError as error:
            print("refused:", error)
        kept += 1
        assert tally.push_pull(kept.numpy()[:10], "a")[0] == 1
        print("good")
    """)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "good" in said, said
    assert "refused: no 4096 MB of memory: the cgroup's limit leaves" in said, said


def test_limit_of_a_cgroup_little_by_little(limited_group):
    process = start_in(limited_group, """
        kept = []
        try:
            for _ in range(1100):
                kept.append(hvd.alloc(250000))
        except MemoryError as error:
            print("refused:", error)
    """)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, (process.returncode, said)
    assert "refused: no 1 MB of memory: the cgroup's limit leaves" in said, said


def test_limit_of_a_cgroup_at_once(limited_group, tmp_path):
    """Each of some processes asks for more than half of what is left, at the same moment."""
    processes = [start_in(limited_group, """
        folder, patience = %r, time.monotonic() + 60
        def meet(so_many):
            while len(os.listdir(folder)) < so_many:
                assert time.monotonic() < patience, "somebody is missing"
                time.sleep(0.001)
        open(os.path.join(folder, str(os.getpid())), "w").close()
        meet(3)
        try:
            kept = hvd.alloc(100 << 20)
            print("not refused")
        except MemoryError as error:
            print("refused:", error)
        open(os.path.join(folder, str(os.getpid()) + "-done"), "w").close()
        meet(6)
    """ % str(tmp_path)) for _ in range(3)]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * 3, said
    assert "refused: no 400 MB of memory: the cgroup's limit leaves" in "".join(said), said
    assert "MB, and 16 MB are kept for others" in "".join(said), said
