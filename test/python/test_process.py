"""Processes, threads and signals: starting, leaving, forking, waiting, logging."""

import copy
import errno
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import jobs
import warm
from test_ops import fails, hvd


def python(code, *arguments, env=None, timeout=60):
    """Run code in one process without a launcher; returns (exit status, output)."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=jobs.environment(env), timeout=timeout, text=True)
    return done.returncode, done.stdout


# --- starting and leaving --------------------------------------------------------------------------------------


def test_alone():
    """A process that no launcher has started is a job of one rank."""
    status, output = python("""
        import numpy as np, tally, torch, tally.torch as hvd
        for call in (tally.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), tally.barrier, tally.report,
                     lambda: tally.push_pull(np.ones(1))):
            try:
                call()
                raise SystemExit("not refused")
            except ValueError as error:
                assert isinstance(error, RuntimeError) and "init()" in str(error)
        assert not hvd.is_initialized()
        hvd.shutdown()
        hvd.init()
        hvd.init()
        assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (0, 1, True)
        assert hvd.allreduce(torch.arange(5.)).tolist() == [0, 1, 2, 3, 4]
        assert tally.push_pull(np.arange(3), op=tally.Sum).tolist() == [0, 1, 2]
        model = torch.nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        print("good")
    """)
    assert status == 0 and "good" in output, output


def test_a_taken_port_names_its_holder():
    status, output = python("""
        import os, socket
        from tally import _errors, _job
        held = socket.socket()
        held.bind(("127.0.0.1", 0))
        held.listen()
        os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        try:
            _job.listen(held.getsockname()[1])
        except _errors.Error as error:
            assert "held by process %d of " % os.getpid() in str(error) and "job night" in str(error), str(error)
        else:
            raise SystemExit("taken twice")
        port = _job.listen(0)
        other = socket.socket()
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            print("good")
    """, env={"TALLY_JOB": "night"})
    assert status == 0 and "good" in output, output


TORCHRUN = """
import sys, torch, tally.torch as hvd
if sys.argv[1] == "horovod":
    hvd.init()
    result = hvd.allreduce(torch.ones(4) * (hvd.rank() + 1), op=hvd.Sum, name="x")
