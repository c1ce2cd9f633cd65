"""DistributedDataParallel over Tally where something goes wrong: ranks that disagree, are late, die, or have another job."""

import importlib
import re
import subprocess
import sys
import textwrap

import pytest

import jobs
import warm
from test_ddp import group, loss, network, wrap


def differ(path):
    """Rank 1 has another hook; then all have the same again."""
    import tally
    with group("gloo", path):
        import tally.torch as t
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(network())
        hooks = {0: t.ddp_hook, 1: t.ddp_hook_fp16}
        model.register_comm_hook(t.state(), hooks.get(tally.rank(), t.ddp_hook))
        try:
            loss(model, 0, tally.rank()).backward()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        again = wrap(network(), "hook")
        loss(again, 0, tally.rank()).backward()
        return said


def test_ranks_that_disagree(three, store):
    for said in three(differ, store):
        assert "disagree" in said and "float16 on rank 1" in said, said
        assert re.search(r"Error: bucket 0 of DDP model \d+( of process group \d+)? \([\w.]+ … [\w.]+\): the ranks disagree: "
                         r"allreduce float32 ", said), said
        assert "At:" not in said and "/tally/" not in said, "no frames of ours"


def share_state(path):
    """One state for two models, given to torch and held by a hook of the user's own."""
    import tally
    import tally.torch as t
    from torch.nn.parallel import DistributedDataParallel
    said = []
    with group("gloo", path):
        state = t.state()
        first, second, third = (DistributedDataParallel(network()) for _ in range(3))
        first.register_comm_hook(state, t.ddp_hook)
        third.register_comm_hook(None, lambda _, bucket: t.ddp_hook(state, bucket))
        for step in (lambda: second.register_comm_hook(state, t.ddp_hook),
                     lambda: loss(third, 0, tally.rank()).backward(),
                     lambda: loss(first, 0, tally.rank()).backward()):
            try:
                step()
                said.append("nothing")
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
    return said


def test_one_state_for_two_models(three, store):
    for second, third, first in three(share_state, store):
        assert "used for another" in second and "used for another" in third and first == "nothing"


def share_state_on_one_rank(mode, path):
    """Rank 1 alone has a hook of its own with the state of another model; then all have the same again."""
    import tally
    import tally.torch as t
    from torch.nn.parallel import DistributedDataParallel
    with group("gloo", path):
        states = [t.state(), t.state()]
        first, second = (DistributedDataParallel(network(mode)) for _ in states)
        first.register_comm_hook(states[0], t.ddp_hook)
        held = states[0 if tally.rank() == 1 else 1]
        second.register_comm_hook(None, lambda _, bucket: t.ddp_hook(held, bucket))
        try:
            loss(second, 0, tally.rank()).backward()
            said = "nothing"
        except (ValueError, RuntimeError) as error:
            said = str(error)
        loss(first, 0, tally.rank()).backward()
        loss(wrap(network(), "hook"), 0, tally.rank()).backward()
    return said


@pytest.mark.parametrize("mode", ["plain", "sparse"])
def test_one_state_for_two_models_on_one_rank(three, store, mode):
    """The others are told."""
    said = three(share_state_on_one_rank, mode, store)
    assert "used for another" in said[1]
    assert all("rank 1 refuses" in said[rank] and "used for another" in said[rank] for rank in (0, 2)), said


def test_a_late_rank_ends_the_bucket(store):
    """Where the backend has joined the job, which then has no time-out, the group's own holds for its hooks."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import datetime, os, sys, time, test_ddp, tally.torch, torch.distributed as dist
        dist.init_process_group("tally", store=dist.FileStore(sys.argv[1], 2), rank=int(os.environ["RANK"]),
                                world_size=2, timeout=datetime.timedelta(seconds=4))
        model = test_ddp.wrap(test_ddp.network(), "hook")
        output = test_ddp.loss(model, 0, dist.get_rank())
        if dist.get_rank() == 0:
            try:
                output.backward()
            except RuntimeError as error:
                print("said:", str(error).splitlines()[0], flush=True)
            os._exit(1)
        time.sleep(60)
    """), store], timeout=50)
    assert "said:" in output and "Timed out after 4 s" in output, output


