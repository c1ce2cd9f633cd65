#!/usr/bin/env python3
"""An emulated cluster on one machine: hosts behind one switch, each network card with a rate of its own.

    with Lab(["w0", "w1", Host("c0", rate="500mbit")], rate="200mbit") as lab:
        print(lab.run("w0", ["ping", "-c1", "w1"]).output)
        job = lab.job(["examples/push_pull"], workers=["w0", "w1"], services=["c0"], tallyd="bin/tallyd")

For people there is a command line (docs/lab.md):

    test/lab/lab.py up -n 4 -k 2 --rate 200mbit     # until Ctrl-C
    test/lab/lab.py shell w1                        # elsewhere, while it is up
    test/lab/lab.py run -n 4 -k 2 -- COMMAND        # up, COMMAND on every worker, down

How it is built.  A keeper process is the init of a PID namespace of its own; its network namespace is the
switch, a bridge.  Each host is a child of the keeper that has unshared network, mounts and host name, and
sleeps.  Commands enter a host's namespaces and the keeper's PID namespace.  The keeper reads a pipe whose
other end this process holds: when this process ends, however it ends, the keeper ends, and with it the kernel
ends all that lives in its PID namespace; with the last process go namespaces, links and mounts.  So there is
no name in /run/netns, no file and no interface that anybody would have to clean up.

Every card's rate is enforced by a token bucket on both ends of its link, one for what the host sends, one for
what it gets.  Standard library only.  Needs root and iproute2 and util-linux; why_not() says what is missing.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
PR_SET_NAME = 15

# The token bucket's burst: at 1 Gbit/s 96 KB is the least that costs no CPU, and each pause gives a link so much
# for nothing.  Slower links get as little in proportion (but room for a few packets), and the kernel is told to
# make packets small enough to fit, else the bucket cuts each one up.
BURST_BYTES_AT_GBIT = 96 << 10
LEAST_BURST_BYTES = 24 << 10
# What a port of the switch, and a card, can hold: 16 ms at full rate.  Not less on slow links: what meets at a port
# is as many bytes there, and what a shallow port drops is a matter of its own (queue_bytes).
QUEUE_SECONDS = 0.016
LEAST_QUEUE_BYTES = 2000000

SETTLE_S = 30  # for the cluster to come up, and to go
GRACE_S = 15  # for a job's other processes to end when one has failed


class LabError(Exception):
    """The cluster cannot be built, or a command in it cannot be started; says why."""


# --- what a cluster is made of -----------------------------------------------------------------------


def parse_rate(rate):
    """Bit/s of 2e8, "200mbit", "1gbit" or None (no limit)."""
    if rate is None or isinstance(rate, (int, float)):
        value = rate
    else:
        match = re.fullmatch(r"([0-9.]+)\s*([kmg]?)(?:bit)?", rate.strip().lower())
        value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else -1
    if value is not None and not 1e5 <= value <= 1e12:
        raise ValueError(f"'{rate}' is no rate; one looks like 200mbit or 1gbit, at least 100kbit")
    return value


@dataclasses.dataclass
class Host:
    """One machine.  rate: its card's, both ways, else the lab's; docker0: has the bridge that Docker leaves, with
    the address that all such bridges have; wrong_name: /etc/hosts says that its own name is 127.0.1.1, and knows
    nobody else; second_card: has one more, in a network that hosts with one card do not reach."""

    name: str
    rate: object = None
    docker0: bool = False
    wrong_name: bool = False
    second_card: bool = False


def odd(name, rate=None):
    """A host with all that real ones have and textbooks have not."""
    return Host(name, rate, docker0=True, wrong_name=True, second_card=True)


@dataclasses.dataclass
class Result:
    """What became of a command.  status: as subprocess has it (-9: killed); None: still running at its time-out,
    and killed then.  output: standard output and error together; error is empty unless they were kept apart."""

    host: str
    status: int
    output: str
    error: str = ""


# --- the keeper's side -------------------------------------------------------------------------------


def execute(argv, text=None):
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip() or done.returncode}")


def batch(tool, lines):
    """Many `ip` or `tc` commands in one process."""
    if lines:
        execute([tool, "-batch", "-"], "\n".join(lines) + "\n")


def unshare(flags):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise LabError(f"unshare: {os.strerror(ctypes.get_errno())}")


def set_process_name(name):
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def write_sysctl(name, value):
    with contextlib.suppress(OSError):  # an older kernel without it
        pathlib.Path("/proc/sys", name.replace(".", "/")).write_text(str(value), encoding="ascii")


def shape(device, rate, plan):
    """tc's and ip's lines that hold what `device` sends to `rate` bit/s."""
    if rate is None:
        return [], []
    burst = plan["burst_bytes"] or int(max(LEAST_BURST_BYTES, BURST_BYTES_AT_GBIT * rate / 1e9))
    queue = int(plan["queue_bytes"] or max(LEAST_QUEUE_BYTES, QUEUE_SECONDS * rate / 8))
    packet = min(65536, burst * 2 // 3)
    return (
        [f"qdisc add dev {device} root tbf rate {int(rate)}bit burst {burst} limit {queue}"],
        [f"link set dev {device} gso_max_size {packet}"] if packet < 65536 else [],
    )


def mac(card, index):
    return f"02:00:00:{card:02x}:{index >> 8:02x}:{index & 255:02x}"


def hosts_file(plan, host):
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    if host["wrong_name"]:
        lines.append(f"127.0.1.1 {host['name']}")
    else:
        lines += [f"{h['address']} {h['name']}\n{h['address6']} {h['name']}" for h in plan["hosts"]]
    return "\n".join(lines) + "\n"


def mount_host(plan, host):
    """/sys of the host's own network, and its /etc/hosts.  The latter's tmpfs loses its place at once and lives on
    in the file's mount alone, so nothing of the machine is covered."""
    execute(["mount", "-t", "sysfs", "sysfs", "/sys"])
    subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], capture_output=True, check=False)
    execute(["mount", "-t", "tmpfs", "tally-lab", "/run"])
    pathlib.Path("/run/hosts").write_text(hosts_file(plan, host), encoding="ascii")
    execute(["mount", "--bind", "/run/hosts", "/etc/hosts"])
    execute(["umount", "-l", "/run"])


