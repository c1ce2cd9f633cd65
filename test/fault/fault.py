"""Jobs that things are done to: ranks and tallyd as processes, faults, and a judge of the ranks' histories.

    with Job(tmp_path, ranks=3, services=2, seed=7) as job:
        job.await_steps(5)
        job.kill(job.services[1])
        job.await_steps(20)
        job.finish()          # all ranks left in good order, and every result has the bits of the reference

Ranks run worker.c.  Whatever happens to a job, `judge` holds it to this: each (step, tensor), which is a round, is begun
and ended once by each rank, or not at all where a rank or the job died; it belongs to one epoch, the same on every rank;
nobody has its result before all have begun it; the result has the bits of the reference, on every rank; nothing is
written into a buffer after its operation.  `finish` also wants everybody to have come to the same end.

A Proxy stands between ranks and one tallyd and does to the bytes what networks do to bytes.
"""

import collections
import ctypes
import functools
import hashlib
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
TALLY, TALLYD = BUILD / "bin" / "tally", BUILD / "bin" / "tallyd"
WORKER = BUILD / "meson" / "test" / "fault" / "fault_worker"
FAILING = {WORKER: WORKER.with_name("fault_failing_worker"), TALLYD: WORKER.with_name("fault_failing_tallyd")}
DIVERT = BUILD / "meson" / "test" / "fault" / "fault_divert.so"

PATIENCE_S = 90  # for what must happen; how long it takes is never judged
GONE_OVER = 3  # worker.c: ended by an error that Tally told it

# Large and small, none a multiple of anything; the eighth is an allgather, the sixth a broadcast.
SIZES = (300007, 1, 70001, 1000, 13, 40003, 150001, 2003)


# --- what the ranks must get ---------------------------------------------------------------------------