@pytest.mark.parametrize("rank, word", [(0, "rank 1 did not join within 3 s"),
                                        (1, "joining the job: Timed out after 3 s: rank 0 has not joined: has its model the hook")])
def test_a_hook_on_one_rank(store, rank, word):
    """It waits no longer than the process group, and says for whom."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import datetime, os, sys, time, test_ddp, tally.torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(os.environ["RANK"]), world_size=2,
                                timeout=datetime.timedelta(seconds=3))
        one = str(dist.get_rank()) == sys.argv[2]
        model = test_ddp.wrap(test_ddp.network(), "hook" if one else "gloo")
        output = test_ddp.loss(model, 0, dist.get_rank())
        if not one:
            time.sleep(15)
            os._exit(0)
        try:
            output.backward()
        except RuntimeError as error:
            print("said:", str(error).splitlines()[0], flush=True)
        os._exit(1)
    """), store, rank], timeout=40)
    assert "said:" in output and word in output, output


def test_a_rank_that_is_waited_for_is_named(monkeypatch, caplog):
    """Before it has said where to meet, too."""
    import datetime
    import tally
    import torch.distributed as dist
    join = importlib.import_module("tally.torch.meeting")
    monkeypatch.setattr(join, "_WARN_EVERY_S", 0.3)
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=1))
    with pytest.raises(tally.Error, match=" (Timed out|closed|timeout) after 1 s: rank 3 has not joined"):
        join._place(store, "key", 3, 0)
    assert "rank 0 join: waiting for rank 3" in caplog.text
    store.set("key", "here")
    assert join._place(store, "key", 3, 0) == "here"


def test_a_first_rank_that_has_another_job(monkeypatch):
    """The ranks that wait for its word on where to meet are told."""
    import datetime
    import torch.distributed as dist
    join = importlib.import_module("tally.torch.meeting")
    store, ranks = dist.HashStore(), (0, 1, 2)
    store.set_timeout(datetime.timedelta(seconds=2))
    for rank, here, word in ((0, True, "is rank 0 of 2 for Tally"), (1, False, "rank 0 cannot open the job: .* is rank 0 of 2")):
        for name, value in (("is_initialized", here), ("rank", 0), ("size", 2)):
            monkeypatch.setattr(join._job, name, lambda value=value: value)
        with pytest.raises(ValueError, match=word):
            join.join(store, ranks, rank)


@pytest.mark.parametrize("sparse", ["", "sparse"])
def test_a_rank_that_comes_after_the_time_out(store, sparse):
    """Its bucket fails as that of the other did, who has changed the memory since; the next step is right again."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import datetime, os, sys, time, tally.torch, torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("tally", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2,
                                timeout=datetime.timedelta(seconds=2))
        layer = torch.nn.Embedding(300, 300, sparse=True) if sys.argv[2] else torch.nn.Linear(300, 300, bias=False)
        inputs = torch.arange(300) if sys.argv[2] else torch.ones(1, 300)
        model = torch.nn.parallel.DistributedDataParallel(layer)
        model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)
        for step in range(4):  # in the second DDP has buckets of its own agreed on
            model.zero_grad()
            if rank == 1 and step == 2:
                time.sleep(3)
            try:
                (model(inputs) * (10. ** step * (1 + rank))).sum().backward()
                print("step", step, (layer.weight.grad.to_dense() == 1.5 * 10 ** step).all().item(), flush=True)
            except RuntimeError as error:
                print("step", step, str(error).splitlines()[0], flush=True)
        dist.destroy_process_group()
    """), store, sparse])
    assert status == 0, output
    assert [output.count("step %d True" % step) for step in range(4)] == [2, 2, 0, 2], output
    told = "bucket 0 of DDP model 0 (weight): rank 0 has cancelled it: Timed out after 2 s, the group's time-out"
    assert output.count(told) == 2, output


def test_a_rank_with_a_past(store):
    """Models of a process group that only one rank was in do not count."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import os, sys, test_ddp, tally.torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        if rank == 0:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            test_ddp.wrap(test_ddp.network(), "hook")
            dist.destroy_process_group()
        for turn in range(2):
            dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + str(turn), 2), rank=rank, world_size=2)
            model = test_ddp.wrap(test_ddp.network(), "hook")
            test_ddp.loss(model, 0, rank).backward()
            dist.destroy_process_group()
    """), store], timeout=30)
    assert status == 0, output