def configure_host(plan, host):
    """Runs in the host's namespaces when the links are there."""
    write_sysctl("net.ipv6.conf.all.accept_dad", 0)
    write_sysctl("net.ipv6.conf.default.accept_dad", 0)
    write_sysctl("net.ipv6.conf.default.router_solicitations", 0)
    index, links, queues = host["index"], ["link set dev lo up"], []
    for card in range(2 if host["second_card"] else 1):
        device = f"eth{card}"
        tc, ip = shape(device, host["rate"], plan)
        queues += tc
        links += ip
        links += [
            f"link set dev {device} up",
            f"addr add 10.{77 + card}.{index >> 8}.{index & 255}/16 dev {device}",
            f"addr add fd77:{card}::{index:x}/64 dev {device} nodad",
        ]
        if plan["congestion"]:
            # Of the routes, because the kernel lets a namespace choose its default only among what the machine allows.
            links += [
                f"route change 10.{77 + card}.0.0/16 dev {device} scope link congctl {plan['congestion']}",
                f"route change fd77:{card}::/64 dev {device} metric 256 congctl {plan['congestion']}",
            ]
    if host["docker0"]:
        links += ["link add name docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set dev docker0 up"]
    # Neighbours are known beforehand: the kernel's table of learnt ones is one for all namespaces, and small.
    for other in plan["hosts"]:
        if other is not host:
            links.append(f"neigh add {other['address']} lladdr {mac(0, other['index'])} dev eth0 nud permanent")
            links.append(f"neigh add {other['address6']} lladdr {mac(0, other['index'])} dev eth0 nud permanent")
    batch("ip", links)
    batch("tc", queues)


