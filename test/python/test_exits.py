"""Processes that end: the others hear why, whatever has ended one, and its exit status stays."""

import re
import subprocess
import textwrap

import pytest

import jobs
import warm


DIES = """
import sys, torch, tally.torch as hvd
hvd.init()
sys.excepthook, ours = (lambda *what: (print("another hook", flush=True), ours(*what))), sys.excepthook
model = torch.nn.Linear(4, 4)
where = sys.argv[1]
step = 0


def gradient_hook(gradient):
    if where == "backward" and hvd.rank() == 1 and step == 3:
        raise ValueError("bad\\ndata")


model.weight.register_hook(gradient_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if where == "hook":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(hvd.state(), hvd.ddp_hook)
elif where == "group":
    torch.distributed.init_process_group("tally")
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(6):
    if where != "backward" and hvd.rank() == 1 and step == 3:
        raise ValueError("bad data")
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("services", [0, 1])
@pytest.mark.parametrize("where", ["step", "backward", "hook", "group"])
def test_an_exception_reaches_the_other_ranks(where, services):
    """Its text and step, at once; the user's own hook runs too."""
    status, output = jobs.run(2, services, ["-c", DIES, where])
    others = [line for line in output.splitlines() if "[rank 0]" in line]
    assert status == 1 and "another hook" in output, output
    assert any("rank 1 left: ValueError: bad data (step 3)" in line for line in others), output


SPAWNS = """
import multiprocessing, sys, tally.torch, torch, torch.distributed as dist, torch.multiprocessing


def train(rank, store):
    dist.init_process_group("tally", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if rank == 1 and step == 3:
            raise ValueError("bad data")
        try:
            model(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            with open(sys.argv[3], "w", encoding="utf-8") as heard:
                heard.write(str(error))
            return
        optimizer.step()


if __name__ == "__main__":
    if sys.argv[1] != "python":
        running = torch.multiprocessing.start_processes(train, (sys.argv[2],), nprocs=2, join=False,
                                                        start_method=sys.argv[1]).processes
    else:
        start = multiprocessing.get_context("spawn").Process
        running = [start(target=train, args=(rank, sys.argv[2])) for rank in range(2)]
        for process in running:
            process.start()
    for process in running:
        process.join()
"""


# Those that are not forked import PyTorch anew.
@pytest.mark.parametrize("way", ["fork", *(pytest.param(way, marks=pytest.mark.long) for way in ("spawn", "python"))])
def test_an_exception_of_a_spawned_process_reaches_the_other_ranks(way, store, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS, encoding="utf-8")
    heard = tmp_path / "heard"  # a file: the processes share one output, in which lines may mix
    done = subprocess.run([*warm.python(), str(script), way, store, str(heard)], env=jobs.environment(),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=120)
    assert heard.exists(), done.stdout
    assert "rank 1 left: ValueError: bad data (step 3)" in heard.read_text(encoding="utf-8"), done.stdout


ENDS = """
import os, sys, threading, time, numpy, tally
from sys import exit as early_exit
way, heard = sys.argv[1:]


def sums(count):
    for _ in range(count):
        tally.push_pull(numpy.ones(4), name="x")


def fails():
    sums(1)
    raise ValueError("bad data")


def stays():
    while not os.path.exists(heard):
        time.sleep(0.01)


tally.init()
if tally.rank() == 0:
    try:
        sums(6)
        print("good")
    except tally.Error as error:
        print("heard", error)
    open(heard, "w").close()
    sys.exit(0)
sums(1)
if way == "thread's hook":
    threading.excepthook = lambda *_: None
other = threading.Thread(target={"thread": fails, "thread's hook": fails, "off": fails, "trains": lambda: sums(5)}.get(way, stays))
other.start()
if way.startswith("thread") or way == "off":
    other.join()
    if way != "off":
        stays()
    sums(4)
elif way == "hook":
    sys.excepthook = lambda *_: None
    raise ValueError("bad data")
elif way == "exit":
    sys.exit("bad data")
elif way == "early exit":
    early_exit("bad data")
elif way == "builtin exit":
    exit("bad data")
elif way == "quit":
    quit(code="bad data")
elif way == "again":
    try:
        sys.exit("bad data")
    except SystemExit:
        raise
elif way in ("exit()", "exit(0)", "exit(3)"):
    other.join = stays
    sums(5)
    eval(way)
elif way == "trains":
    try:
        sys.exit("not meant")
    except SystemExit:
        pass
    sys.exit(0)
"""


EXITS = "exit", "early exit", "builtin exit", "quit", "again"
STAYS = "trains", "off", "exit()", "exit(0)", "exit(3)"


