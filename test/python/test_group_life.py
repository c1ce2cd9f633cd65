"""The groups of the backend "tally": beside and after each other, of some ranks, late, left, destroyed and made again."""

import datetime
import pathlib
import re
import subprocess
import textwrap
import threading
import time

import pytest

import jobs
from test_ddp import group
from test_group import said

LATE = " (Timed out|closed|timeout) "  # PyTorch's tests look for this in every backend's errors


def late(path):
    """A rank that does not come: an error after the group's time-out, to who waits and to who holds a future."""
    import tally.torch
    import torch
    import torch.distributed as dist
    told = []
    with group("tally", path):
        for future in (False, True):
            one = dist.new_group(timeout=datetime.timedelta(seconds=1))
            if tally.rank() == 1:
                continue
            work = dist.all_reduce(torch.ones(3), group=one, async_op=True)
            if not future:
                told.append(said(lambda: work.wait(datetime.timedelta(seconds=0.1))))
            told.append(said(work.get_future().wait if future else work.wait))
            assert work.is_completed() and not work.is_success() and work.exception() is not None
            told.append(said(lambda: dist.all_reduce(torch.ones(3), group=one)))
        one = dist.new_group(timeout=datetime.timedelta(seconds=1))
        if tally.rank() != 1:
            work = dist.all_reduce(torch.ones(3), group=one, async_op=True)
            while not work.is_completed():
                time.sleep(0.01)
            told.append(said(work.wait))

        def in_options_of_the_next_call(one):
            options = dist.AllreduceOptions()
            options.timeout = datetime.timedelta(seconds=1)
            work = one.allreduce([torch.ones(3)], options)
            options.timeout = datetime.timedelta(seconds=90)
            return work

        for call in (lambda one: one.allreduce([torch.ones(3)], dist.ReduceOp.SUM, datetime.timedelta(seconds=1)),
                     in_options_of_the_next_call,
                     lambda one: one.allgather([torch.ones(1)] * 3, torch.ones(1), datetime.timedelta(seconds=1)),
                     lambda one: one.barrier(timeout=datetime.timedelta(seconds=1))):
            one = dist.new_group()
            if tally.rank() != 1:
                told.append(said(call(one).wait))
        one = dist.new_group()
        if tally.rank() != 1:
            works = [dist.all_reduce(torch.ones(3), group=one, async_op=True) for _ in range(2)]
            future = works[1].get_future()
            waiting = threading.Thread(target=lambda: told.append(said(works[0].wait)))
            waiting.start()
            time.sleep(0.2)
            one.abort()
            assert all(work.has_ended for work in works)
            waiting.join(60)
            told.append(said(future.wait))
        x = torch.ones(2)
        dist.all_reduce(x)  # the other groups live on
        assert x.tolist() == [3, 3]
    return told


def test_a_group_that_times_out(three, store):
    told = three(late, store)
    assert told[1] == []
    for rank in (0, 2):
        first, *rest = told[rank]
        # Where one is much slower the other's time-out comes first.
        assert ("0.1 s" in first and "time-out" not in first and re.search(LATE, first)) or "has cancelled it" in first
        assert all(re.search(LATE, one) for one in rest[:9])
        assert "Timed out after 1 s" in rest.pop(4)
        for _ in range(4):
            assert "Timed out after 1 s, its own time-out" in rest.pop(4)
        assert all("aborted" in one for one in rest[4:]) and len(rest) == 6
        for waited, again in (rest[:2], rest[2:4]):
            assert "Error" in waited and "Timed out after 1 s" in waited and "time-out" in waited
            assert "can no longer be used" in again


def made_late(path):
    """A rank makes a group when the others have given up."""
    import tally.torch
    import torch.distributed as dist
    told = []
    with group("tally", path):
        store = dist.distributed_c10d._get_default_store()
        long = store.timeout
        for rank in (0, 1):
            if tally.rank() == 2:
                store.get("given up by %d" % rank)
        store.set_timeout(datetime.timedelta(seconds=1))
        told.append(said(dist.new_group))
        store.set_timeout(long)
        if tally.rank() != 2:
            store.set("given up by %d" % tally.rank(), "")
    return told


def test_a_rank_makes_a_group_late(three, store):
    for told in three(made_late, store):
        assert re.search(r"group of ranks \[0, 1, 2\]:%safter 1 s.* a rank is late" % LATE, told[0]), told