def be_host(plan, host, ready, go):
    """A child of the keeper: becomes the host, and sleeps."""
    try:
        os.setsid()
        set_process_name("lab:" + host["name"])
        unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET)
        socket.sethostname(host["name"])
        execute(["mount", "--make-rprivate", "/"])
        os.write(ready, b"\n")
        if os.read(go, 1):
            mount_host(plan, host)
            configure_host(plan, host)
            os.write(ready, b"\n")
    except (LabError, OSError, ValueError) as error:
        os.write(ready, str(error).encode())
    os.closerange(0, 256)
    while True:
        signal.pause()


def be_switch(plan):
    """The keeper's own network namespace."""
    write_sysctl("net.bridge.bridge-nf-call-iptables", 0)
    write_sysctl("net.ipv6.conf.all.disable_ipv6", 1)
    write_sysctl("net.ipv6.conf.default.disable_ipv6", 1)
    links = ["link add name switch type bridge stp_state 0 mcast_snooping 0", "link set dev switch up"]
    queues = []
    for host in plan["hosts"]:
        for card in range(2 if host["second_card"] else 1):
            port = f"p{host['index']}.{card}"
            address = mac(card, host["index"])
            links.append(f"link add name {port} type veth peer name eth{card} address {address} netns {host['pid']}")
            tc, ip = shape(port, host["rate"], plan)
            queues += tc
            links += ip + [f"link set dev {port} master switch up"]
    batch("ip", links)
    batch("tc", queues)


def await_word(fd, host):
    word = os.read(fd, 4096).decode()
    if word != "\n":
        raise LabError(f"{host['name']}: {word or 'ended'}")