@pytest.mark.parametrize("way", ["hook", "thread", "thread's hook", *EXITS, *STAYS])
def test_how_an_exception_ends_a_process(way, tmp_path):
    """With hooks of the program's own, by sys.exit() with a reason, in another thread, and while another thread keeps the
    process.  A main thread that ends in order, while another one trains, ends nothing, and an exit status is such an end; nor
    does any exception end anything if that is turned off."""
    status, output = jobs.run(2, 0, ["-c", ENDS, way, tmp_path / "heard"], timeout=60,
                              env={"TALLY_ABORT": "0"} if way == "off" else None)
    if way in STAYS:
        assert (status == 0 or way == "exit(3)") and "good" in output and "left" not in output, output
    else:
        kind = "SystemExit" if way in EXITS else "ValueError"
        assert status is not None and re.search(r"heard .*rank 1 left: %s: bad data" % kind, output), output


@pytest.mark.parametrize("ends, status, said", [
    ("exit()", 0, ""), ("sys.exit(0)", 0, ""), ("exit(3)", 3, ""), ("raise SystemExit", 0, ""), ("sys.exit(True)", 1, ""),
    ("sys.exit('bad data')", 1, "bad data\n"), ("raise SystemExit(['a', 1])", 1, "['a', 1]\n"),
    ("raise Own('bad data')", 1, "no data\n"),
])
def test_exit_statuses_stay(ends, status, said):
    """SystemExit is to the program what it is without Tally."""
    assert jobs.python("""
        import copy, pickle, sys, threading, traceback, tally

        class Own(SystemExit):
            code = "no data"

        tally.init()
        try:
            sys.exit("caught")
        except SystemExit as caught:
            assert (caught.code, caught.args, caught.__context__) == ("caught", ("caught",), None)
            assert type(caught).__name__ == "SystemExit"
            assert traceback.format_exception_only(type(caught), caught) == ["SystemExit: caught\\n"]
            for copied in copy.copy(caught), pickle.loads(pickle.dumps(caught)):
                assert (type(copied), copied.code) == (SystemExit, "caught")
            caught.code = 4
            assert caught.code == 4
        for status in None, 3, True:
            try:
                sys.exit(status)
            except SystemExit as caught:
                assert (type(caught), caught.code) == (SystemExit, status)
        for arguments in ("a", "b"), ("a", "b", "c"):
            try:
                sys.exit(*arguments)
            except TypeError:
                pass
        thread = threading.Thread(target=sys.exit, args=("silent",))
        thread.start()
        thread.join()
        %s
    """ % ends, env={"TALLY_LOG": "error"}) == (status, said)


def test_an_exit_of_the_programs_own():
    status, output = jobs.python("""
        import sys, tally

        class Own(SystemExit):
            pass

        def leave(reason):
            raise Own(reason)

        sys.exit = leave
        tally.init()
        try:
            sys.exit("caught")
        except SystemExit as caught:
            print(type(caught).__name__, caught)
    """, env={"TALLY_LOG": "error"})
    assert (status, output) == (0, "Own caught\n")


def test_no_exception_leaves_as_ever():
    """sys.exit() is no exception that nobody catches, and one at a prompt does not end the process."""
    status, output = jobs.run(2, 0, ["-c", """
import sys, numpy, tally
tally.init()
if tally.rank() == 1:
    sys.ps1 = ">>> "
    sys.excepthook(ValueError, ValueError("typed"), None)
    tally.push_pull(numpy.ones(4), name="x")
    sys.exit(0)
tally.push_pull(numpy.ones(4), name="x")
print("good")
"""])
    assert status == 0 and "good" in output and "left:" not in output, output


def test_ending_without_shutdown():
    """The interpreter's end leaves the job; a rank's early end is told to those that wait for it."""
    status, output = jobs.run(3, 1, ["-c", textwrap.dedent("""
        import numpy as np, tally
        tally.init()
        tally.push_pull(np.ones(5), "a")
        if tally.rank() == 2:
            raise SystemExit
        try:
            tally.push_pull(np.ones(5), "c")
        except RuntimeError as error:
            assert "2" in str(error), error
            print("good")
    """)], env={"WHOLE_END": "1"})
    assert status == 0 and output.count("good") == 2, output


def test_a_rank_that_dies(tmp_path):
    """os._exit says no goodbye: the others' operations fail, and name the dead."""
    status, output = jobs.run(3, 1, ["-c", textwrap.dedent("""
        import os, sys, time, numpy as np, tally
        tally.init()
        tally.push_pull(np.ones(5), "a")
        open(os.path.join(sys.argv[1], str(tally.rank())), "w").close()
        if tally.rank() == 1:
            while len(os.listdir(sys.argv[1])) < 3:  # the others may need what is here for that
                time.sleep(0.01)
            os._exit(0)
        for name in ("b", "c"):
            try:
                tally.push_pull(np.ones(5), name)
                raise SystemExit("not failed")
            except tally.Error as error:
                assert "rank 1" in str(error), error
        tally.shutdown()
        print("good")
    """), tmp_path])
    assert status == 0 and output.count("good") == 2, output
