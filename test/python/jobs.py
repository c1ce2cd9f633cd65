"""Jobs for the tests: ranks and tallyd on this machine, started by `tally run`, with a time limit.

`Ranks` keeps a job running and calls functions of test modules on all its ranks, so that many tests share one start;
`run` runs a program to its end.  Both take the programs and the package of the build in TEST_BUILD, by default
build/ of the sources.  Their ranks start in the warm Python (warm.py).
"""

import contextlib
import importlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from multiprocessing.connection import Listener, wait

import warm

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
HERE = pathlib.Path(__file__).resolve().parent


def environment(extra=None):
    """This process's, without what a launcher or a user may have set, and with the package in it."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("TALLY_") and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    if "TALLY_LIBRARY" in os.environ:
        env["TALLY_LIBRARY"] = os.environ["TALLY_LIBRARY"]
    env["PYTHONPATH"] = os.pathsep.join([str(BUILD / "python"), str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    env["OMP_NUM_THREADS"] = "1"
    env.update(extra or {})
    return env


def command(ranks, services, arguments, machines=None):
    """The command line that runs `python ARGUMENTS...` on each rank."""
    options = ["-n", str(ranks), "-k", str(services)]
    if machines is not None:
        options += ["--machines", str(machines)]
    return [str(BUILD / "bin" / "tally"), "run", *options, "--", *warm.python(), *map(str, arguments)]


def torchrun(script, *arguments, options=()):
    """The command line that has torchrun start two ranks."""
    return [*warm.python(), "-c", "from torch.distributed.run import main; main()", "--standalone", "--nproc-per-node", "2",
            *options, "--no-python", *warm.python(), str(script), *arguments]


def end(process):
    """End a job and all it has started."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def run(ranks, services, arguments, timeout=240, env=None, machines=None):
    """Run a Python program on each rank.  Returns (exit status, output of all); status None: out of time."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command(ranks, services, arguments, machines), env=environment(env), stdout=output,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
        output.seek(0)
        return status, output.read()


def python(code, *arguments, env=None, timeout=60):
    """Run code in one process without a launcher; returns (exit status, output)."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=environment(env), timeout=timeout, text=True)
    return done.returncode, done.stdout


def free_port():
    """A port that is free at all addresses of both families: the store of torch.distributed listens at each."""
    both = socket.has_dualstack_ipv6()
    with socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both) as probe:
        return probe.getsockname()[1]


class RemoteError(AssertionError):
    """A function failed on some rank."""


class Ranks:
    """A running job.  ranks(function, *arguments) calls a module-level function on each rank and returns the list
    of what it returned, by rank; results travel by pickle.  A job that hung or lost a rank is started anew."""

    def __init__(self, ranks, services, env=None, machines=None):
        self.size, self.services = ranks, services
        self._env, self._machines = env, machines
        self._process = None

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        self._log = open(os.path.join(self._folder.name, "log"), "w+")
        address = os.path.join(self._folder.name, "socket")
        with contextlib.closing(Listener(address, "AF_UNIX", backlog=self.size)) as listener:
            self._process = subprocess.Popen(
                command(self.size, self.services, [HERE / "jobs.py", address], self._machines),
                env=environment(self._env), stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True)
            self._connections, self.pids = [], []
            listener._listener._socket.settimeout(0.5)  # accept() has no time-out of its own
            deadline = time.monotonic() + 60
            while len(self._connections) < self.size:
                try:
                    self._connections.append(listener.accept())
                except OSError:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        break
        if len(self._connections) < self.size:
            self._fail("the ranks did not start")
        ready = self._collect(60, "init()")
        by_rank = sorted(zip(ready, self._connections), key=lambda pair: pair[0])
        self._connections = [connection for _, connection in by_rank]
        self.pids = [pid for (_, pid), _ in by_rank]

    def _fail(self, reason, ask=True):
        for pid in self.pids if ask else ():
            try:
                os.kill(pid, signal.SIGUSR1)  # faulthandler: where each thread is
            except ProcessLookupError:
                pass
        if ask:
            time.sleep(0.5)
        self._log.seek(0)
        text = self._log.read()
        self.close()
        raise RemoteError("%s\n--- output of the job ---\n%s" % (reason, text[-8000:]))

    def _collect(self, timeout, what):
        answers = [None] * len(self._connections)
        places = {connection: index for index, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while places:
            ready = wait(list(places), max(0, deadline - time.monotonic()))
            if not ready:
                told = ["rank %d: %s" % (i, a[1]) for i, a in enumerate(answers) if a is not None and not a[0]]
                silent = "%s: no answer within %g s from ranks %s" % (what, timeout, sorted(places.values()))
                self._fail("\n".join([silent, *told]))
            for connection in ready:
                index = places.pop(connection)
                try:
                    answers[index] = connection.recv()
                except (EOFError, ConnectionError):
                    self._fail("%s: rank %d is gone" % (what, index))
        errors = ["rank %d: %s" % (index, value) for index, (ok, value) in enumerate(answers) if not ok]
        if errors:
            self._fail("\n".join(errors), ask=False)  # the ranks may be out of step
        return [value for _, value in answers]

    def __call__(self, function, *arguments, timeout=60):
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        for connection in self._connections:
            connection.send((function.__module__, function.__qualname__, arguments))
        return self._collect(timeout, function.__name__)

    def log(self):
        """What the job has printed."""
        self._log.flush()
        with open(self._log.name) as log:
            return log.read()

    def close(self):
        if self._process is not None:
            for connection in self._connections:
                connection.close()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                pass
            end(self._process)
            self._process = None
            self._log.close()
            self._folder.cleanup()


def _serve(address):
    """Body of a rank of `Ranks`."""
    import faulthandler
    import traceback
    from multiprocessing.connection import Client

    faulthandler.register(signal.SIGUSR1)
    connection = Client(address, "AF_UNIX")

    def answer(call):
        try:
            value = (True, call())
        except BaseException:
            value = (False, traceback.format_exc())
        connection.send(value)

    def start():
        import tally
        tally.init()
        return tally.rank(), os.getpid()

    answer(start)
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            return
        answer(lambda: getattr(importlib.import_module(module), name)(*arguments))


if __name__ == "__main__":
    _serve(sys.argv[1])