def mix(z):
    """splitmix64, of a number or an array, as worker.c has it."""
    with np.errstate(over="ignore"):
        z = np.asarray(z, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


BLOCK = 8192  # elements: what is computed with stays in a processor's cache


def make_input(seed, step, tensor, rank, count):
    key = np.uint64(seed)
    with np.errstate(over="ignore"):
        for part in (step, tensor, rank):
            key = mix(key) + np.uint64(part)
        key = mix(key)
        whole = np.empty(count, np.uint32)
        for at in range(0, count, BLOCK):
            z = mix(key + np.arange(at, min(at + BLOCK, count), dtype=np.uint64))
            whole[at : at + BLOCK] = z & np.uint64(0x807FFFFF) | (np.uint64(118) + (z >> np.uint64(32) & np.uint64(15))) << np.uint64(23)
    return whole.view(np.float32)


def tree(inputs):
    """T(lo, hi) = T(lo, lo + m) + T(lo + m, hi), m the largest power of two below hi - lo."""
    if len(inputs) == 1:
        return inputs[0]
    m = 1 << ((len(inputs) - 1).bit_length() - 1)
    return tree(inputs[:m]) + tree(inputs[m:])


PERIOD = 8  # steps, of which an uneven rank does the first few


def share(seed, period, rank):
    """How many of a period's steps a rank has input for, as worker.c has it."""
    with np.errstate(over="ignore"):
        key = mix(mix(mix(np.uint64(seed)) + np.uint64(period)) + np.uint64(2000) + np.uint64(rank))
    return 1 + int(key) % PERIOD


def members(seed, step, tensor, ranks, group, uneven):
    """Whose tensor it is in this step."""
    if uneven:
        return [rank for rank in range(ranks) if step % PERIOD < share(seed, step // PERIOD, rank)]
    return range(0, ranks, 2 if group and tensor % 8 == 3 else 1)


# What worker.c does with tensors, by their number modulo 8, in `kinds`.
KINDS = (("sum",) * 5 + ("broadcast", "sum", "allgather"),
         ("sum", "reduce", "reduce_scatter", "sum", "allgather_into", "broadcast", "alltoall", "allgather"),
         ("sum", "gather", "scatter", "sum", "reduce_scatter", "broadcast", "message", "allgather"))


def piece(kind, tensor, count, source, target):
    """How much of a tensor is rank `target`'s of what `source` has."""
    if kind == "alltoall":
        return (3 * source + 5 * target + tensor) % 4 * count // 8
    return count // ((source if kind == "gather" else target) + 1)


def pieces_of(kind, seed, step, tensor, source, count, ranks):
    """What a rank has for each."""
    counts = [piece(kind, tensor, count, source, target) for target in range(ranks)]
    whole = make_input(seed, step, tensor, source, sum(counts))
    return np.split(whole, np.cumsum(counts)[:-1])


def result(kind, seed, step, tensor, rank, count, ranks, group, uneven):
    """What a rank must get."""
    root, everybody = (step + tensor) % ranks, range(ranks)
    if kind == "broadcast":
        return make_input(seed, step, tensor, root, count)
    if kind == "message":
        return make_input(seed, step, tensor, (rank - 1) % ranks, count)
    if kind in ("allgather", "allgather_into"):
        return np.concatenate([make_input(seed, step, tensor, r, count + r * (kind == "allgather")) for r in everybody])
    if kind in ("reduce", "gather") and rank != root:
        return np.empty(0, np.float32)
    if kind == "gather":
        return np.concatenate([make_input(seed, step, tensor, r, piece(kind, tensor, count, r, 0)) for r in everybody])
    if kind == "scatter":
        return pieces_of(kind, seed, step, tensor, root, count, ranks)[rank]
    if kind == "alltoall":
        return np.concatenate([pieces_of(kind, seed, step, tensor, r, count, ranks)[rank] for r in everybody])
    if kind == "reduce_scatter":
        return tree([pieces_of(kind, seed, step, tensor, r, count, ranks)[rank] for r in everybody])
    some = members(seed, step, tensor, ranks, group, uneven)
    if not uneven:
        return tree([make_input(seed, step, tensor, r, count) for r in some])
    zeros = np.zeros(count, np.float32)
    return tree([make_input(seed, step, tensor, r, count) if r in some else zeros for r in everybody])


@functools.lru_cache(maxsize=4096)
def digest(kind, *what):
    return hashlib.blake2b(result(kind, *what).tobytes(), digest_size=16).hexdigest()


def reference(kinds, seed, step, tensor, rank, count, ranks, group, uneven=False):
    """The hash of what a rank must get."""
    kind = "sum" if uneven else KINDS[kinds][tensor % 8]
    if kind in ("sum", "broadcast", "allgather", "allgather_into"):
        rank = 0  # all get the same: it is made once
    return digest(kind, seed, step, tensor, rank, count, ranks, group, uneven)


# --- histories -----------------------------------------------------------------------------------------


OF_EPOCH = re.compile(r"rank \d+ comm: round (\d+) of 'tensor (\d+)' goes by split no\. (\d+)")  # src/comm/op/op.c; a round is a step


class History:
    """What one rank has noted (worker.c)."""

    def __init__(self, path):
        self.begun, self.ends, self.steps = {}, collections.OrderedDict(), []  # begun: (step, tensor) -> ns
        self.ended_at, self.epochs = {}, {}  # (step, tensor) -> ns; -> epoch, where services sum
        self.log = []  # (ns, what else the library has said)
        self.failed = self.left = self.touched = None
        self.wrong = []
        self.periods = 0  # that are over; in each, rounds begin anew
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                self._take(line.rstrip("\n").split(" ", 2))

    def _take(self, words):
        at, what, rest = int(words[0]), words[1], words[2] if len(words) > 2 else ""
        if what == "begin":
            step, tensor = map(int, rest.split())
            self._take_once(self.begun, (step, tensor), at, "was begun")
        elif what == "end":
            step, tensor, status, text = rest.split(" ", 3)
            key = (int(step), int(tensor))
            if key not in self.begun:
                self.wrong.append(f"{key} ended without having been begun")
            self._take_once(self.ended_at, key, at, "ended")
            self.ends[key] = (int(status), text)
        elif what == "log":
            belongs = OF_EPOCH.fullmatch(rest)
            if belongs:
                round_, tensor, epoch = map(int, belongs.groups())
                key = (PERIOD * self.periods + round_, tensor)
                self._take_once(self.epochs, key, epoch, "got an epoch")
            else:
                self.log.append((at, rest))
        elif what == "step":
            self.steps.append((int(rest), at))
        elif what == "period":
            self.periods = int(rest)
        elif what == "failed":
            status, _, text = rest.partition(" ")
            self.failed = (int(status), text, at)
        elif what == "touched":
            self.touched = rest
        elif what == "left":
            self.left = at
            self.wrong += [f"{key} was begun and never ended" for key in self.begun if key not in self.ends]

    def _take_once(self, seen, key, value, what):
        if key in seen:
            self.wrong.append(f"{key} {what} twice")
        seen[key] = value


def judge(histories, seed, sizes, group=False, kinds=0, uneven=False):
    """What is wrong with them: sentences, none if all is well."""
    wrong = []
    for rank, h in enumerate(histories):
        wrong += [f"rank {rank}: {sentence}" for sentence in h.wrong]
        if h.touched:
            wrong.append(f"rank {rank}: a buffer changed after its operation had ended: {h.touched}")
        for (step, tensor), (status, text) in h.ends.items():
            right = text
            if status == 0:
                right = reference(kinds, seed, step, tensor, rank, sizes[tensor], len(histories), group, uneven)
            if text != right:
                wrong.append(f"rank {rank}: step {step}, tensor {tensor}: not the bits of the reference")
    for key in set().union(*(h.ends for h in histories)):
        outcomes = {h.ends[key][0] == 0 for h in histories if key in h.ends}
        if len(outcomes) > 1 and not any(h.failed for h in histories):
            wrong.append(f"{key} ended well on some ranks and badly on others")
        if uneven or KINDS[kinds][key[1] % 8] != "message":  # of which its sender and its receiver alone know
            some = members(seed, *key, len(histories), group, uneven)
            wrong += judge_round({r: histories[r] for r in some}, key)
    return wrong


def judge_round(histories, key):
    """Did all push before anybody was answered, and all in one epoch?"""
    answered = [h for h in histories.values() if h.ends.get(key, (None,))[0] == 0]
    first = min((h.ended_at[key] for h in answered), default=0)
    wrong = [f"{key} ended well before rank {rank} had begun it"
             for rank, h in histories.items() if answered and h.begun.get(key, first) >= first]
    epochs = {h.epochs[key] for h in histories.values() if key in h.epochs}
    if len(epochs) > 1:
        wrong.append(f"{key} belongs to several epochs: {sorted(epochs)}")
    if epochs and not all(key in h.epochs for h in answered):
        wrong.append(f"{key} belongs to an epoch on some ranks and ended without one on others")
    return wrong


# --- processes -----------------------------------------------------------------------------------------


_given = collections.deque(maxlen=1000)  # ports: of a job some are opened long after they were chosen


def free_port():
    """One that nobody has and that was not given lately; also below the range that the kernel hands out, so nobody will."""
    low = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(1000):
        port = random.SystemRandom().randrange(max(2000, low - 12000), low)
        if port in _given:
            continue
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                _given.append(port)
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class Local:
    """Processes on this machine, each of which counts as a machine of its own."""

    def __init__(self):
        self.port = free_port()

    def environment(self, name):
        env = {k: v for k, v in os.environ.items() if not re.match(r"TALLY_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_", k)}
        return env | {"TALLY_COORD": f"127.0.0.1:{self.port}", "TALLY_HOST_ID": name}

    def start(self, name, argv, env, output):
        return subprocess.Popen(
            [str(word) for word in argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )


class Process:
    """A rank or a tallyd.  name: rank-2, tallyd-0."""

    def __init__(self, name, popen, log, port=None):
        self.name, self.popen, self.log, self.port = name, popen, log, port

    def running(self):
        return self.popen.poll() is None

    def signal(self, number):
        if self.running():
            self.popen.send_signal(number)

    def output(self):
        return self.log.read_text(encoding="utf-8", errors="replace")


class Job:
    """Ranks and tallyd.  env: settings for all; rank_words: {rank: words for the worker}; rank_env: {rank: settings};
    proxied: services that the ranks reach through a Proxy, as numbers of tallyd or as "rank-1" for the one inside that
    rank: job.proxies[service][rank]; coordinator: it is a process of its own, job.coordinator; failing: {name of a process:
    the moment at which it dies or pauses, as in fail.c}."""

    def __init__(self, folder, ranks=3, services=2, seed=1, sizes=SIZES, env=None, words=("pause_ms=5",), rank_words=None,
                 rank_env=None, proxied=(), where=None, once=False,
                 coordinator=False, failing=None):
        self.folder, self.size, self.seed, self.sizes = pathlib.Path(folder), ranks, seed, tuple(sizes)
        self.env, self.words = dict(env or {}), list(words)
        self.rank_words, self.rank_env = rank_words or {}, dict(rank_env or {})
        self.where = where or Local()
        self.once = once
        self.failing = dict(failing or {})
        self.group, self.uneven = ("%s=1" % word in self.words for word in ("group", "uneven"))
        self.kinds = next((int(word[6:]) for word in self.words if word.startswith("kinds=")), 0)
        self.initial = services
        self.coordinator = None
        self._apart = coordinator
        self.services, self.ranks, self.proxies = [], [], {}
        self.marks = []  # (ns, what was done)
        self._proxied = set(proxied)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        try:
            if self._apart:
                self.start_coordinator()
            for name in self._proxied & {f"rank-{rank}" for rank in range(self.size)}:
                port = free_port()
                self.proxies[name] = [Proxy(port) for _ in range(self.size)]
                self.rank_env[int(name[5:])] = {"TALLY_PORTS": f"{port}-{port}"} | self.rank_env.get(int(name[5:]), {})
            for _ in range(self.initial):
                self.add_service()
            for rank in range(self.size):
                self.ranks.append(self._start_rank(rank))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        everybody = self.ranks + self.services + ([self.coordinator] if self.coordinator else [])
        for p in everybody:
            if p.running():
                p.popen.send_signal(signal.SIGKILL)
        for p in everybody:
            p.popen.wait()
        for proxy in self.all_proxies():
            proxy.close()

    def all_proxies(self):
        return [proxy for proxies in self.proxies.values() for proxy in proxies]

    def _spawn(self, name, argv, env, port=None):
        log = self.folder / f"{name}.log"
        if name in self.failing:
            argv = [FAILING[argv[0]], *argv[1:]]
            env = env | {"FAULT_FAIL": self.failing[name]}
        with open(log, "ab") as output:
            popen = self.where.start(name, argv, self.where.environment(name) | self.env | env, output)
        return Process(name, popen, log, port)

    def _expected(self):
        """Settings for whoever may be the coordinator: a tallyd that comes last would not be in the job's first roster."""
        return {"TALLY_SERVERS": str(self.initial)} if self.initial else {}

    def _start_rank(self, rank):
        env = {"RANK": str(rank), "WORLD_SIZE": str(self.size)} | self._expected()
        if self.proxies:
            env["LD_PRELOAD"] = str(DIVERT)
            env["FAULT_DIVERT"] = ",".join(f"{p[rank].target}:{p[rank].port}" for p in self.proxies.values())
        argv = [WORKER, self.folder, f"seed={self.seed}", "sizes=" + ",".join(map(str, self.sizes)), *self.words]
        return self._spawn(f"rank-{rank}", argv + list(self.rank_words.get(rank, [])), env | self.rank_env.get(rank, {}))

    def add_service(self, env=None):
        """Start one more tallyd; it joins."""
        number = len(self.services)
        port = free_port()
        if number in self._proxied:
            self.proxies[number] = [Proxy(port) for _ in range(self.size)]
        argv = [TALLYD, *(["--once"] if self.once else [])]
        self.mark(f"start tallyd-{number}")
        service = self._spawn(f"tallyd-{number}", argv, {"TALLY_PORTS": f"{port}-{port}", **(env or {})}, port)
        self.services.append(service)
        return service

    def start_coordinator(self):
        """One apart from rank 0, at the address that all have; also again."""
        self.mark("start coordinator")
        self.coordinator = self._spawn("coordinator", [TALLYD, "--coordinator"], self._expected())

    def restart(self):
        """The ranks of the next start of this job, with the tallyd that are there."""
        self.folder = self.folder / "again"
        self.folder.mkdir()
        self.ranks = [self._start_rank(rank) for rank in range(self.size)]

    # what is done to it

    def mark(self, what):
        self.marks.append((time.clock_gettime_ns(time.CLOCK_MONOTONIC), what))

    def kill(self, process):
        self.mark(f"kill {process.name}")
        process.signal(signal.SIGKILL)

    def stop(self, process):
        self.mark(f"stop {process.name}")
        process.signal(signal.SIGSTOP)

    def resume(self, process):
        self.mark(f"resume {process.name}")
        process.signal(signal.SIGCONT)

    def drain(self, process):
        self.mark(f"drain {process.name}")
        process.signal(signal.SIGTERM)

    # how it goes

    def histories(self):
        return [History(self.folder / f"rank-{rank}") for rank in range(self.size)]

    def steps(self, rank):
        """How many steps a rank has done."""
        path = self.folder / f"rank-{rank}"
        return path.read_bytes().count(b" step ") if path.exists() else 0

    def await_true(self, condition, what):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"in vain: {what}\n{self.account()}")
            time.sleep(0.01)

    def await_steps(self, count, ranks=None):
        """Until the ranks have done so many steps more than each had now.  A rank that ends meanwhile is an error."""
        ranks = range(self.size) if ranks is None else ranks
        goals = {rank: self.steps(rank) + count for rank in ranks}

        def done():
            for rank in ranks:
                if not self.ranks[rank].running() and self.steps(rank) < goals[rank]:
                    raise AssertionError(f"rank {rank} has ended\n{self.account()}")
            return all(self.steps(rank) >= goals[rank] for rank in ranks)

        self.await_true(done, f"{count} more steps on ranks {list(ranks)}")

    def await_ends(self, processes=None):
        processes = self.ranks if processes is None else processes
        self.await_true(lambda: not any(p.running() for p in processes), "the end of " +
                        ", ".join(p.name for p in processes))
        return [p.popen.poll() for p in processes]

    def finish(self):
        """Let the ranks stop after their step; all must have left in good order, with the right results."""
        self.mark("finish")
        (self.folder / "stop").touch()
        statuses = self.await_ends()
        self.check()
        histories = self.histories()
        assert statuses == [0] * self.size and all(h.left for h in histories), self.account()
        assert len({len(h.steps) for h in histories}) == 1, self.account()
        for first in range(0 if self.uneven else 2 if self.group else 1):
            assert len({tuple(sorted(h.ends)) for h in histories[first :: 1 + self.group]}) == 1, self.account()
        return histories

    def fail(self, others, sentence, same=True):
        """All of `others` must end with a sentence that matches, the same one if they had it from the coordinator."""
        statuses = self.await_ends([self.ranks[r] for r in others])
        self.check()
        histories = self.histories()
        assert statuses == [GONE_OVER] * len(statuses), self.account()
        sentences = {histories[r].failed[1] for r in others}
        assert all(re.search(sentence, s) for s in sentences) and (len(sentences) == 1 or not same), self.account()
        return histories

    def check(self):
        wrong = judge(self.histories(), self.seed, self.sizes, self.group, self.kinds, self.uneven)
        assert not wrong, "\n".join(wrong[:20]) + "\n" + self.account()

    def longest_pause_ms(self):
        """The longest time between two steps of rank 0, and what had been done before it."""
        times = [at for _, at in self.histories()[0].steps]
        pauses = [(b - a, a, b) for a, b in zip(times, times[1:])]
        pause, _, end = max(pauses, default=(0, 0, 0))
        before = [what for at, what in self.marks if at <= end]
        return pause / 1e6, before[-1] if before else ""

    def account(self):
        """All that is known, for a failure's message."""
        out = [f"seed {self.seed}, ranks {self.size}; done: " + ", ".join(what for _, what in self.marks)]
        for rank, h in enumerate(self.histories()):
            open_ops = sorted(set(h.begun) - set(h.ends))
            out.append(f"rank {rank}: {len(h.steps)} steps, failed {h.failed}, left {h.left}, open {open_ops[:6]}")
        for p in self.ranks + self.services:
            out.append(f"--- {p.name}: exit {p.popen.poll()}\n{p.output()[-1500:]}")
        return "\n".join(out)


# --- the network's tricks ------------------------------------------------------------------------------


class Pipe:
    """One direction of a connection through a proxy."""

    def __init__(self, proxy, up, source, sink):
        self.proxy, self.up, self.source, self.sink = proxy, up, source, sink
        self.passed = 0
        self.held = b""

    def run(self):
        try:
            while True:
                data = self.source.recv(65536)
                if not data:
                    break
                for piece in self.proxy.treat(self, data):
                    self.sink.sendall(piece)
        except OSError:
            pass
        self.proxy.end(self)


class Trick:
    """Once so many bytes have passed one way (up: from ranks), do something to what follows, once."""

    def __init__(self, kind, up, after, action=None):
        self.kind, self.up, self.after, self.action = kind, up, after, action
        self.done = threading.Event()


class Proxy:
    """Between a rank and the tallyd at port `target`.  Counts bytes over all connections, each way."""

    def __init__(self, target):
        self.target = target
        self.port = free_port()
        self.lock = threading.RLock()
        self.passed = {True: 0, False: 0}
        self.tricks = []
        self.delay_s = 0.0
        self.rate = None  # bytes a second, each direction of each connection
        self.gate = {True: threading.Event(), False: threading.Event()}  # cleared: nothing passes, nothing is closed
        self.pass_all()
        self.refuses = False
        self.pairs = []
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                if self.refuses:
                    raise OSError
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            for s in (client, server):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.pairs.append((client, server))
            for pipe in (Pipe(self, True, client, server), Pipe(self, False, server, client)):
                threading.Thread(target=pipe.run, daemon=True).start()

    def play(self, kind, up=True, after=None, action=None):
        """after: bytes from now.  kinds: flip a bit, duplicate, reorder, lose some bytes; truncate: pass part of a piece,
        then end the connection; cut: end it (RST); die: action(), and nothing more passes."""
        with self.lock:
            trick = Trick(kind, up, self.passed[up] + (after or 0), action)
            self.tricks.append(trick)
        return trick

    def treat(self, pipe, data):
        self.gate[pipe.up].wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.rate:
            time.sleep(len(data) / self.rate)
        with self.lock:
            trick = next((t for t in self.tricks if t.up == pipe.up and not t.done.is_set()
                          and t.after < self.passed[pipe.up] + len(data)), None)
            before = self.passed[pipe.up]
            self.passed[pipe.up] += len(data)
            if pipe.held:
                data, pipe.held = data + pipe.held, b""
            if not trick:
                return [data]
            trick.done.set()
        at = max(0, min(trick.after - before, len(data) - 1))
        return self._trick(trick.kind, trick, pipe, data, at)

    def _trick(self, kind, trick, pipe, data, at):
        if kind == "flip":
            return [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1:]]
        if kind == "duplicate":
            return [data[: at + 1], data[max(0, at - 128) : at + 1], data[at + 1 :]]
        if kind == "lose":
            return [data[:at], data[at + 128 :]]
        if kind == "reorder":
            pipe.held = data[at : at + 500]  # goes out behind what comes next
            return [data[:at], data[at + 500 :]]
        if kind == "truncate":
            pipe.sink.sendall(data[:at])
            raise OSError
        if kind == "cut":
            pipe.sink.sendall(data[:at])
            pipe.sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise OSError
        assert kind == "die"
        pipe.sink.sendall(data[:at])
        trick.action()
        raise OSError

    def end(self, pipe):
        """A connection that ends on one side ends on the other."""
        for s in (pipe.source, pipe.sink):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()

    def cut_all(self):
        with self.lock:
            pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for s in pair:
                try:
                    s.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def hold(self, *ups):
        for up in ups or (True, False):
            self.gate[up].clear()

    def pass_all(self):
        for gate in self.gate.values():
            gate.set()

    def close(self):
        self.pass_all()
        self.listener.close()
        self.cut_all()
