"""How the processes of a job find each other where networks are as they are: IPv6, names that mean something else on
each machine or come late, several cards, ports behind a firewall, what launchers set; and unequal numbers of ranks."""

import os
import re
import sys
import time

import lab as cluster
import pytest
from lab import Lab, odd
from test_lab import BUILD, PATIENCE_S, ROOT, eventually, push_pull, tallyd

pytestmark = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))

# What Slurm, PMI and OpenMPI jobs lack.
NO_TORCHRUN = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}


@pytest.fixture(scope="module")
def net():
    """w1 and w2 have a docker0, their own names as 127.0.1.1, and one more card."""
    with Lab(["w0", odd("w1"), odd("w2"), "c0"], rate="1gbit") as lab:
        yield lab


def start(lab, workers, services=(), each=lambda rank: {}, ranks_per_host=1, **env):
    """The running ranks, then the running tallyd; `each` gives a rank, or None, variables of its own."""
    ranks, daemons = lab.environment(workers, services, ranks_per_host, env)
    places = [h for h, n in lab.rank_counts(workers, ranks_per_host).items() for _ in range(n)]
    own = [{k: v for k, v in {**one, **each(i)}.items() if v is not None} for i, one in enumerate(ranks)]
    started = [lab.start(h, [tallyd(), "--once"], {**daemons[h], **each(None)}, inherit=False) for h in services]
    return [lab.start(h, push_pull(), e, inherit=False) for h, e in zip(places, own)] + started


def finish(processes):
    """Their outputs; a process that hangs fails the test."""
    results = [p.wait(PATIENCE_S) for p in processes]
    assert all(r.status is not None for r in results), "\n".join(f"--- {r.host}: {r.status}\n{r.output}" for r in results)
    return results


def sums(results, ranks, machines, services):
    """All ended well, and the sums are right."""
    text = "\n".join(f"--- {r.host}: {r.status}\n{r.output}" for r in results)
    assert [r.status for r in results] == [0] * len(results), text
    said = f"{ranks} ranks on {machines} machines, {services} services: each of 1000000 sums is "
    assert said + f"{ranks * (ranks + 1) // 2}, 0 are wrong" in results[0].output, text
    return results[0].output


def refusals(results, *words):
    """All have failed, and each says this."""
    for r in results:
        assert r.status == 1 and all(w in r.output for w in words), f"--- {r.host}: {r.status}\n{r.output}"


class Names:
    """The /etc/hosts of a host, changed for a while."""

    def __init__(self, lab, host, change):
        self.lab, self.host, self.change = lab, host, change

    def write(self, text):
        assert self.lab.run(self.host, ["sh", "-c", 'printf %s "$TEXT" > /etc/hosts'], {"TEXT": text}).status == 0

    def __enter__(self):
        self.before = self.lab.run(self.host, ["cat", "/etc/hosts"]).output
        self.write(self.change(self.before))

    def __exit__(self, *_):
        self.write(self.before)


def without(*what):
    """Lines that hold none of these."""
    return lambda text: "".join(line + "\n" for line in text.splitlines() if not any(w in line for w in what))


# --- IPv6 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"TALLY_COORD": "[fd77::1]:29888"},
        {"TALLY_COORD": "fd77::1"},
        {"TALLY_COORD": None, "MASTER_ADDR": "fd77::1"},
    ],
    ids=["brackets and port", "bare", "MASTER_ADDR"],
)
def test_ipv6(net, variables):
    said = sums(finish(start(net, ["w0", "w2"], ["c0"], **variables)), 2, 2, 3)
    port = 29888 if "29888" in str(variables) else 29777
    assert "rank 0 of 2 at fd77::1," in said and f"coordinator [fd77::1]:{port}," in said


def test_each_knows_the_name_by_another_family(net):
    """c0 finds only IPv6 behind the name, w2 only IPv4; rank 0 listens to both."""
    v6 = Names(net, "c0", without("10.77.0.1 "))
    v4 = Names(net, "w2", lambda text: text + "10.77.0.1 w0\n")
    with v6, v4:
        results = finish(start(net, ["w0", "w2"], ["c0"], TALLY_COORD=None, MASTER_ADDR="w0"))
    said = sums(results, 2, 2, 3)
    assert "coordinator 10.77.0.1:29777 (w0)" in said, said


def test_link_local_is_refused(net):
    refusals(
        finish(start(net, ["w0", "w2"], ["c0"], TALLY_COORD=None, MASTER_ADDR="fe80::1%eth0")[:2]),
        "fe80::1%eth0",
        "MASTER_ADDR",
        "link-local",
    )


# --- names ----------------------------------------------------------------------------------------------


def test_own_name_is_loopback(net):
    """Rank 0's machine calls itself 127.0.1.1; two ranks and a tallyd there, another rank elsewhere."""
    results = finish(
        start(net, ["w1", "w0"], ["c0", "w1"], ranks_per_host={"w1": 2, "w0": 1}, TALLY_COORD=None, MASTER_ADDR="w1")
    )
    said = sums(results, 3, 2, 4)
    assert "rank 0 of 3 at 10.77.0.2," in said, said