else:
    torch.distributed.init_process_group("tally")
    result = torch.ones(4) * (torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(result)
assert result.tolist() == [3] * 4
print("good", flush=True)
"""


@pytest.mark.parametrize("way", ["horovod", pytest.param("group", marks=pytest.mark.long)])
def test_two_jobs_at_once(way, tmp_path):
    """Begun at the same moment on one machine, by a launcher that gives no port for Tally."""
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    command = jobs.torchrun(script, way)
    running = [subprocess.Popen(command, env=jobs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                start_new_session=True) for _ in range(2)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            jobs.end(process)
    assert [output.count("good") for output in outputs] == [2, 2], "\n---\n".join(outputs)


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
    assert python("""
        import copy, pickle, sys, threading, traceback, tally

        class Own(SystemExit):
            code = "no data"

        tally.init()
        try:
            sys.exit("caught")
        except SystemExit as caught:
            assert (caught.code, caught.args, caught.__context__) == ("caught", ("caught",), None)
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


def test_a_thread_joins_when_the_main_one_has_ended():
    status, output = jobs.run(2, 0, ["-c", """
import threading, numpy, tally


def works():
    threading.main_thread().join()
    tally.init()
    print("sum", tally.push_pull(numpy.ones(1), name="x", op=tally.Sum))


threading.Thread(target=works).start()
"""], timeout=60)
    assert status == 0 and output.count("sum [2.]") == 2, output


@pytest.mark.parametrize("way", ["abort", "report", "plan"])
def test_no_communicator_is_closed_while_it_is_used(way):
    """An exception of one thread tells the others why, or it waits for an answer, while another thread leaves the job."""
    status, output = jobs.run(1, 0, ["-c", """
import sys, threading, tally
from tally import _calls, _job, _lib

name, call = {"abort": ("tally_comm_abort", lambda: _job._abort("bad data")), "report": ("tally_comm_report", tally.report),
              "plan": ("tally_plan", lambda: _job.plan(["x"], [4], _calls.USER))}[sys.argv[1]]
begun, go_on, order = threading.Event(), threading.Event(), []
close, use = _lib.blocking.tally_comm_close, getattr(_lib.blocking, name)


def uses(comm, *arguments):
    begun.set()
    order.append(go_on.wait(0.5))
    status = use(comm, *arguments)
    order.append(status)
    return status


def closes(comm):
    go_on.set()
    order.append("closed")
    return close(comm)


tally.init()
setattr(_lib.blocking, name, uses)
_lib.blocking.tally_comm_close = closes
one = threading.Thread(target=call)
one.start()
begun.wait()
tally.shutdown()
one.join()
print(order)
""", way], timeout=60)
    assert status == 0 and "[False, 0, 'closed']" in output, output


def test_a_call_beside_shutdown():
    """Another thread has left the job when a call is about to enter the library."""
    status, output = python("""
        import threading, numpy as np, tally
        from tally import _calls, _operations

        class Call(_calls.Call):
            @property
            def note(self):
                other = threading.Thread(target=tally.shutdown)
                other.start()
                other.join()

            @note.setter
            def note(self, value):
                pass

        x = np.ones(4, np.float32)
        at, one = x.ctypes.data, [4]
        calls = {
            "push_pull": (at, at, 4, 0, (4,)), "broadcast": (at, 4, 0, 0, (4,)), "allgather": (at, 4, 0, (4,)),
            "allgather_into": (at, at, 4, 0, (4,)), "reduce_scatter": (at, at, one, 0), "alltoall": (at, one, at, one, 0),
            "reduce": (at, at, 4, 0, 0), "gather": (at, 4, at, one, 0, 0), "scatter": (at, one, at, 4, 0, 0),
            "send": (at, 4, 0, 0, 1), "recv": (at, 4, 0, 0, 1), "probe": (1,), "barrier_async": (),
        }
        for name, arguments in calls.items():
            tally.init()
            try:
                getattr(_operations, name)(Call(), *arguments)
            except tally.NotInitializedError as error:
                assert "call init() first" in str(error)
            else:
                raise SystemExit(name)
        print("good")
    """)
    assert status == 0 and "good" in output, output


def test_threads_beside_shutdown():
    """Threads go on with their calls while the job is left, in several rounds."""
    status, output = python("""
        import sys, threading, time, numpy as np, tally
        from tally import _job, _memory
        sys.setswitchinterval(1e-5)

        def calls(number):
            x, count = np.ones(4, np.float32), 0
            while not done:
                try:
                    one = tally.push_pull_async(x, "x %d" % number)
                    if number:
                        _memory.alloc(8), tally.report(), _job.make_group("all", [0])
                        one.cancel("no reason")
                    one.wait()
                except tally.NotInitializedError:
                    pass
                except (tally.Error, MemoryError, ValueError):  # closed, cancelled, asked by another thread
                    pass
                count += 1
            counts.append(count)

        counts, done = [], False
        threads = [threading.Thread(target=calls, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            tally.init()
            time.sleep(0.01)
            tally.shutdown()
        done = True
        for thread in threads:
            thread.join()
        assert len(counts) == 3, counts
        print("good")
    """)
    assert status == 0 and "good" in output and "Traceback" not in output, output


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


def test_init_after_shutdown():
    """Three jobs one after the other in the same processes; an optimizer lives through them."""
    status, output = jobs.run(2, 1, ["-c", textwrap.dedent("""
        import torch, tally.torch as hvd
        hvd.init()
        model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
        for turn in range(3):
            hvd.init()
            assert hvd.size() == 2
            assert hvd.allreduce(torch.ones(5), op=hvd.Sum).eq(2).all()
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            last = hvd.allreduce_async(torch.ones(5), op=hvd.Sum)
            hvd.shutdown()
            assert hvd.poll(last) and not hvd.is_initialized()
        assert model.weight.tolist() == [[-6, -6, -6]]
        print("good")
    """)])
    assert status == 0 and output.count("good") == 2, output


def test_started_by_hand():
    """torchrun's variables are enough: three ranks on one machine, without tallyd."""
    port = free_port()
    code = textwrap.dedent("""
        import reference, tally
        tally.init()
        for dtype in ("float32", "int32"):
            inputs = [reference.make(dtype, 10001, rank, 1, special=True) for rank in range(3)]
            result = tally.push_pull(inputs[tally.rank()].copy(), op=tally.Sum)
            assert reference.same(result, reference.reduce(dtype, "Sum", inputs)) == 0
        print(tally.rank(), tally.size(), tally.local_rank(), tally.local_size(), tally.machine_count(),
              tally.service_count())
    """)
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=jobs.environment({"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank),
                                                    "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                                                    "MASTER_PORT": "1", "TALLY_PORT": str(port)}))
             for rank in range(3)]
    try:
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            assert [int(word) for word in output.split()] == [rank, 3, rank, 3, 1, 1]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


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


def test_settings_and_errors_of_init():
    status, output = python("""
        import tally
        for settings in ({"TALLY_PART_BYTE": "1M"}, {"TALLY_PART_BYTES": "1"}):
            try:
                tally.init(settings)
                raise SystemExit("not refused")
            except tally.Error as error:
                assert "TALLY_PART_BYTE" in str(error), error
        tally.init({"TALLY_PART_BYTES": "64K"})
        print("good")
    """)
    assert status == 0 and "good" in output, output
    status, output = python("""
        import tally
        try:
            tally.init({"TALLY_JOIN_TIMEOUT": 1})
        except tally.Error as error:
            print("good", error)
    """, env={"RANK": "0", "WORLD_SIZE": "2", "TALLY_COORD": "127.0.0.1:%d" % free_port()})
    assert status == 0 and "good" in output and "1" in output.split("good")[1], output


def test_interrupted_init():
    """Ctrl-C ends the wait for ranks that do not come."""
    status, output = python("""
        import _thread, threading, tally
        threading.Timer(0.5, _thread.interrupt_main).start()
        try:
            tally.init()
        except KeyboardInterrupt:
            print("good", tally.is_initialized())
    """, env={"RANK": "0", "WORLD_SIZE": "2", "TALLY_COORD": "127.0.0.1:%d" % free_port()})
    assert status == 0 and "good False" in output, output


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_library_not_found(tmp_path):
    shutil.copytree(jobs.ROOT / "python" / "tally", tmp_path / "python" / "tally")
    env = {"PYTHONPATH": str(tmp_path / "python"), "TALLY_LIBRARY": ""}
    status, output = python("import tally", env=env)
    assert status == 1 and "ImportError" in output, output
    for place in (tmp_path / "python" / "tally" / "libtally.so", tmp_path / "lib" / "libtally.so"):
        assert "%s: no such file" % place in output
    status, output = python("import tally", env={"TALLY_LIBRARY": "/nowhere/libtally.so"})
    assert status == 1 and "/nowhere/libtally.so: no such file" in output, output


# --- layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, machines", ((6, [3, 3]), (5, [3, 2]), (4, [4])), ids=("3+3", "3+2", "4"))
def test_several_ranks_a_machine(ranks, machines):
    """A machine's ranks are added first, where they are no node of the tree over ranks too."""
    status, output = jobs.run(ranks, 0, ["-c", textwrap.dedent("""
        import sys, numpy as np, reference, tally
        machines = eval(sys.argv[1])
        tally.init()
        assert (tally.machine_count(), tally.local_size()) == (len(machines), machines[tally.machine()])
        for dtype in ("float32", "float64", "float16", "int32"):
            for op in (tally.Sum, tally.Average, tally.Max, tally.Product):
                inputs = [reference.make(dtype, 4099, rank, 9, special=True) for rank in range(tally.size())]
                result = tally.push_pull(inputs[tally.rank()].copy(), op=op)
                wanted = reference.reduce(dtype, op.name, inputs, machines=machines)
                assert reference.same(result, wanted) == 0, (dtype, op)
        print("good")
    """), str(machines)], machines=len(machines))
    assert status == 0 and output.count("good") == ranks, output


# --- forks -----------------------------------------------------------------------------------------------------


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


# --- waiting ---------------------------------------------------------------------------------------------------


def interrupt():
    """Ctrl-C gets through a wait; the operation goes on."""
    import _thread
    import threading
    import torch
    t = hvd()
    if t.rank() == 0:
        handle = t.allreduce_async(torch.ones(10), name="late", op=t.Sum)
        assert not t.poll(handle)
        threading.Timer(0.2, _thread.interrupt_main).start()
        fails(KeyboardInterrupt, lambda: t.synchronize(handle))
        fails(TimeoutError, lambda: handle.wait(0.01))
    t.barrier()
    if t.rank() != 0:
        handle = t.allreduce_async(torch.ones(10), name="late", op=t.Sum)
    assert t.synchronize(handle).eq(t.size()).all()


def test_interrupt_and_time_out(four):
    four(interrupt)


def threads():
    """While one thread waits others run: else the operation that it waits for would never be submitted."""
    import threading
    import torch
    t = hvd()
    results = {}

    def work(i):
        results[i] = t.allreduce(torch.full((5000,), float(i)), name="thread.%d" % i, op=t.Sum)

    if t.rank() == 0:
        workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        handle = t.allreduce_async(torch.ones(10), name="after all threads", op=t.Sum)
        for worker in workers:
            worker.start()
        t.synchronize(handle)
        for worker in workers:
            worker.join()
    else:
        for i in reversed(range(8)):
            work(i)
        t.allreduce(torch.ones(10), name="after all threads", op=t.Sum)
    assert all(results[i].eq(i * t.size()).all() for i in range(8))


def test_threads(four):
    four(threads)


def shared_handle():
    """Several threads wait for one handle."""
    import threading
    import torch
    t = hvd()
    base = torch.ones(100, 100)
    handle = t.allreduce_async_(base.t(), name="shared handle", op=t.Sum)
    got = []
    workers = [threading.Thread(target=lambda: got.append(t.synchronize(handle))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == 4 and all(g is got[0] for g in got) and base.eq(t.size()).all()


def test_one_handle_in_several_threads(four):
    four(shared_handle)


def dropped():
    """A handle and a tensor that nobody holds any more stay until the operation has ended."""
    import gc
    import torch
    t = hvd()
    if t.rank() == 0:
        for i in range(4):
            x = torch.full((200_000,), float(i))
            t.allreduce_async(x if i % 2 else x.reshape(400, 500).t(), name="dropped.%d" % i, op=t.Sum)
            t.allreduce_async_(x + 1, name="dropped in place.%d" % i, op=t.Sum)
            del x
        gc.collect()
        junk = [torch.full((200_000,), -1e9) for _ in range(16)]
    t.barrier()
    if t.rank() != 0:
        for i in range(4):
            x = torch.full((200_000,), float(i))
            x = x if i % 2 else x.reshape(400, 500).t()
            assert t.allreduce(x, name="dropped.%d" % i, op=t.Sum).eq(i * t.size()).all()
            x = torch.full((200_000,), i + 1.0)
            assert t.allreduce(x, name="dropped in place.%d" % i, op=t.Sum).eq((i + 1) * t.size()).all()
    t.barrier()
    if t.rank() == 0:
        assert all(j.eq(-1e9).all() for j in junk)
        t.allreduce(torch.ones(1), name="sweeps")
        from tally import _operations
        assert not _operations._orphans
    else:
        t.allreduce(torch.ones(1), name="sweeps")


def test_dropped_handles(four):
    four(dropped)


# --- the log ---------------------------------------------------------------------------------------------------


def test_log_lines_go_to_logging():
    """A late rank is named in a warning of the logger `tally`."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import logging, threading, numpy as np, tally
        warned = threading.Event()
        class Handler(logging.Handler):
            def emit(self, record):
                if record.levelno == logging.WARNING and "slow.weight" in record.getMessage():
                    warned.set()
        logging.getLogger("tally").addHandler(Handler())
        tally.init()
        if tally.rank() == 0:
            operation = tally.push_pull_async(np.ones(3), "slow.weight", tally.Sum)
            assert warned.wait(30), "no warning"
        tally.push_pull(np.ones(1), "go")
        if tally.rank() == 1:
            operation = tally.push_pull_async(np.ones(3), "slow.weight", tally.Sum)
        assert (operation.wait() == 2).all()
        print("good")
    """)], env={"TALLY_LATE_WARNING": "0.3"})
    assert status == 0 and output.count("good") == 2, output


def test_log_lines_without_logging():
    """A program that has set up no logging gets the same lines as from C, notices too: level, rank, what."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import time, numpy as np, tally
        tally.init()
        if tally.rank() == 1:
            time.sleep(1)
        tally.push_pull(np.ones(3), "slow.weight", tally.Sum)
        tally.shutdown()
    """)], env={"TALLY_LATE_WARNING": "0.3"})
    assert status == 0, output
    assert "tally warning rank 0 comm: 'slow.weight' has waited 0 s for rank 1" in output, output
    assert re.search(r"tally info rank 0 comm: the job is done after [0-9.]+ s on 2 ranks: 1 operation, 24 B", output), output


