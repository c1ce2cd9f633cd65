"""Processes that start: alone, by hand, by launchers, on several machines, and what keeps them from it."""

import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

import jobs
import warm


def test_alone():
    """A process that no launcher has started is a job of one rank."""
    status, output = jobs.python("""
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


def test_library_not_found(tmp_path):
    shutil.copytree(jobs.ROOT / "python" / "tally", tmp_path / "python" / "tally")
    env = {"PYTHONPATH": str(tmp_path / "python"), "TALLY_LIBRARY": ""}
    status, output = jobs.python("import tally", env=env)
    assert status == 1 and "ImportError" in output, output
    for place in (tmp_path / "python" / "tally" / "libtally.so", tmp_path / "lib" / "libtally.so"):
        assert "%s: no such file" % place in output
    status, output = jobs.python("import tally", env={"TALLY_LIBRARY": "/nowhere/libtally.so"})
    assert status == 1 and "/nowhere/libtally.so: no such file" in output, output


def test_settings_and_errors_of_init():
    status, output = jobs.python("""
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
    status, output = jobs.python("""
        import tally
        try:
            tally.init({"TALLY_JOIN_TIMEOUT": 1})
        except tally.Error as error:
            print("good", error)
    """, env={"RANK": "0", "WORLD_SIZE": "2", "TALLY_COORD": "127.0.0.1:%d" % jobs.free_port()})
    assert status == 0 and "good" in output and "1" in output.split("good")[1], output


def test_interrupted_init():
    """Ctrl-C ends the wait for ranks that do not come."""
    status, output = jobs.python("""
        import _thread, threading, tally
        threading.Timer(0.5, _thread.interrupt_main).start()
        try:
            tally.init()
        except KeyboardInterrupt:
            print("good", tally.is_initialized())
    """, env={"RANK": "0", "WORLD_SIZE": "2", "TALLY_COORD": "127.0.0.1:%d" % jobs.free_port()})
    assert status == 0 and "good False" in output, output


@pytest.mark.parametrize("ended", [False, True])
def test_a_join_is_given_up_once(monkeypatch, ended):
    """An interrupt comes while the library joins, or when it just has: the communicator is closed."""
    from tally import _waits
    go_on, given_up, status = threading.Event(), threading.Event(), []

    def interrupted(event):
        if ended:
            go_on.set()
            event.wait()
        raise KeyboardInterrupt

    def joins():
        go_on.wait()
        return 0

    def close(given):
        status.append(given)
        given_up.set()

    monkeypatch.setattr(_waits, "await_event", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _waits.call_aside(joins, abandoned=close)
    go_on.set()
    assert given_up.wait(30) and status == [0]


def test_a_taken_port_names_its_holder():
    status, output = jobs.python("""
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


def test_started_by_hand():
    """torchrun's variables are enough: three ranks on one machine, without tallyd."""
    port = jobs.free_port()
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