def monitored(path):
    """What monitored_barrier() says: of ranks that come, of some that do not, of one that comes late, of a late rank 0."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, told = tally.rank(), {}
    short = datetime.timedelta(seconds=3)
    with group("tally", path):
        one = dist.group.WORLD

        def note(case, *arguments, **named):
            told[case] = said(lambda: one.monitored_barrier(*arguments, **named))

        def after():
            x = torch.ones(3)
            dist.all_reduce(x)  # in step all the same
            assert x.tolist() == [4] * 3

        note("all come")
        note("all come again", datetime.timedelta(seconds=60), True)
        after()
        if rank in (0, 3):
            note("two do not", short)
        after()
        if rank not in (0, 3):
            note("two do not", short)
        after()
        if rank in (0, 3):
            note("both named", short, wait_all_ranks=True)
        after()
        if rank not in (0, 3):
            note("both named", short, wait_all_ranks=True)
        after()
        if rank:
            note("without rank 0", timeout=short)
        after()
        if not rank:
            note("without rank 0", timeout=short)
        after()
        if rank == 2:
            dist.send(torch.full((1,), 7.0), 0)  # is not taken for the barrier's
        note("messages beside it")
        if rank == 0:
            dist.recv(x := torch.zeros(1), 2)
            assert x.item() == 7
        some = dist.new_group([1, 2], timeout=short)
        if rank == 1:
            told["in a group"] = said(lambda: some.monitored_barrier())
        dist.destroy_process_group(some)
        after()
    return told


def test_monitored_barriers(four, store):
    told = four(monitored, store, timeout=200)
    for rank, one in enumerate(told):
        assert one["all come"] == one["all come again"] == one["messages beside it"] == "nothing"
        for case, names in (("two do not", "Rank 1"), ("both named", "Ranks 1, 2")):
            assert "Timed out after 3 s: %s failed to pass monitoredBarrier in 3000 ms" % names in one[case], (rank, case, one)
            assert ("Rank 3 successfully reached monitoredBarrier" in one[case]) == (rank == 3), one[case]
        late = "Timed out after 3 s: %s failed to pass monitoredBarrier in 3000 ms" % ("Rank 0" if rank else "Rank 1")
        assert late in one["without rank 0"], (rank, one)
    assert "Timed out after 3 s: Rank 1 failed to pass monitoredBarrier in 3000 ms" in told[1]["in a group"]


def aborted_meanwhile(path):
    """Rank 1 alone makes a call, of which another of its threads ends the group before it has been submitted."""
    import functools
    import tally.torch
    import torch
    import torch.distributed as dist
    with group("tally", path):
        one, told = dist.new_group(), []
        if tally.rank() == 1:
            inside, go, reduce = threading.Event(), threading.Event(), one._reduce

            def wait(*arguments):
                inside.set()
                go.wait(20)
                reduce(*arguments)
            one._reduce = wait
            call = functools.partial(dist.all_reduce, torch.ones(3), group=one)
            calling = threading.Thread(target=lambda: told.append(said(call)))
            aborting = threading.Thread(target=one.abort)
            calling.start()
            inside.wait(20)
            aborting.start()
            aborting.join(0.5)
            go.set()
            for thread in (calling, aborting):
                thread.join(20)
        dist.all_reduce(torch.ones(1))
    return told


def test_a_group_aborted_while_a_call_begins(three, store):
    assert ["aborted" in one for one in three(aborted_meanwhile, store, timeout=60)[1]] == [True]


def come_after(path):
    """A call that two ranks have given up, and whose memory they have changed, when the third makes it."""
    import tally.torch
    import torch
    import torch.distributed as dist
    with group("tally", path):
        told, one = [], dist.new_group(timeout=datetime.timedelta(seconds=1))
        for _ in range(2):
            x = torch.full((100000,), 1.)
            if tally.rank() == 1 and not told:
                time.sleep(2.5)
            told.append(said(lambda: dist.all_reduce(x, group=one)))
            x.fill_(100)
        dist.all_reduce(x[:10])  # the other groups live on
        assert x[:10].tolist() == [300] * 10
    return told


def test_a_rank_that_comes_after_the_time_out(three, store):
    for rank, (first, second) in enumerate(three(come_after, store)):
        assert "Timed out after 1 s, the group's time-out" in first, first
        assert rank != 1 or "has cancelled it: " in first
        assert "can no longer be used" in second


def given_up(path):
    """Messages from any rank: rank 0 gives up the first, before one comes, which is the second's; the third's never comes."""
    import tally.torch
    import torch
    import torch.distributed as dist
    told, rank = [], tally.rank()
    with group("tally", path):
        one, x = dist.new_group(), torch.zeros(3, 4)
        if rank == 0:
            works = []
            for place, source, limit in ((x[0], None, 1), (x[1], None, 60), (x[2], 2, 3)):
                one.set_timeout(datetime.timedelta(seconds=limit))
                works.append(dist.irecv(place, source, group=one))
            told.append(said(works[0].get_future().wait))
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((4,), 7.), 0, group=one)
        if rank == 0:
            told += [said(work.wait) for work in works[1:]]
            told.append(x.tolist())
        dist.barrier()
    return told


def test_messages_that_are_given_up(three, store):
    first, second, third, received = three(given_up, store, timeout=60)[0]
    assert "Timed out after 1 s" in first and second == "nothing" and "Timed out after 3 s" in third
    assert received == [[0] * 4, [7] * 4, [0] * 4]


def end_in_an_error(path):
    """Who waits at once, and then asks for a future, of a result that cannot be copied to where it belongs."""
    import tally.torch
    import torch
    import torch.distributed as dist
    with group("tally", path):
        time.sleep(0.3 * tally.rank())
        options = dist.AllreduceOptions()
        options.asyncOp = False
        return said(dist.group.WORLD.allreduce([torch.ones(1).expand(3)], options).get_future().wait)


def test_a_call_that_ends_in_an_error(three, store):
    assert ["memory location" in one for one in three(end_in_an_error, store, timeout=30)] == [True] * 3


@pytest.mark.parametrize("description, said_so", [("undefined", "7"), ("", "7"), ("fine", "fine"), ("dp", "dp")])
def test_how_a_group_is_called(description, said_so):
    """By its description, where it has one."""
    from types import SimpleNamespace
    from tally.torch.group.group import Group
    assert Group.__str__(SimpleNamespace(_description=description, _name="7")) == "process group " + said_so


def test_a_timer_whose_thread_could_not_be_started(monkeypatch):
    import tally.torch  # noqa: F401 - it registers the backend
    from tally.torch.group.work import _Deadlines
    expired = threading.Event()

    class Call:
        deadline, has_ended = 0.0, False

        def expire(self):
            self.deadline = None
            expired.set()

    def fail(_):
        raise RuntimeError("can't start new thread")
    deadlines, one, two = _Deadlines(), Call(), Call()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            deadlines.watch(one)
    deadlines.watch(two)
    assert expired.wait(20)


def test_what_ends_soon_is_waited_for():
    """A call that is being taken back says why, not that the time of this wait is over."""
    import errno
    import types
    import tally.torch
    from tally.torch.group.earlier import InFlight
    from tally.torch.group.work import GroupWork

    class Operation:
        left = 3

        def ends(self, timeout=None):
            self.left -= 1
            return self.left <= 0

        def wait(self):
            raise tally.Error("it was taken back", errno.ECANCELED)

        def cancel(self, _):
            pass

    nothing = lambda *_: None
    group = types.SimpleNamespace(limit=60, begun=0, failure=None, enter=nothing, hold=nothing, let_go=nothing, fail=nothing,
                                  call=nothing, in_flight=InFlight())
    work = GroupWork(group, "call", False, [], None)
    with work:
        work.add(lambda *_: Operation())
    work.fail(tally.Error("the group was aborted", errno.ECANCELED))
    with pytest.raises(tally.Error, match="aborted"):
        work.wait(datetime.timedelta(seconds=0.001))


@pytest.mark.parametrize("backend, env, file, expected", [
    ("tally", {}, "", "0"), ("gloo", {}, "", "7200"), ("tally", {}, "TALLY_TIMEOUT = 99", None),
    ("tally", {}, "# \xe0 TALLY_TIMEOUT = 99\nTALLY_JOB = TALLY_TIMEOUT", "0"),
    ("gloo", {"TALLY_TIMEOUT": "99"}, "", None)])
def test_the_jobs_time_out(tmp_path, backend, env, file, expected):
    """A group's own, however long, is what ends its calls; the job's ends what has none, unless somebody has set it."""
    (tmp_path / "settings").write_text(file, encoding="latin-1")
    status, output = jobs.run(1, 0, ["-c", textwrap.dedent("""
        import datetime, sys
        import torch.distributed as dist
        import tally.torch
        from tally.torch.meeting import join_default
        init = tally._job.init

        def look(settings=None):
            print("said:", settings.get("TALLY_TIMEOUT"))
            init(settings)

        tally._job.init = look
        dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1,
                                timeout=datetime.timedelta(hours=2))
        join_default()
        dist.destroy_process_group()
    """), backend], env={"TALLY_CONFIG": str(tmp_path / "settings"), **env})
    assert status == 0 and "said: %s\n" % expected in output, output


def test_a_rank_that_dies(store):
    status, output = jobs.run(3, 0, ["-c", textwrap.dedent("""
        import os, sys, tally.torch, torch, torch.distributed as dist
        dist.init_process_group("tally")
        dist.barrier()
        if dist.get_rank() == 2:
            os._exit(0)
        for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(3)),
                     lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()):
            try:
                call()
                raise SystemExit("not failed")
            except RuntimeError as error:
                assert "rank 2" in str(error), error
        print("good", flush=True)
        os._exit(0)
    """)], machines=3)
    assert status == 0 and output.count("good") == 2, output


def lives(path):
    """Groups beside and after each other."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    for turn in range(2):
        with group("tally", path + str(turn)):
            world = dist.group.WORLD
            assert dist.get_backend() == "tally" and (world.rank(), world.size()) == (rank, 3)
            all_again = dist.new_group()
            beside = dist.new_group(backend="gloo")
            x, y, z = torch.ones(3), torch.ones(3), torch.ones(3)
            works = [dist.all_reduce(one, group=g, async_op=True)
                     for one, g in ([(x, world), (y, all_again)] if rank else [(y, all_again), (x, world)])]
            dist.all_reduce(z, group=beside)
            assert all(work.wait() for work in works) and x.tolist() == y.tolist() == z.tolist() == [3] * 3
            alone = [dist.new_group([one]) for one in range(3)][rank]
            dist.all_reduce(x, group=alone)
            dist.barrier(group=alone)
            pieces = [torch.zeros(3)]
            dist.all_gather(pieces, x, group=alone)
            assert pieces[0].tolist() == [3] * 3
            unused = dist.new_group()
            for one in (all_again, unused):
                dist.destroy_process_group(one)
                assert "destroyed" in said(lambda: one.allreduce([x]))
        assert tally.is_initialized()  # it was before: the group leaves it alone
    return True


