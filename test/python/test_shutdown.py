"""shutdown(): beside calls of other threads, before operations have ended, and init() after it."""

import textwrap

import pytest

import jobs


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
    status, output = jobs.python("""
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
    status, output = jobs.python("""
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


def test_shutdown_beside_a_plan_that_has_not_begun():
    """A signal handler may have broken off its wait(): nobody waits for its end."""
    status, output = jobs.run(1, 0, ["-c", textwrap.dedent("""
        import tally
        from tally import _job, _lib
        tally.init()
        report = _job.own.aside(_lib.lib.tally_comm_report, 1000, None)

        def wait(*arguments):
            raise AssertionError("somebody waits")

        _job.await_event = wait
        tally.shutdown()
        status, sentence = report.wait()
        assert status < 0, status
        print("good", sentence)
    """)])
    assert status == 0 and "good" in output, output


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