def test_a_failed_job_ends_so():
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import numpy as np, tally
        tally.init()
        tally.push_pull(np.ones(3), "w", tally.Sum)
        operation = tally.push_pull_async(np.ones(3), "only on rank %d" % tally.rank(), tally.Sum)
        try:
            operation.wait()
        except tally.Error as error:
            print("%s.%s" % (type(error).__module__, type(error).__qualname__))
        tally.shutdown()
    """)], env={"TALLY_TIMEOUT": "1"})
    assert output.count("tally.Error\n") == 2 and "rank 0 comm: the job has failed after" in output, output
    assert "is done" not in output, output


# --- scripts ---------------------------------------------------------------------------------------------------


def test_horovod_style_script(tmp_path):
    """The example, with forked loaders, reaches the parameters that one process reaches."""
    import torch
    script = jobs.ROOT / "examples" / "horovod_style.py"
    options = ["--epochs", "1"]
    status, output = jobs.run(4, 2, [script, *options, "--save", tmp_path / "four"], timeout=120)
    assert status == 0, output
    subprocess.run([*warm.python(), str(script), *options, "--single", "4", "--save", str(tmp_path / "one")],
                   check=True, env=jobs.environment(), timeout=120, stdout=subprocess.DEVNULL)
    four, one = torch.load(tmp_path / "four"), torch.load(tmp_path / "one")
    assert four.keys() == one.keys()
    for name in one:  # the order of additions differs
        torch.testing.assert_close(four[name], one[name], rtol=1e-3, atol=1e-4)


def test_shutdown_with_calls_to_come():
    """What is to follow an operation follows it, also one that ends only when the job is left."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import threading, numpy as np, tally
        from tally import _calls, _operations
        tally.init()
        x, y, seen = np.ones(3, np.float32), np.ones(3, np.float32), []

        def submit(array, name):
            call, address = _calls.Call(name, then=seen.append), array.ctypes.data
            return _operations.push_pull(call, address, address, 3, 0, (3,), array)

        met = submit(x, "met")
        met.wait()
        # Calls that wait for each other's operations, deeper than there were threads.
        left = threading.Barrier(4)
        for number in range(4):
            submit(np.ones(3, np.float32), "deep %d" % number)
        deep = [_operations.push_pull(_calls.Call("wait %d" % number, then=lambda _: left.wait(30)), x.ctypes.data, x.ctypes.data,
                                0, 0, (0,), x) for number in range(4)]
        if tally.rank() == 0:
            alone = submit(y, "alone")
        else:
            submit(np.ones(3, np.float32), "only here")
        tally.shutdown()
        assert not left.broken and len(seen) == 6, seen
        for one in seen:
            try:
                one.wait()
            except tally.Error as error:
                assert one not in (met, *deep)
                continue
        print("good")
    """)])
    assert status == 0 and output.count("good") == 2, output


def test_an_error_travels_between_processes():
    """As a pool's workers hand theirs back."""
    import tally
    for error in (tally.Error("rank 3 is gone", errno.EPIPE), tally.Error("why")):
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(other), str(other), other.errno) == (tally.Error, str(error), error.errno)