def test_groups(three, store):
    assert three(lives, store) == [True] * 3


def subgroups(path):
    """Groups of some ranks, overlapping; results and errors stay among their ranks."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    with group("tally", path):
        lists = [[0, 1], [2, 3], [1, 2, 3], [0, 2], [3]]
        groups = [dist.new_group(ranks) for ranks in lists]
        for _ in range(3):
            works = []
            for ranks, one in list(zip(lists, groups))[::1 if rank % 2 else -1]:
                if rank in ranks:
                    x = torch.full((1000,), float(rank))
                    works.append((x, sum(ranks), dist.all_reduce(x, group=one, async_op=True)))
            y = torch.ones(3)
            dist.all_reduce(y)
            assert y.tolist() == [4] * 3
            assert all(work.wait() for _, _, work in works) and all((x == total).all() for x, total, _ in works)
        three = groups[2]
        if rank:
            x = torch.tensor([rank], dtype=torch.int32)
            pieces = [torch.zeros(1, dtype=torch.int32) for _ in range(3)]
            dist.all_gather(pieces, x, group=three)
            assert torch.cat(pieces).tolist() == [1, 2, 3]
            dist.broadcast(x, 2, group=three)
            assert x.item() == 2
            dist.reduce(x, 3, dist.ReduceOp.AVG, group=three)
            assert x.item() == 2
            whole = torch.arange(6.0) * rank
            mine = torch.zeros(2)
            dist.reduce_scatter_tensor(mine, whole, group=three)
            assert mine.tolist() == [6.0 * 2 * (rank - 1), 6.0 * (2 * (rank - 1) + 1)]
            dist.all_to_all_single(mine_again := torch.zeros(3), torch.arange(3.0) + 10 * rank, group=three)
            assert mine_again.tolist() == [rank - 1 + 10.0 * one for one in (1, 2, 3)]
            told = said(lambda: dist.all_reduce(torch.ones(3 + (rank == 2)), group=three))
            assert "of ranks 1-3: the ranks disagree: float32 [3] sum on ranks 1, 3, [4] on rank 2 (" in told, told
            dist.all_reduce(x, group=three)
            assert x.item() == 6
            objects = [None] * 3
            dist.all_gather_object(objects, "r%d" % rank, group=three)
            assert objects == ["r1", "r2", "r3"]
        local = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
        x = torch.tensor(float(rank))
        dist.all_reduce(x, group=local)
        assert x.item() == rank // 2 * 4 + 1
        dist.destroy_process_group(local)
        again, _ = dist.new_subgroups(2)  # under a name that there was
        dist.all_reduce(x, group=again)
        return x.item()


def test_subgroups(four, store):
    assert four(subgroups, store, timeout=200) == [2, 2, 10, 10]


def names_again(path):
    """After destroy_process_group() torch gives names again, also to other ranks."""
    import tally.torch
    import torch
    import torch.distributed as dist
    for number, ranks in enumerate(([0, 1], [0, 1, 3], [0, 1, 3], [2, 3])):
        with group("tally", "%s%d" % (path, number)):
            some, x = dist.new_group(ranks), torch.ones(3)
            if tally.rank() in ranks:
                dist.all_reduce(x, group=some)
                assert x.tolist() == [len(ranks)] * 3
    return True


def test_names_again(four, store):
    assert four(names_again, store) == [True] * 4


def test_elastic_restart(tmp_path):
    """torchrun starts all ranks anew when one dies, and the group with them."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent("""
        import os, sys, tally.torch, torch, torch.distributed as dist
        dist.init_process_group("tally")
        x = torch.ones(3)
        dist.all_reduce(x)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os._exit(3)
        try:
            dist.barrier()
        except RuntimeError:
            sys.exit(4)
        assert x.tolist() == [2] * 3
        dist.destroy_process_group()
        print("good", flush=True)
    """))
    ran = subprocess.run(jobs.torchrun(script, options=["--max-restarts", "1", "--monitor-interval", "0.2"]),
                         env=jobs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
    assert ran.returncode == 0 and ran.stdout.count("good") == 2, ran.stdout


def test_it_leaves_what_it_has_joined(tmp_path):
    """init after destroy; the group alone joins, and the last one leaves.  A store for each turn: who is early would
    ask that of the last turn, which ends with rank 0's group."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent(f"""
        import os, tally.torch, torch, torch.distributed as dist
        for turn in range(3):
            dist.init_process_group("tally", init_method="file://{tmp_path}/store" + str(turn),
                                    rank=int(os.environ["RANK"]), world_size=2)
            assert tally.is_initialized()
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x.tolist() == [2] * 3
            dist.destroy_process_group()
            assert not tally.is_initialized()
        print("good")
    """)], env={"WHOLE_END": "1"})
    assert status == 0 and output.count("good") == 2, output


def test_first_groups_of_some_ranks():
    """Disjoint pairs have a job each; a group beyond them is refused, also to ranks that are in none; then all join."""
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent("""
        import tally.torch, torch, torch.distributed as dist

        def total(one):
            x = torch.ones(3) * (dist.get_rank() + 1)
            dist.all_reduce(x, group=one)
            return x.tolist()

        def refused(word, ranks=None):
            try:
                dist.new_group(ranks, backend="tally")
            except (NotImplementedError, ValueError) as error:
                assert word in str(error), error
            else:
                raise AssertionError("nothing was said")

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        pairs = [dist.new_group(ranks, backend="tally") for ranks in ([3, 1], [0, 2])]
        mine = pairs[rank % 2 == 0]
        assert tally.size() == 2
        assert total(mine) == [6 if rank % 2 else 4] * 3
        refused("one job")
        alone = [dist.new_group([one], backend="tally") for one in range(4)][rank]
        assert total(alone) == [rank + 1] * 3
        assert total(mine) == [6 if rank % 2 else 4] * 3
        dist.barrier()
        dist.destroy_process_group(alone)
        dist.destroy_process_group(mine)
        assert not tally.is_initialized()

        some = dist.new_group([0, 1], backend="tally")
        refused("one job" if rank < 2 else "rank 0 cannot open the job")
        if rank < 2:
            assert total(some) == [3] * 3
            dist.destroy_process_group(some)
        everybody = dist.new_group(backend="tally")
        assert tally.size() == 4 and total(everybody) == [10] * 3
        dist.destroy_process_group()
        print("good")
    """)])
    assert status == 0 and output.count("good") == 4, output


def test_a_time_out_does_not_hide_who_died(store):
    """Rank 1 is stopped when it has begun a call, which then cannot be taken back: it is named once it is taken for dead."""
    _, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import datetime, os, signal, sys, time, torch
        import torch.distributed as dist, tally.torch
        rank, store = int(os.environ["RANK"]), dist.FileStore(sys.argv[1], 2)
        dist.init_process_group("tally", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=1))
        x = torch.ones(30_000_000)
        dist.all_reduce(x[:1])
        if rank == 1:
            store.set("pid", str(os.getpid()))
            work = dist.all_reduce(x, async_op=True)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            print("said:", error, flush=True)
        os.kill(int(store.get("pid")), signal.SIGKILL)
        os._exit(0)
    """), store], env={"TALLY_DEAD_TIMEOUT": "3", "TALLY_LOCAL": "off"})
    assert "said:" in output and "silent" in output.split("said:")[1].splitlines()[0], output


