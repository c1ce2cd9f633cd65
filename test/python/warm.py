"""A Python that has imported PyTorch already: programs of the tests start in it by fork.

    [*warm.python(), "script.py", ...]      runs as [sys.executable, "script.py", ...], some seconds sooner

The command is a small client.  It sends its arguments, environment, working directory, affinity and standard streams to
a server, which python() starts once and which ends with the process that called it.  The server forks a keeper for each
client, and the keeper forks the program.  The client passes on the signals that it gets, and ends as the program ends.
If the client dies, so does the program.

A program that ends well leaves its memory to the kernel (perform()).  What the copy could get wrong runs in a new
interpreter: options other than -c, and another value of a variable that is read when a library is loaded (AT_LOAD).  All programs of a server have the same hash seed.
"""

import json
import os
import signal
import socket
import struct
import sys

AT_LOAD = ("ATEN_", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH")
# But read later.
LATER = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR",
         "TORCH_NCCL_ASYNC_ERROR_HANDLING")
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def loaded_with(env):
    return {name: value for name, value in env.items() if name.startswith(AT_LOAD) and not name.startswith(LATER)}


# --- the client ----------------------------------------------------------------------------------------


def run(address, arguments):
    """As the program; in a new interpreter if there must be one."""
    try:
        server = socket.socket(socket.AF_UNIX)
        server.connect(address)
        umask = os.umask(0o022)
        os.umask(umask)
        order = json.dumps({
            "arguments": arguments,
            "env": dict(os.environ),
            "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": umask,
        }).encode()
        if arguments[0].startswith("-") and arguments[0] != "-c":
            raise OSError("an option")
        socket.send_fds(server, [struct.pack("=I", len(order))], [0, 1, 2])
        server.sendall(order)
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: server.send(bytes([number])))
        taken = server.recv(1)
        if taken != b"y":
            raise OSError("the server cannot")
    except OSError:
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *arguments])
    end_as(struct.unpack("=i", server.recv(4, socket.MSG_WAITALL))[0])


def end_as(status):
    """status: of waitpid, as an exit code"""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -status)
    os._exit(status)


# --- the server ----------------------------------------------------------------------------------------


def receive(client):
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    (size,) = struct.unpack("=I", head)
    order = b""
    while len(order) < size:
        more = client.recv(size - len(order))
        if not more:
            raise EOFError
        order += more
    return json.loads(order), streams


def die_with_parent(parent):
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def keep(client, program):
    """Until it has ended, or nobody waits for it any more."""
    import select

    end = os.pidfd_open(program)
    while True:
        ready, _, _ = select.select([client, end], [], [])
        if end in ready:
            break
        numbers = client.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(program, number)
        if not numbers:
            break
    _, status = os.waitpid(program, 0)
    try:
        client.sendall(struct.pack("=i", os.waitstatus_to_exitcode(status)))
    except OSError:
        pass
    os._exit(0)


def reap(*_):
    """Not left to the kernel, which would forget the processor time."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def serve(address):
    """Returns in each program's process, with its order."""
    import gc

    mine = loaded_with(os.environ)
    import numpy
    import pytest  # noqa: F401 (test modules import it, in each rank)
    import torch
    import torch.distributed
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel

    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread, which fork() does not copy"
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    me = os.getpid()
    while True:
        client, _ = listener.accept()
        try:
            order, streams = receive(client)
        except (OSError, EOFError, struct.error):
            client.close()
            continue
        if loaded_with(order["env"]) != mine:
            client.close()
        elif not os.fork():
            break
        client.close()
        for stream in streams:
            os.close(stream)
    listener.close()
    die_with_parent(me)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    me, program = os.getpid(), os.fork()
    if program:
        for stream in streams:
            os.close(stream)
        client.send(b"y")
        keep(client, program)
    die_with_parent(me)
    client.close()
    numpy.random.seed()
    torch.seed()
    return order, streams


def become(order, streams):
    """What a new interpreter would be.  Returns the program's code and the namespace of its __main__."""
    import types

    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["folder"])
    os.umask(order["umask"])
    os.sched_setaffinity(0, order["cores"])
    packages = [path for path in sys.path if path not in ("", os.path.dirname(os.path.abspath(__file__)))]
    os.environ.clear()
    os.environ.update(order["env"])
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    name, *arguments = order["arguments"]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if name == "-c":
        source, folder, file = arguments[0], "", "<string>"
        sys.argv = ["-c", *arguments[1:]]
    else:
        with open(name, "rb") as script:
            source = script.read()
        folder, file = os.path.dirname(os.path.realpath(name)), name
        sys.argv = [name, *arguments]
        main.__file__ = name
    added = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [folder, *dict.fromkeys([*added, *packages])]
    sys.path_importer_cache.clear()
    sys.modules["__main__"] = main
    return compile(source, file, "exec"), main.__dict__


def perform(code, namespace):
    """Run the program.  One that ends well does what Python does at a program's end, but takes no modules apart: for those
    that it shares with the server that takes half a second.  With WHOLE_END in its environment it does."""
    import atexit
    import threading

    status = 0
    try:
        exec(code, namespace)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            raise
    if "WHOLE_END" in os.environ:
        sys.exit(status)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xff)


# --- the test's side -----------------------------------------------------------------------------------

_server = None  # (process, folder)


def python():
    """The command that runs Python programs, without their arguments."""
    import atexit
    import importlib.util
    import subprocess
    import tempfile
    import time

    global _server
    if importlib.util.find_spec("torch") is None:
        return [sys.executable]
    if _server is None:
        folder = tempfile.TemporaryDirectory()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, __file__, "serve", os.path.join(folder.name, "socket")], env=env,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        _server = process, folder
        atexit.register(process.wait)
        atexit.register(process.kill)  # first
    process, folder = _server
    address = os.path.join(folder.name, "socket")
    end = time.monotonic() + 120
    while not os.path.exists(address):
        assert process.poll() is None and time.monotonic() < end, "the warm Python has not started"
        time.sleep(0.01)
    return [sys.executable, "-IS", __file__, address]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        die_with_parent(os.getppid())
        perform(*become(*serve(sys.argv[2])))
    else:
        run(sys.argv[1], sys.argv[2:])