def test_operations_in_a_compiled_function():
    """The values of the plain one, and nothing said of objects that torch.compile has made on the way."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import torch, tally.torch as hvd
        hvd.init()

        def scale(x):
            total = hvd.allreduce(x * 2, op=hvd.Sum)
            return hvd.broadcast(hvd.allgather(total + hvd.rank()), 1).sum()

        compiled, x = torch.compile(scale, backend="aot_eager"), torch.ones(3)
        for step in range(3):
            assert compiled(x + step).item() == scale(x + step).item()
    """)], env={"WHOLE_END": "1"})
    assert status == 0 and "Exception ignored" not in output, output


def test_an_exception_behind_a_submission_leaves_nothing_expected():
    """A signal's handler raises when the library has the operation: its end is not taken for a later operation's."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import threading, time
        import numpy, tally
        from tally import _array, _calls, _job, _operations
        from tally._lib import lib

        def submit(name, then, **more):
            _operations.push_pull(_calls.Call(name=name, then=then), x.ctypes.data, x.ctypes.data, 4, _array._dtype_code("float32"),
                            (4,), x, x, **more)

        def interrupted(*arguments):
            assert lib.tally_push_pull(*arguments) == 0
            raise KeyboardInterrupt

        tally.init()
        x = numpy.ones(4, numpy.float32)
        ended = {name: threading.Event() for name in "xy"}
        if tally.rank() == 0:
            try:
                submit("x", lambda _: None, _function=interrupted)
            except KeyboardInterrupt:
                pass
        else:
            time.sleep(1)  # for which rank 0's is under way
            submit("x", lambda _: ended["x"].set())
        submit("y", lambda _: ended["y"].set())
        assert ended["y"].wait(30)
        assert not _job.own.events._early
        assert tally.rank() == 0 or ended["x"].wait(30)
        tally.shutdown()
        print("good")
    """)])
    assert status == 0 and output.count("good") == 2, output