def test_name_with_addresses_that_lead_nowhere(net):
    """Nobody answers at the first addresses that the name has on w0 and c0."""
    worse = lambda text: "10.77.99.99 w1\n10.78.0.2 w1\n" + text
    with Names(net, "w0", worse), Names(net, "c0", worse):
        results = finish(start(net, ["w1", "w0"], ["c0"], TALLY_COORD=None, MASTER_ADDR="w1"))
    sums(results, 2, 2, 3)


def test_who_says_localhost_is_told(net):
    """A tallyd beside rank 0 that was told localhost listens where nobody else can reach it: it is told so, and the job
    starts without it."""
    local = lambda rank: {"TALLY_COORD": "localhost"} if rank is None else {}
    *ranks, daemon = finish(start(net, ["w1", "w0"], ["w1"], each=local, TALLY_COORD="w1"))
    said = sums(ranks, 2, 2, 2)
    refusals([daemon], "tallyd 0 on w1", "not as localhost", "TALLY_COORD")
    assert "the job goes on without it" in said, said


def test_names_that_come_late(net):
    """Nobody knows the name at first; all ask again until they do."""
    late = without("w0")
    with Names(net, "w0", late), Names(net, "c0", late), Names(net, "w2", late):
        processes = start(net, ["w0", "w2"], ["c0"], TALLY_COORD=None, MASTER_ADDR="w0")
        time.sleep(1)
        assert [p.poll() for p in processes] == [None] * 3, [p.output() for p in processes]
        for host in ("c0", "w2", "w0"):
            assert net.run(host, ["sh", "-c", "echo 10.77.0.1 w0 >> /etc/hosts"]).status == 0
        sums(finish(processes), 2, 2, 3)


def test_names_that_never_come(net):
    results = finish(
        start(net, ["w0", "w2"], TALLY_COORD=None, MASTER_ADDR="node-of-nobody", TALLY_JOIN_TIMEOUT="1")
    )
    refusals(results, "node-of-nobody", "MASTER_ADDR", "tried for 1 s")


# --- cards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iface", ["eth1", "10.78.0.0/16", "^eth0,^docker0", "fd77:1::/64,^eth0"])
def test_iface_chooses_the_card(net, iface):
    before = net.counters("eth1")
    said = sums(finish(start(net, ["w1", "w2"], TALLY_IFACE=iface)), 2, 2, 2)
    sent = {h: net.counters("eth1")[h][0] - before[h][0] for h in before}
    assert all(sent[h] > 3 << 20 for h in ("w1", "w2")), f"{sent}\n{said}"
    assert re.search(r"rank 0 of 2 at (10\.78\.0\.|fd77:1::)2,", said), said


def test_exclusions_keep_the_address_that_works(net):
    """Of the cards that an exclusion leaves it is the one towards the coordinator, not the first in some list."""
    said = sums(finish(start(net, ["w1", "w2"], ["c0"], TALLY_IFACE="^docker0")), 2, 2, 3)
    assert "rank 0 of 2 at 10.77.0.2," in said, said


@pytest.mark.parametrize("iface, why", [("eth7", "no interface that is up fits"), ("10.0.0.0/99", "is no network")])
def test_iface_that_is_not_there(net, iface, why):
    """On one rank; the other hears of it, and does not wait for its time-out."""
    results = finish(start(net, ["w0", "w2"], each=lambda rank: {"TALLY_IFACE": iface} if rank == 1 else {}))
    refusals(results, f"TALLY_IFACE={iface}", why)
    assert "rank 1: TALLY_IFACE" in results[0].output


# --- ports ----------------------------------------------------------------------------------------------


def listening(net, host):
    """(address, port) of every listening TCP socket."""
    lines = net.run(host, ["ss", "-Hltn"]).output.splitlines()
    return {tuple(line.split()[3].rsplit(":", 1)) for line in lines}


def test_ports_of_all_processes_are_confined(net):
    """While the last rank is missing all others listen."""
    env = {"TALLY_COORD": "10.77.0.1", "TALLY_PORT": "31000", "TALLY_PORTS": "31001-31003"}
    ranks, daemons = net.environment(["w0", "w2"], ["c0", "w0"], {"w0": 2, "w2": 1}, env)
    launch = lambda host, argv, one: net.start(host, argv, one, inherit=False)
    early = [launch("w0", push_pull(), one) for one in ranks[:2]]
    early += [launch(h, [tallyd(), "--once"], daemons[h]) for h in ("c0", "w0")]
    eventually(lambda: len(listening(net, "w0")) == 4 and len(listening(net, "c0")) == 1)
    on_w0, on_c0 = ({int(port) for _, port in listening(net, h)} for h in ("w0", "c0"))
    assert on_w0 == {31000, 31001, 31002, 31003} and on_c0 <= {31001, 31002, 31003}
    sums(finish([early[0], early[1], launch("w2", push_pull(), ranks[2]), *early[2:]]), 3, 2, 4)


