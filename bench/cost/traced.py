"""What `perf` sees of a job in its timed iterations: system calls with their results and time, frames, samples of where
processors are.  A recording disturbs what it records, so counts hold, and times compare with one another only.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import contextlib
import functools
import os
import pathlib
import platform
import re
import select
import shutil
import subprocess
import time

PATIENCE_S = 60
AGAIN = -11
SAMPLES_A_SECOND = 2000
# From functions' arguments on x86-64; frame.h has the structure, and the header's layout.
PROBES = {"out": "tly_frame_encode type=+0(%di):u8", "in": "tly_frame_decode type=+5(%di):u8"}
LINE = re.compile(r"\s*(\d+)/(\d+)\s+(\d+\.\d+):\s*(.*)")
FRAME = re.compile(r"\s+[0-9a-f]+ (.*) \((.*)\)$")
ENTRY = re.compile(r"^(__x64_|__do_|__se_|_*sys_|ksys_|do_)+")


def why_not():
    """None where perf can record another process, else a sentence."""
    if not shutil.which("perf"):
        return "there is no perf"
    probe = ["perf", "stat", "-e", "raw_syscalls:sys_enter", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else "perf cannot count system calls: " + done.stderr.strip().splitlines()[0]


@functools.lru_cache
def call_names():
    """{number: name} of this machine's system calls."""
    done = subprocess.run(["cc", "-E", "-dM", "-include", "sys/syscall.h", "-"], input="", capture_output=True, text=True, check=False)
    return {int(number): name for name, number in re.findall(r"#define __NR_(\w+) (\d+)$", done.stdout, re.MULTILINE)}


@functools.lru_cache
def frame_names(header):
    """{number: name} of the types of frames, from frame.h."""
    text = pathlib.Path(header).read_text(encoding="utf-8")
    body = re.sub(r"/\*.*?\*/", "", text[text.index("enum tly_frame_type {") :], flags=re.DOTALL)
    return dict(enumerate(re.findall(r"TLY_(\w+)", body[: body.index("};")].split("{")[1]), 1))


class Probes:
    """Events for each frame that the programs encode and decode.  names: what perf calls them; empty where that fails."""

    def __init__(self, *binaries):
        self.group = f"tallycost{os.getpid()}"
        self.names = []
        for i, binary in enumerate(binaries if platform.machine() == "x86_64" else []):
            for way, place in PROBES.items():
                add = ["perf", "probe", "-q", "-x", binary, "--add", f"{self.group}:{way}{i}={place}"]
                if subprocess.run(add, capture_output=True, check=False).returncode == 0:
                    self.names.append(f"{self.group}:{way}{i}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.names:
            subprocess.run(["perf", "probe", "-q", "--del", f"{self.group}:*"], capture_output=True, check=False)


class Recorder:
    """perf's recording of some processes, which begin() and end() turn on and off."""

    def __init__(self, folder, options):
        self.file = os.path.join(folder, "perf.data")
        self.options, self.process = options, None
        self.windows = []  # [begin, end] on the monotonic clock
        self.control = os.path.join(folder, "control")
        self.told = os.path.join(folder, "told")

    def start(self, pids):
        os.mkfifo(self.control)
        os.mkfifo(self.told)
        argv = ["perf", "record", "-q", "-k", "CLOCK_MONOTONIC", "-D", "-1", "-m", "8M", "-o", self.file]
        argv += [f"--control=fifo:{self.control},{self.told}", *self.options]
        argv += [] if "-a" in self.options else ["-p", ",".join(map(str, pids))]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def say(self, word):
        """Have perf do it, and wait until it has.  RuntimeError if perf has ended or does not answer."""
        control, told = (os.open(path, os.O_RDWR) for path in (self.control, self.told))  # pipes: this waits for nobody
        try:
            os.write(control, word.encode() + b"\n")
            deadline = time.monotonic() + PATIENCE_S
            while not select.select([told], [], [], 0.1)[0]:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"perf does not answer to {word!r}")
            os.read(told, 64)
        finally:
            os.close(control)
            os.close(told)

    def begin(self):
        self.say("enable")
        self.windows.append([time.monotonic(), 0])

    def end(self):
        self.windows[-1][1] = time.monotonic()
        self.say("disable")

    def stop(self):
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            self.process.communicate(timeout=PATIENCE_S)

    def script(self, *options):
        """perf script's lines."""
        argv = ["perf", "script", "-i", self.file, "--ns", *options]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
            yield from script.stdout
            script.kill()

    def timed(self, found):
        """(number of the window, process, thread, seconds, text) of a line that LINE matches; None outside of all windows."""
        seconds = float(found[3])
        for at, (begin, end) in enumerate(self.windows):
            if begin <= seconds <= end:
                return at, int(found[1]), int(found[2]), seconds, found[4]
        return None

    def lines(self):
        """The events in timed iterations, as timed() has them."""
        found = (LINE.match(line) for line in self.script("-F", "pid,tid,time,event,trace", "--show-switch-events"))
        yield from filter(None, (self.timed(of) for of in found if of))

    def samples(self):
        """The same of samples, with a call chain [(function, library)] in the text's place."""
        at, chain = None, []
        for line in self.script("-F", "pid,tid,time,ip,sym,dso"):
            head, frame = LINE.match(line), FRAME.match(line)
            if frame:
                chain.append((frame[1], frame[2]))
            elif head:
                at, chain = self.timed(head), []
            elif at:
                yield *at[:4], chain
                at = None