def interrupted(path):
    """A signal handler raises while rank 0 waits for ranks that are late, once for each kind of exception.  Returns what came
    out, by call, and whether the call goes on and later calls meet."""
    import signal

    import tally
    import tally.torch
    import torch
    import torch.distributed as dist

    class Preempted(Exception):
        pass

    x, parts, out = torch.ones(4), [torch.zeros(4) for _ in range(3)], torch.zeros(2)
    strided = torch.ones(4, 2)[:, 0]
    calls = {
        "all_reduce": (lambda: dist.all_reduce(x.clone()),) * 2,
        "all_reduce, strided": (lambda: dist.all_reduce(strided),) * 2,
        "wait": (lambda: dist.all_reduce(x.clone(), async_op=True).wait(),) * 2,
        "wait, with a time-out": (lambda: dist.all_reduce(x.clone(), async_op=True).wait(datetime.timedelta(seconds=60)),) * 2,
        "barrier": (lambda: dist.barrier(),) * 2,
        "barrier behind a call": (lambda: (dist.all_reduce(x.clone(), async_op=True), dist.barrier()),) * 2,
        "monitored_barrier": (lambda: dist.distributed_c10d._get_default_group().monitored_barrier(), lambda: None),
        "broadcast": (lambda: dist.broadcast(x.clone(), 1),) * 2,
        "all_gather": (lambda: dist.all_gather(parts, x),) * 2,
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(out, torch.ones(6)),) * 2,
        "recv": (lambda: dist.recv(x.clone(), 1), lambda: dist.send(x, 0) if dist.get_rank() == 1 else None),
        "recv from any": (lambda: dist.recv(x.clone()), lambda: dist.send(x, 0) if dist.get_rank() == 1 else None),
    }
    own = str(pathlib.Path(tally.__file__).parent)

    def waits(frame):
        """Whether a frame is inside one of Tally's waits, and not before."""
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(own) and (code.co_name in ("ends", "wait") or "monitored" in code.co_filename):
                return True
            frame = frame.f_back
        return False

    told = {}
    with group("tally", path):
        store = dist.distributed_c10d._get_default_store()
        for name, (waiting, late) in calls.items():
            for kind in (Preempted, TimeoutError, RuntimeError, ValueError, tally.Error):
                key = "%s %s" % (name, kind.__name__)
                if dist.get_rank():
                    store.wait([key])
                    late()
                    continue

                def handler(number, frame, kind=kind):
                    if waits(frame):
                        raise kind("from the handler")
                    signal.setitimer(signal.ITIMER_REAL, 0.05)  # the call is not under way yet

                before = signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                try:
                    waiting()
                    told[key] = "nothing"
                except Exception as error:
                    told[key] = (type(error) is kind, str(error))
                signal.signal(signal.SIGALRM, before)
                store.set(key, "")
        later = torch.ones(2)
        dist.all_reduce(later)
        # The same call can be waited for again.
        if dist.get_rank() == 0:
            work = dist.all_reduce(later, async_op=True)
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            told["again"] = said(work.wait)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            store.set("again", "")
            work.wait()
        else:
            store.wait(["again"])
            dist.all_reduce(later)
        return told, later.tolist()


def test_an_exception_of_a_signal_handler_comes_out_at_once(three, store):
    told, *_ = answers = three(interrupted, store)
    assert [later for _, later in answers] == [[9.0, 9.0]] * 3
    assert told[0].pop("again") == "Error: from the handler"
    assert len(told[0]) == 60
    assert {key: value for key, value in told[0].items() if value != (True, "from the handler")} == {}