def unusable(path):
    """A hook that must refuse tells the others."""
    import tally
    import torch
    import tally.torch as t

    class Bucket:
        def __init__(self, tensor):
            self.tensor = tensor

        def buffer(self):
            return self.tensor

        def index(self):
            return 0

        def parameters(self):
            return []

    with group("gloo", path):
        tensor = torch.ones(4, device="meta" if tally.rank() == 1 else "cpu")
        try:
            t.ddp_hook(t.state(), Bucket(tensor)).wait()
        except NotImplementedError as error:
            return "refused: %s" % error
        except RuntimeError as error:
            return str(error)


def test_a_device_that_is_not_supported(three, store):
    said = three(unusable, store)
    assert "refused" in said[1] and "meta" in said[1]
    assert all("rank 1 refuses" in said[rank] and "meta" in said[rank] for rank in (0, 2))


@pytest.mark.parametrize("name", ["hook", "backend"])
def test_a_rank_that_dies(name, store):
    """The others' step raises and names it."""
    status, output = jobs.run(3, 0, ["-c", textwrap.dedent("""
        import os, sys, time, test_ddp, tally.torch
        tally.init()
        with test_ddp.group(test_ddp.way(sys.argv[1])[0], sys.argv[2]):
            model = test_ddp.wrap(test_ddp.network(), sys.argv[1])
            test_ddp.loss(model, 0, tally.rank()).backward()
            try:
                output = test_ddp.loss(model, 1, tally.rank())  # agrees on buckets: the backend may raise here
                if tally.rank() == 1:
                    os._exit(0)
                output.backward()
            except RuntimeError as error:
                print("said:", str(error).splitlines()[0], flush=True)
            time.sleep(1 if tally.rank() == 0 else 0)  # the coordinator in it is to tell the others
            os._exit(0)
    """), name, store], machines=3)
    assert status == 0 and output.count("said:") == 2, output
    assert all("rank 1" in line for line in output.splitlines() if "said:" in line), output


@pytest.mark.parametrize("name, start", [("backend", "fork"), pytest.param("hook", "spawn", marks=pytest.mark.long),
                                         pytest.param("backend", "spawn", marks=pytest.mark.long(turn=4))])
def test_started_without_a_launcher(tmp_path, name, start):
    """torch.multiprocessing: the ranks are the process group's, and so is the place where they meet."""
    (tmp_path / "spawned.py").write_text(textwrap.dedent("""
        import sys
        import torch
        import torch.multiprocessing as mp

        def body(rank, store):
            import tally.torch, test_ddp
            import torch.distributed as dist
            dist.init_process_group(test_ddp.way(sys.argv[2])[0], init_method="file://" + store, rank=rank,
                                    world_size=2)
            model = test_ddp.wrap(test_ddp.network(), sys.argv[2])
            test_ddp.loss(model, 0, rank).backward()
            assert (tally.rank(), tally.size()) == (rank, 2)
            dist.destroy_process_group()
            print("good", flush=True)

        if __name__ == "__main__":
            mp.start_processes(body, (sys.argv[1],), nprocs=2, start_method=sys.argv[3])
    """))
    done = subprocess.run([*warm.python(), tmp_path / "spawned.py", tmp_path / "store", name, start], env=jobs.environment(),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("good") == 2, done.stdout


def collected(path):
    """Garbage is collected all the time: in an older PyTorch DDP's reducer keeps only what C++ sees of its calls."""
    import gc
    import threading
    import time
    import tally
    rank, done, interval = tally.rank(), threading.Event(), sys.getswitchinterval()

    def collect():
        while not done.is_set():
            gc.collect(0)
            time.sleep(0)

    with group("tally", path):
        model = wrap(network("unused"), "backend", find_unused_parameters=True, bucket_cap_mb=0.004)
        collector = threading.Thread(target=collect)
        collector.start()
        sys.setswitchinterval(1e-6)
        try:
            for step in range(60):
                loss(model, step, rank).backward()
        finally:
            sys.setswitchinterval(interval)
            done.set()
            collector.join()
    return True


def test_garbage_collection(three, store):
    assert three(collected, store) == [True] * 3