def keep():
    """The keeper: builds the cluster that the first line of standard input describes, says so, and sleeps until
    standard input ends."""
    set_process_name("lab-keeper")
    plan = json.loads(sys.stdin.buffer.raw.read(1 << 20))
    pipes = []
    try:
        for host in plan["hosts"]:
            ready, ready_in = os.pipe()
            go_out, go = os.pipe()
            host["pid"] = os.fork()
            if host["pid"] == 0:
                be_host(plan, host, ready_in, go_out)
            os.close(ready_in)
            os.close(go_out)
            pipes.append((host, ready, go))
        for host, ready, _ in pipes:
            await_word(ready, host)
        be_switch(plan)
        for _, _, go in pipes:
            os.write(go, b"\n")
        for host, ready, _ in pipes:
            await_word(ready, host)
    except (LabError, OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the hosts' commands end here
    print(json.dumps({"up": True}), flush=True)
    while sys.stdin.buffer.raw.read(4096):
        pass
    return 0  # and the kernel ends everything else


# --- this process's side -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def why_not():
    """None where a cluster can be built, else a sentence that says why not."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "mount") if not shutil.which(tool)]
    if missing:
        return f"an emulated cluster needs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "an emulated cluster needs root"
    probe = (
        "ip link add name switch type bridge && ip link add name eth0 type veth peer name eth1 && "
        "tc qdisc add dev eth0 root tbf rate 1gbit burst 98304 limit 98304"
    )
    try:
        done = subprocess.run(
            ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", probe],
            capture_output=True,
            text=True,
            timeout=SETTLE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "an emulated cluster cannot be built here: unshare hangs"
    if done.returncode != 0:
        return "an emulated cluster cannot be built here: " + " ".join(done.stderr.split())
    return None


def processes():
    """{pid: (parent, name)} of all processes."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = pathlib.Path("/proc", pid, "stat").read_text(encoding="utf-8", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            found[int(pid)] = (int(rest.split()[1]), name)
    return found


def enter(pid, argv, folder=None):
    """The command that runs argv in the namespaces of process `pid`, in this process's working folder."""
    return [
        "nsenter",
        f"--target={pid}",
        "--mount",
        "--uts",
        "--net",
        "--pid",
        "--",
        "env",
        f"--chdir={folder or os.getcwd()}",
        *map(str, argv),
    ]


class Process:
    """A command that runs on a host."""

    def __init__(self, host, argv, pid, env, folder, apart):
        self.host = host
        self._out = tempfile.TemporaryFile()
        self._err = tempfile.TemporaryFile() if apart else None
        self._process = subprocess.Popen(
            enter(pid, argv, folder),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err or subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self):
        """The exit status, or None while it runs."""
        return self._process.poll()

    @property
    def pid(self):
        """The command's own, as this machine's processes are numbered."""
        return next((pid for pid, (parent, _) in processes().items() if parent == self._process.pid), None)

    def signal(self, number):
        """Send the command itself a signal."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, number)
        if number == signal.SIGCONT:
            os.kill(self._process.pid, number)  # nsenter stops when its command is stopped

    def kill(self):
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self):
        """What it has printed until now."""
        return self._read(self._out)

    @staticmethod
    def _read(file):
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def wait(self, timeout_s=None):
        """Its Result.  At the time-out it is killed, and the result's status is None."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            status = None
        return Result(self.host, status, self._read(self._out), self._read(self._err) if self._err else "")


@dataclasses.dataclass
class Job:
    """What became of a job: a Result for every rank and every service, and for each host the bytes that its first
    card sent and got meanwhile."""

    ranks: list
    services: list
    traffic: dict

    @property
    def ok(self):
        return all(r.status == 0 for r in self.ranks + self.services)

    def __str__(self):
        text = ""
        for number, result in enumerate(self.ranks):
            text += f"--- rank {number} on {result.host}: status {result.status}\n{result.output}{result.error}"
        for result in self.services:
            text += f"--- tallyd on {result.host}: status {result.status}\n{result.output}{result.error}"
        return text


class Lab:
    """The cluster.  `hosts`: Host objects or names; `rate`: of the cards that have none of their own.  congestion:
    control of what goes over the cards, unless a socket asks for another, else this machine's default.  queue_bytes: what a port holds, else 16 ms' worth and
    at least 2 MB.  burst_bytes: of the token buckets, else 96 KB at 1 Gbit/s and less in proportion.
    Hosts are numbered from 1 in the addresses 10.77.0.x and fd77::x; second cards are in 10.78.0.x and fd77:1::x.
    Raises LabError."""

    def __init__(self, hosts, rate="1gbit", congestion=None, queue_bytes=None, burst_bytes=None):
        hosts = [h if isinstance(h, Host) else Host(h) for h in hosts]
        self.hosts = {h.name: h for h in hosts}
        if len(self.hosts) != len(hosts) or not hosts:
            raise LabError("hosts need names, each its own")
        for h in hosts:
            if not re.fullmatch(r"[a-z][a-z0-9-]{0,10}", h.name):
                raise LabError(f"'{h.name}' is no host name here: a letter, then at most ten letters or digits")
        self._plan = {
            "congestion": congestion,
            "queue_bytes": queue_bytes,
            "burst_bytes": burst_bytes,
            "hosts": [
                {
                    **dataclasses.asdict(h),
                    "index": i,
                    "rate": parse_rate(rate if h.rate is None else h.rate),
                    "address": f"10.77.{i >> 8}.{i & 255}",
                    "address6": f"fd77::{i:x}",
                }
                for i, h in enumerate(hosts, 1)
            ],
        }
        self._address = {h["name"]: (h["address"], h["address6"]) for h in self._plan["hosts"]}
        self._pid = {}
        self._switch = None
        self._keeper = None
        self._running = []

    # --- life

    def up(self):
        reason = why_not()
        if reason:
            raise LabError(reason)
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            + [sys.executable, "-I", os.path.abspath(__file__), "_keep"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's to handle
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        )
        try:
            self._keeper.stdin.write(json.dumps(self._plan).encode() + b"\n")
            self._keeper.stdin.flush()
            word = json.loads(self._keeper.stdout.readline() or b'{"error": "the keeper ended"}')
            if "error" in word:
                raise LabError(f"the cluster cannot be built: {word['error']}")
            self._find_hosts()
        except BaseException:
            self.down()
            raise
        return self

    def _find_hosts(self):
        table = processes()
        keepers = {pid for pid, (parent, _) in table.items() if parent == self._keeper.pid}
        self._switch = next(iter(keepers), None)
        self._pid = {name[4:]: pid for pid, (parent, name) in table.items() if parent in keepers}
        if set(self._pid) != set(self.hosts):
            raise LabError("hosts ended as soon as they were there")

    def down(self):
        """End all that runs in the cluster, and the cluster."""
        if self._keeper:
            self._keeper.stdin.close()
            try:
                self._keeper.wait(SETTLE_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper.stdout.close()
            self._keeper = None
        for process in self._running:
            process.kill()
        self._running = []
        self._pid = {}

    def __enter__(self):
        return self.up()

    def __exit__(self, *_):
        self.down()

    # --- facts

    def address(self, host, family=4):
        return self._address[host][family == 6]

    def rate(self, host):
        """Bit/s of the host's cards, None if they have no limit."""
        return next(h["rate"] for h in self._plan["hosts"] if h["name"] == host)

    def set_rate(self, host, rate):
        """From now on the host's first card carries this, both ways; what waits in the buckets stays.  The burst is never
        less than it was: a packet that waits already and is larger would wait for ever, and all behind it."""
        plan = next(h for h in self._plan["hosts"] if h["name"] == host)
        if plan["rate"] is None:
            raise LabError(f"the card of {host} has no limit that could be changed")
        own = self._plan["burst_bytes"] or int(max(LEAST_BURST_BYTES, BURST_BYTES_AT_GBIT * plan["rate"] / 1e9))
        plan["burst"] = max(own, plan.get("burst", 0))
        plan["rate"] = parse_rate(rate)
        for pid, device in ((self._pid[host], "eth0"), (self._switch, f"p{plan['index']}.0")):
            for line in shape(device, plan["rate"], {**self._plan, "burst_bytes": plan["burst"]})[0]:
                change = line.replace("qdisc add", "qdisc change").split()
                execute(["nsenter", f"--target={pid}", "--net", "--", "tc", *change])

    def counters(self, card="eth0"):
        """{host: (bytes sent, bytes received)} of every host's card.  The kernel counts a packet that it would cut
        into several on a real wire as one, headers once."""
        found = {}
        for host, pid in self._pid.items():
            for line in pathlib.Path("/proc", str(pid), "net/dev").read_text(encoding="ascii").splitlines():
                name, _, numbers = line.partition(":")
                if name.strip() == card:
                    fields = numbers.split()
                    found[host] = (int(fields[8]), int(fields[0]))
        return found

    def pids(self):
        """The processes that run in the cluster, {pid: (parent, name)}, as this machine numbers them."""
        found = {}
        with contextlib.suppress(OSError):
            cluster = os.readlink(f"/proc/{self._switch}/ns/pid")
            for pid, what in processes().items():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/ns/pid") == cluster:
                        found[pid] = what
        return found

    # --- work

    def start(self, host, argv, env=None, folder=None, apart=False, inherit=True):
        """Start a command on a host; a Process.  env: added to this process's, or all of it unless `inherit`; folder:
        to run in, else this process's; apart: keep standard error apart."""
        if host not in self._pid:
            raise LabError(f"there is no host {host}, or the cluster is down")
        self._running = [p for p in self._running if p.poll() is None]
        environment = {**(os.environ if inherit else {}), **(env or {})}
        process = Process(host, argv, self._pid[host], environment, folder, apart)
        self._running.append(process)
        return process

    def run(self, host, argv, env=None, timeout_s=60, **more):
        """Run a command on a host to its end; its Result."""
        return self.start(host, argv, env, **more).wait(timeout_s)

    def environment(self, workers, services=(), ranks_per_host=1, env=None, family=4, secret=None):
        """The environments of a job's processes: a list with one for every rank, {host: one} for the services.
        ranks_per_host: a number, or {host: number}; env: added to each, without those whose value is None, a dict or a
        function of the host that returns one.  What this process has of TALLY_* and of launchers' variables is not
        passed on."""
        counts = self.rank_counts(workers, ranks_per_host)
        more = env if callable(env) else lambda host: env or {}
        foreign = re.compile(r"TALLY_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI")
        base = {k: v for k, v in os.environ.items() if not foreign.match(k)}
        coordinator = self.address(workers[0], family)
        base |= {
            "TALLY_COORD": f"[{coordinator}]" if family == 6 else coordinator,
            "TALLY_SECRET": secret or secrets.token_hex(16),
        }
        ranks = []
        for host, count in counts.items():
            for local in range(count):
                ranks.append(
                    {
                        **base,
                        "RANK": str(len(ranks)),
                        "WORLD_SIZE": str(sum(counts.values())),
                        "LOCAL_RANK": str(local),
                        "LOCAL_WORLD_SIZE": str(count),
                        "MASTER_ADDR": coordinator,
                        "MASTER_PORT": "29500",
                        "TALLY_HOST_ID": host,
                        "TALLY_SERVERS": str(len(services)),
                        **more(host),
                    }
                )
        daemons = {host: {**base, "TALLY_HOST_ID": host, **more(host)} for host in services}
        for one in [*ranks, *daemons.values()]:
            for name in [name for name, value in one.items() if value is None]:
                del one[name]
        return ranks, daemons

    @staticmethod
    def rank_counts(workers, ranks_per_host):
        """{host: how many ranks}"""
        return {h: ranks_per_host[h] if isinstance(ranks_per_host, dict) else ranks_per_host for h in workers}

    def job(
        self,
        argv,
        workers,
        services=(),
        tallyd="tallyd",
        ranks_per_host=1,
        env=None,
        timeout_s=60,
        family=4,
        apart=False,
        folder=None,
        watch=None,
    ):
        """Run argv as every rank on `workers`, and tallyd on `services`, to the end of all; a Job.  When a rank or
        service ends badly, the others get GRACE_S more.  argv may be a function of the rank.  watch: called with the
        ranks' processes again and again while they run."""
        rank_env, service_env = self.environment(workers, services, ranks_per_host, env, family)
        places = [h for h, count in self.rank_counts(workers, ranks_per_host).items() for _ in range(count)]
        before = self.counters()
        command = argv if callable(argv) else lambda rank: argv
        how = {"folder": folder, "apart": apart, "inherit": False}
        running_services = [self.start(h, [tallyd, "--once"], service_env[h], **how) for h in services]
        running = [
            self.start(places[rank], command(rank), rank_env[rank], **how) for rank in range(len(places))
        ]
        deadline = time.monotonic() + timeout_s
        everybody = running + running_services
        while any(p.poll() is None for p in everybody) and time.monotonic() < deadline:
            if any(p.poll() for p in everybody):
                deadline = min(deadline, time.monotonic() + GRACE_S)
                break
            if watch:
                watch(running)
            time.sleep(0.01)
        ranks = [p.wait(max(0, deadline - time.monotonic())) for p in running]
        ended = [p.wait(max(0, deadline - time.monotonic())) for p in running_services]
        after = self.counters()
        traffic = {h: (after[h][0] - before[h][0], after[h][1] - before[h][1]) for h in after}
        return Job(ranks, ended, traffic)


# --- command line ------------------------------------------------------------------------------------


def add_shape(parser):
    parser.add_argument("-n", "--workers", type=int, default=4, help="worker machines, w0 w1 … (4)")
    parser.add_argument("-k", "--services", type=int, default=0, help="CPU machines, c0 c1 … (0)")
    parser.add_argument("--rate", default="1gbit", help="of each card, both ways (1gbit)")
    parser.add_argument("--rate-of", metavar="HOST=RATE", action="append", default=[], help="another for one host")
    parser.add_argument("--odd", metavar="HOST", action="append", default=[], help="has docker0, a wrong name, 2 cards")
    parser.add_argument("--congestion", help="control of what goes over the cards, such as cubic")


def lab_of(arguments):
    if arguments.workers < 1 or arguments.services < 0:
        raise LabError(f"-n {arguments.workers} -k {arguments.services}: there is one worker machine at least")
    without = [word for word in arguments.rate_of if "=" not in word]
    if without:
        raise LabError(f"--rate-of {without[0]}: HOST=RATE is needed")
    rates = dict(word.split("=", 1) for word in arguments.rate_of)
    workers = [f"w{i}" for i in range(arguments.workers)]
    services = [f"c{i}" for i in range(arguments.services)]
    unknown = [h for h in [*rates, *arguments.odd] if h not in workers + services]
    if unknown:
        raise LabError(f"there is no host {', '.join(unknown)}")
    hosts = [odd(h, rates.get(h)) if h in arguments.odd else Host(h, rates.get(h)) for h in workers + services]
    return Lab(hosts, arguments.rate, arguments.congestion), workers, services


def command_up(arguments):
    lab, workers, services = lab_of(arguments)
    with lab:
        for host in workers + services:
            rate = lab.rate(host)
            print(f"{host:6} {lab.address(host):12} {lab.address(host, 6):10} {rate / 1e6:g} Mbit/s")
        print(f"up; `{sys.argv[0]} shell HOST` enters one, Ctrl-C ends all", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def find_tallyd():
    build = os.environ.get("TALLY_TEST_BUILD")
    root = pathlib.Path(build) if build else pathlib.Path(__file__).resolve().parents[2] / "build"
    for path in (root / "bin" / "tallyd", root / "src" / "tallyd" / "tallyd"):
        if path.exists():
            return str(path)
    return shutil.which("tallyd") or "tallyd"


def command_run(arguments):
    if not arguments.command:
        raise LabError("run what?  COMMAND stands behind --")
    if arguments.ranks < 1:
        raise LabError(f"--ranks {arguments.ranks}: at least one on each worker machine")
    lab, workers, services = lab_of(arguments)
    with lab:
        job = lab.job(
            arguments.command,
            workers,
            services,
            arguments.tallyd or find_tallyd(),
            arguments.ranks,
            timeout_s=arguments.timeout,
            family=6 if arguments.ipv6 else 4,
        )
    print(job, end="")
    if arguments.traffic:
        print(f"{'host':6} {'bytes sent':>14} {'bytes received':>14}")
        for host, (sent, received) in job.traffic.items():
            print(f"{host:6} {sent:14} {received:14}")
    return 0 if job.ok else 1


def command_shell(arguments):
    table = processes()
    keepers = [pid for pid, (_, name) in table.items() if name == "lab-keeper"]
    name = "lab:" + arguments.host
    found = [pid for pid, (parent, n) in table.items() if n == name and parent in keepers]
    if arguments.keeper:
        found = [pid for pid in found if table[pid][0] == arguments.keeper]
    if not found:
        raise LabError(f"no cluster with a host {arguments.host} is up")
    if len(found) > 1:
        raise LabError(f"several are up; choose by --keeper {' or '.join(str(table[pid][0]) for pid in found)}")
    os.environ["TALLY_HOST_ID"] = arguments.host
    argv = enter(found[0], arguments.command or [os.environ.get("SHELL", "/bin/sh")])
    os.execvp(argv[0], argv)


def main():
    if sys.argv[1:] == ["_keep"]:
        return keep()
    parser = argparse.ArgumentParser(description="an emulated cluster on one machine", epilog="see docs/lab.md")
    commands = parser.add_subparsers(dest="action", required=True, metavar="up | run | shell")
    up = commands.add_parser("up", help="build a cluster and hold it until Ctrl-C")
    add_shape(up)
    run = commands.add_parser("run", help="build a cluster, run a command on each worker and tallyd elsewhere, end it")
    add_shape(run)
    run.add_argument("--ranks", type=int, default=1, help="on each worker machine (1)")
    run.add_argument("--tallyd", help="the program for the CPU machines")
    run.add_argument("--timeout", type=float, default=600, help="seconds (600)")
    run.add_argument("--traffic", action="store_true", help="print the bytes on every link")
    run.add_argument("--ipv6", action="store_true", help="name the coordinator by its IPv6 address")
    run.add_argument("command", nargs="*", metavar="COMMAND")
    shell = commands.add_parser("shell", help="enter a host of a cluster that is up, or run a command on it")
    shell.add_argument("--keeper", type=int, help="process of the cluster, where several are up")
    shell.add_argument("host")
    shell.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    try:
        return {"up": command_up, "run": command_run, "shell": command_shell}[arguments.action](arguments)
    except (LabError, ValueError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
