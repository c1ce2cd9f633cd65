"""Waits for operations: interrupts, threads, handles that are shared or dropped, and errors."""

import copy
import errno
import itertools
import pickle
import sys
import textwrap
import time
import weakref
from unittest import mock

import jobs
import pytest
from test_ops import fails, hvd


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


def broken_off(function, number, *arguments):
    """Call a function of Python, and raise TimeoutError at the `number`-th place where a signal handler may: as the function
    begins, or behind a call of C.  Returns whether it has so many."""
    def at_call(frame, event, _):
        nonlocal number
        number -= frame.f_code is function.__code__ and event in ("call", "c_return")
        if not number:
            sys.setprofile(None)
            raise TimeoutError

    sys.setprofile(at_call)
    try:
        function(*arguments)
        return False
    except TimeoutError:
        return True
    finally:
        sys.setprofile(None)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def submit(name, then=None):
    """Submit a sum, and drop its handle.  Returns a weak reference to its memory."""
    import numpy
    from tally import _calls, _operations
    x = numpy.ones(4, numpy.float32)
    _operations.push_pull(_calls.Call(name, then=then), x.ctypes.data, x.ctypes.data, 4, 0, (4,), x, x)
    return weakref.ref(x)


def swept():
    """A signal handler's exception breaks the sweep of dropped handles off wherever it can."""
    import tally
    from tally import _operations
    if tally.rank() == 0:
        memory = submit("swept")
        for number in itertools.count(1):
            more = broken_off(_operations._sweep, number)
            assert memory() is not None, "freed in flight, at place %d" % number
            if not more:
                break
        assert number > 2
    tally.barrier()
    if tally.rank() != 0:
        submit("swept")
    else:
        until(lambda: _operations._sweep() or memory() is None)
        assert not _operations._orphans


def test_a_sweep_is_broken_off(two):
    two(swept)


def expected(early):
    """A signal handler's exception breaks Events.expect() off wherever it can on rank 0, and the operation's end is told
    before that is handled.  early: it is told before the call."""
    from tally import _job
    t, events, ended = hvd(), _job.own.events, []

    def at(number):
        def interrupted(address, *arguments):
            nonlocal more
            patched.stop()
            if early:
                until(lambda: address in events._early)
            more = broken_off(type(events).expect, number, events, address, *arguments)
            if not early:
                place, there = (events._calls, False) if address in events._calls else (events._early, True)
                t.barrier()
                until(lambda: (address in place) is there)
            raise KeyboardInterrupt

        more = False
        patched = mock.patch.object(events, "expect", interrupted)
        patched.start()
        fails(KeyboardInterrupt, lambda: submit("expected.%d" % number, ended.append))
        assert not events._calls and not events._early and len(ended) < 2, number
        ended.clear()
        return more

    for number in itertools.count(1):
        if t.rank() == 0:
            more = at(number)
        else:
            if not early:
                t.barrier()
            submit("expected.%d" % number)
        if not t.broadcast_object(t.rank() == 0 and more, 0):
            break
    assert number > 2


@pytest.mark.parametrize("early", (False, True))
def test_an_expectation_is_broken_off(two, early):
    two(expected, early)


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