def test_too_few_ports(net):
    """Two ranks of a machine, one port: the second says so, and all hear of it."""
    env = {"TALLY_PORTS": "31001-31001"}
    ranks, _ = net.environment(["w0", "w2"], [], {"w0": 2, "w2": 1}, env)
    launch = lambda host, one: net.start(host, push_pull(), one, inherit=False)
    early = [launch("w0", ranks[0]), launch("w2", ranks[2])]
    eventually(lambda: "31001" in str(listening(net, "w0")) and "31001" in str(listening(net, "w2")))
    results = finish([*early, launch("w0", ranks[1])])
    refusals(results, "no port from 31001 to 31001 is free on 10.77.0.1", "TALLY_PORTS")


# --- launchers ------------------------------------------------------------------------------------------


def test_slurm_step(net):
    """Ranks and the coordinator's host come from the step; a batch shell on the same nodes is a job of one."""
    slurm = {"TALLY_COORD": None, "MASTER_ADDR": None, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "w[0,2]", **NO_TORCHRUN}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "w[0,2]"}
    each = lambda rank: {"SLURM_PROCID": str(rank), **step}
    named = Names(net, "w2", lambda text: text + "10.77.0.1 w0\n")
    with named:
        said = sums(finish(start(net, ["w0", "w2"], each=each, **slurm)), 2, 2, 2)
    assert "coordinator 10.77.0.1:29777 (w0)" in said
    each = lambda rank: {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    sums(finish(start(net, ["w0"], each=each, **slurm)), 1, 1, 1)


@pytest.mark.parametrize("rank, size", [("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_mpi(net, rank, size):
    each = lambda number: {} if number is None else {rank: str(number), size: "2"}
    sums(finish(start(net, ["w0", "w2"], each=each, TALLY_COORD=None, **NO_TORCHRUN)), 2, 2, 2)
    each = lambda number: {rank: str(number), size: "2", "MASTER_ADDR": None}
    refusals(finish(start(net, ["w0", "w2"], each=each, TALLY_COORD=None, **NO_TORCHRUN)), "mpirun -x MASTER_ADDR=HOST")


def test_one_machine_needs_neither_address_nor_secret(net):
    """What mpirun says of the machine is enough; torchrun's name for it is not held against the job."""
    mpi = {"TALLY_COORD": None, "MASTER_ADDR": None, "TALLY_SECRET": None, "XDG_CONFIG_HOME": "/nowhere", **NO_TORCHRUN}
    each = lambda rank: {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    sums(finish(start(net, ["w0"], each=each, ranks_per_host=3, **mpi)), 3, 1, 1)
    torchrun = {"TALLY_COORD": None, "MASTER_ADDR": "w0", "TALLY_SECRET": None, "XDG_CONFIG_HOME": "/nowhere"}
    assert "127.0.0.1" in sums(finish(start(net, ["w0"], ranks_per_host=2, **torchrun)), 2, 1, 1)


# --- unequal numbers of ranks ---------------------------------------------------------------------------

RANK = """
import sys
import reference, tally
tally.init()
rank, machines = tally.rank(), [int(n) for n in sys.argv[1].split(",")]
assert tally.machine_count() == len(machines) and tally.local_size() == machines[tally.machine()]
for dtype in ("float32", "float64", "float16", "int16"):
    inputs = [reference.make(dtype, 100003, r, 7) for r in range(tally.size())]
    for op in ("Sum", "Average"):
        got = tally.push_pull(inputs[rank].copy(), op=getattr(tally, op), name=f"{dtype} {op}")
        wrong = reference.same(got, reference.reduce(dtype, op, inputs, machines=machines))
        assert wrong == 0, f"{dtype} {op}: {wrong} differ"
print("rank", rank, "of", tally.size(), "has the same bits")
tally.shutdown()
"""


def test_unequal_numbers_of_ranks(net):
    pytest.importorskip("numpy")
    counts = {"w1": 3, "w0": 1, "w2": 2}
    folders = [BUILD / "python", ROOT / "test" / "python"]
    env = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TALLY_COORD": "w1", "OMP_NUM_THREADS": "1"}
    with Names(net, "w2", lambda text: text + "10.77.0.2 w1\n"):
        done = net.job(
            [sys.executable, "-c", RANK, "3,1,2"],
            ["w1", "w0", "w2"],
            ["c0"],
            tallyd(),
            ranks_per_host=counts,
            env=env,
            timeout_s=PATIENCE_S,
        )
    assert done.ok, str(done)
    assert [f"rank {i} of 6 has the same bits" in r.output for i, r in enumerate(done.ranks)] == [True] * 6
    assert "sums along the tree over machines" in done.ranks[0].output