class Call:
    """All calls of one system call by one role: number, of those EAGAIN, of those that returned 0, bytes or other results
    added up, seconds on a processor, sleeps inside."""

    def __init__(self):
        self.calls = self.again = self.nothing = self.results = self.sleeps = 0
        self.seconds = 0.0

    def add(self, other):
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __iter__(self):
        return iter(vars(self).items())


class Thread:
    """Where one thread is."""

    def __init__(self):
        self.call, self.since, self.in_call = None, None, 0.0


class Counter:
    """Counts the events of one recording by role: calls {role: {call: Call}}, frames {role: {(way, type): number}},
    seconds {role: on a processor outside of system calls}."""

    def __init__(self, roles, types):
        self.roles, self.types = roles, types
        self.calls = collections.defaultdict(lambda: collections.defaultdict(Call))
        self.frames = collections.defaultdict(collections.Counter)
        self.seconds = collections.defaultdict(float)
        self.threads = collections.defaultdict(Thread)

    def pause(self):
        """What happens now until the next iteration is not recorded."""
        for t in self.threads.values():
            t.since, t.in_call = None, 0.0

    def charge(self, t, role, seconds):
        if t.since is None:
            return
        if t.call is None:
            self.seconds[role] += seconds - t.since
        else:
            t.in_call += seconds - t.since

    def take(self, tid, seconds, text):
        role, t = self.roles.get(tid, "other"), self.threads[tid]
        self.charge(t, role, seconds)
        event, _, rest = text.partition(" ")
        if event == "PERF_RECORD_SWITCH":
            t.since = seconds if rest.startswith("IN") else None
            if t.call is not None and rest.strip() == "OUT":
                self.calls[role][t.call].sleeps += 1
            return
        t.since = seconds
        if event.endswith(":sys_enter:"):
            number = int(rest.split()[1])
            t.call, t.in_call = call_names().get(number, str(number)), 0.0
        elif event.endswith(":sys_exit:"):
            number = int(rest.split()[1])
            if t.call == call_names().get(number, str(number)):  # else it began before the iteration did
                self.leave(self.calls[role][t.call], t, int(rest.rpartition("=")[2]))
            t.call = None
        else:
            way = re.match(r"(?:.*:)?(in|out)\d+:", event)
            if way:
                kind = int(rest.rpartition("type=")[2])
                self.frames[role][way[1], self.types.get(kind, str(kind))] += 1

    @staticmethod
    def leave(call, t, result):
        call.calls += 1
        call.again += result == AGAIN
        call.nothing += result == 0
        call.results += max(0, result)
        call.seconds += t.in_call


def count(recorder, roles, types, window_of):
    """{window_of(number of a window): Counter}."""
    found, last = {}, None
    for window, _, tid, seconds, text in recorder.lines():
        key = window_of(window)
        if key not in found:
            found[key] = Counter(roles, types)
        if window != last:
            found[key].pause()
            last = window
        found[key].take(tid, seconds, text)
    return found


def place(chain):
    """(where, function) of a sample, from its call chain [(function, library)], innermost first: where is a library, or the
    kernel in a system call, in an interrupt, or in what the kernel does for packets on the way of either."""
    function, library = chain[0]
    if not library.startswith("[") or library == "[vdso]":
        return os.path.basename(library), function
    names = [name for name, _ in chain]
    entry = next((i for i, name in enumerate(names) if name.startswith("do_syscall_64")), 0)
    where = "kernel: " + (ENTRY.sub("", names[entry - 1]) if entry else "interrupts")
    return where + (", packets" if any("softirq" in name for name in names) else ""), function


def samples(recorder, roles, window_of):
    """{window_of(number of a window): {(role, where, function): seconds}}.  What runs besides the jobs is left out."""
    found = collections.defaultdict(collections.Counter)
    for window, _, tid, _, chain in recorder.samples():
        if chain and tid in roles:
            found[window_of(window)][(roles[tid], *place(chain))] += 1 / SAMPLES_A_SECOND
    return found


# With a clock for each thread the kernel would set a timer at each switch: so the samples are the processors', not the threads'.
SAMPLES = ["-a", "-F", str(SAMPLES_A_SECOND), "-e", "cpu-clock", "-g"]
COUNTS = ["--switch-events", "-e", "raw_syscalls:sys_enter", "-e", "raw_syscalls:sys_exit"]
