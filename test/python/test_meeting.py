"""How processes that are started by hand find each other: addresses, a port that is held, and groups with stores of their own."""

import socket
import subprocess
import sys

import jobs
import pytest
import warm

FOREIGN = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True); input()"


def own_address():
    """One by which other machines see this one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            return None
        return probe.getsockname()[0]


def by_hand(tmp_path, script, *processes, env=None, timeout=120):
    """Run a script once for each list of arguments, without a secret.  Returns [(status, output)]."""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = jobs.environment({"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), **(env or {})})
    running = [subprocess.Popen([*warm.python(), str(path), *map(str, arguments)], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
               for arguments in processes]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in running]
        return [(process.returncode, output) for process, output in zip(running, outputs)]
    finally:
        for process in running:
            jobs.end(process)


# --- addresses ------------------------------------------------------------------------------------------------------

SUM = """
import datetime, os, sys, torch, torch.distributed as dist, tally.torch
rank, way, host, port = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
limit = datetime.timedelta(seconds=60)
if way == "store":
    dist.init_process_group("tally", store=dist.TCPStore(host, port, 2, rank == 0), rank=rank, world_size=2, timeout=limit)
elif way == "method":
    dist.init_process_group("tally", init_method="tcp://%s:%d" % ("[%s]" % host if ":" in host else host, port), rank=rank,
                            world_size=2, timeout=limit)
else:
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("tally", timeout=limit)
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [2] * 3
dist.destroy_process_group()
print("good")
"""


@pytest.mark.parametrize("way", ["store", "method", "variables"])
@pytest.mark.parametrize("host", ["::1", "0.0.0.0", "own"])
def test_addresses_of_one_machine(tmp_path, way, host):
    host = own_address() if host == "own" else host
    if host is None or (host == "::1" and not socket.has_ipv6):
        pytest.skip("this machine has no such address")
    port = jobs.free_port()
    env = {} if way != "variables" else {"TALLY_PORT": str(jobs.free_port())}
    for status, output in by_hand(tmp_path, SUM, (0, way, host, port), (1, way, host, port), env=env):
        assert status == 0 and "good" in output, output


def test_errors_name_where_the_address_came_from(tmp_path):
    script = """
import datetime, sys, torch.distributed as dist, tally.torch
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
sys.modules["tally.torch.meeting"]._host_of = lambda store: "no-such-host.invalid"
store.set_timeout(datetime.timedelta(seconds=3))
try:
    dist.init_process_group("tally", store=store, rank=rank, world_size=2)
except RuntimeError as error:
    assert "no-such-host.invalid" in str(error) and "init_method" in str(error), error
    assert "TALLY_COORD" not in str(error), error
    print("good")
"""
    for status, output in by_hand(tmp_path, script, *[(rank, tmp_path / "store") for rank in range(2)]):
        assert status == 0 and "good" in output, output


# --- a port that another program holds ----------------------------------------------------------------------------


@pytest.fixture
def held():
    """(port, process) of a program that is not Tally's."""
    process = subprocess.Popen([sys.executable, "-S", "-c", FOREIGN, "127.0.0.1"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    yield int(process.stdout.readline()), process
    process.communicate("\n", timeout=20)


def test_a_held_port_is_heard_of_through_the_store(tmp_path, held):
    """Its holder is never accepted as an earlier coordinator, for whose end rank 0 would wait."""
    port, holder = held
    script = """
import os, sys, torch.distributed as dist, tally.torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=sys.argv[1], WORLD_SIZE="2", TALLY_PORT=sys.argv[3])
try:
    dist.init_process_group("tally")
except tally.Error as error:
    print(error, error.errno)
"""
    arguments = jobs.free_port(), port
    results = by_hand(tmp_path, script, (0, *arguments), (1, *arguments))
    for status, output in results:
        assert status == 0 and "held by process %d of " % holder.pid in output, output
        assert "is rank 0 started" not in output and "trying for" not in output, output
    assert "rank 0 cannot open the job" in results[1][1], results


def test_a_held_port_without_a_store(tmp_path, held):
    port, holder = held
    script = """
import os, sys, tally
os.environ.update(MASTER_ADDR="127.0.0.1", RANK=sys.argv[1], WORLD_SIZE="2", TALLY_PORT=sys.argv[2], TALLY_JOIN_TIMEOUT="3")
try:
    tally.init()
except tally.Error as error:
    print(error, error.errno)
"""
    for status, output in by_hand(tmp_path, script, (0, port), (1, port)):
        assert status == 0 and "held by process %d of " % holder.pid in output, output
        assert "is rank 0 started" not in output and "firewall" not in output and "trying for" not in output, output


FORWARDER = """
import socket, sys, threading
door = socket.create_server(("127.0.0.1", 0))
print(door.getsockname()[1], flush=True)


def copy(source, target):
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def forward():
    while True:
        near = door.accept()[0]
        try:
            far = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=copy, args=ends, daemon=True).start()


threading.Thread(target=forward, daemon=True).start()
input()
"""


@pytest.mark.parametrize("init", ["import tally; tally.init()",
                                  "import tally.torch, torch.distributed as dist; dist.init_process_group('tally'); "
                                  "dist.barrier(); dist.destroy_process_group()"])
def test_a_coordinator_behind_a_forwarder(tmp_path, init):
    """As through ssh -L: the port at rank 0's own address is held by a program that is not Tally's, and leads to one."""
    coordinator = jobs.free_port()
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "TALLY_COORD": "127.0.0.1:%d" % coordinator}
    running = [subprocess.Popen([jobs.BUILD / "bin" / "tallyd", "--coordinator"], env=jobs.environment(env),
                                start_new_session=True)]
    try:
        running.append(subprocess.Popen([sys.executable, "-S", "-c", FORWARDER, str(coordinator)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, start_new_session=True))
        port = int(running[1].stdout.readline())
        script = """
import os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=sys.argv[1], WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                  TALLY_COORD="localhost:" + sys.argv[3])
%s
print("good")
""" % init
        meeting = jobs.free_port()
        for status, output in by_hand(tmp_path, script, (0, meeting, port), (1, meeting, port)):
            assert status == 0 and "good" in output, output
    finally:
        for process in running:
            jobs.end(process)


# --- the making of a group ------------------------------------------------------------------------------------------


def test_an_error_in_the_making_of_a_group(tmp_path):
    """It has the script's line, and no name that only Tally knows."""
    script = """
import os, sys, tally_autoload, torch.distributed as dist
tally_autoload.register()  # as PyTorch does with an installed package
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=sys.argv[1], WORLD_SIZE="2")
dist.init_process_group("tally")
if sys.argv[1] == "1":
    os._exit(3)
try:
    dist.new_group([0, 1])  # the line
except RuntimeError as error:
    print(error)
"""
    line = 1 + script[:script.index("# the line")].count("\n")
    port = jobs.free_port()
    output = by_hand(tmp_path, script, (0, port), (1, port))[0][1]
    assert "script.py:%d)" % line in output and "'meet'" not in output and "tally_autoload" not in output, output


# --- a group with a store of its own -----------------------------------------------------------------------------

BESIDE = """
import datetime, inspect, os, sys, time, torch, torch.distributed as dist, tally.torch
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

role, rank, world_port, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
limit = datetime.timedelta(seconds=60)
options = next(name for name in ("backend_options", "pg_options")
               if name in inspect.signature(_new_process_group_helper).parameters)


def make(store, name, rank, size=2):
    '''As frameworks for reinforcement learning do.'''
    group, _ = _new_process_group_helper(size, rank, [], "tally", PrefixStore(name, store), group_name=name, timeout=limit,
                                         **{options: None})
    _world.pg_group_ranks[group] = {one: one for one in range(size)}
    return group


def world_sum(expected):
    x = torch.ones(1000) * (rank + 1)
    dist.all_reduce(x)
    assert x.eq(expected).all(), x


if role == "trainer":
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="run",
                      TORCHELASTIC_RESTART_COUNT="1")
    dist.init_process_group("tally", init_method="tcp://127.0.0.1:" + world_port, rank=rank, world_size=2, timeout=limit)
elif role == "engine of a world":
    dist.init_process_group("tally", init_method="tcp://127.0.0.1:%d" % (int(world_port) + 1), rank=0, world_size=1)
if role == "trainer" and rank == 1:
    world_sum(3)
    world_sum(3)
    dist.destroy_process_group()
    print("good")
    raise SystemExit

mine = 0 if role == "trainer" else 1
store = dist.TCPStore("127.0.0.1", port, 2, mine == 0, limit)
groups = [make(store, name, mine) for name in ("weights", "again")]
for group in groups:
    assert (group.rank(), group.size()) == (mine, 2)
    weights = torch.arange(300_000.) if mine == 0 else torch.zeros(300_000)
    dist.broadcast(weights, 0, group=group)
    assert weights.equal(torch.arange(300_000.))
works = []
for step in range(5):
    if mine == 0 and step == 2:
        world_sum(3)  # the world's calls and those of the groups do not disturb each other
    tensors = [torch.ones(70_000) * (step + mine) for _ in groups]
    works.append((tensors, [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(tensors, groups)]))
for step, (tensors, pending) in enumerate(works):
    for one, work in zip(tensors, pending):
        work.wait()
        assert one.eq(2 * step + 1).all()
lists = [torch.zeros(2), torch.zeros(2)]
dist.all_gather(lists, torch.ones(2) * mine, group=groups[0])
assert [one.tolist() for one in lists] == [[0, 0], [1, 1]]
dist.barrier(group=groups[1])
dist.destroy_process_group(groups[0])
try:
    groups[0].allreduce([torch.ones(1)])
except RuntimeError as error:
    assert "destroyed" in str(error), error
else:
    raise AssertionError("it still works")
x = torch.ones(3)
dist.all_reduce(x, group=groups[1])
assert x.tolist() == [2, 2, 2]
once_more = make(store, "weights", mine)  # the name is free again
dist.all_reduce(x, group=once_more)
assert x.tolist() == [4, 4, 4]
if role == "trainer":
    world_sum(3)
    dist.destroy_process_group()
elif role == "engine of a world":
    world_sum(rank + 1)
    dist.destroy_process_group()
else:
    assert not tally.is_initialized()
    for group in (groups[1], once_more):
        group.shutdown()
print("good")
"""


@pytest.mark.parametrize("engine", ["engine", "engine of a world"])
def test_groups_between_a_trainer_and_an_engine(tmp_path, engine):
    ports = jobs.free_port(), jobs.free_port()
    for status, output in by_hand(tmp_path, BESIDE, ("trainer", 0, *ports), ("trainer", 1, *ports), (engine, 0, *ports)):
        assert status == 0 and "good" in output, output


def test_a_group_beside_fails_alone(tmp_path):
    """The engine ends by an exception: the trainer's calls with it raise its reason, and the trainer's world goes on."""
    script = BESIDE.partition("mine = 0")[0] + """
mine = 0 if role == "trainer" else 1
group = make(dist.TCPStore("127.0.0.1", port, 2, mine == 0, limit), "weights", mine)
x = torch.ones(3)
if role != "trainer":
    dist.all_reduce(x, group=group)
    raise ValueError("no more prompts")
try:
    while True:  # the first may end here after the engine has
        dist.all_reduce(x, group=group)
except tally.Error as error:
    assert "no more prompts" in str(error), error
world_sum(3)
world_sum(3)
dist.destroy_process_group()
print("good")
"""
    ports = jobs.free_port(), jobs.free_port()
    results = by_hand(tmp_path, script, ("trainer", 0, *ports), ("trainer", 1, *ports), ("engine", 0, *ports))
    for status, output in results[:2]:
        assert status == 0 and "good" in output, output


def test_groups_from_several_threads(tmp_path):
    """Two processes make two groups in opposite orders, each in a thread of its own, and the environment stays theirs."""
    script = """
import datetime, os, sys, threading, torch, torch.distributed as dist, tally.torch
from torch.distributed.distributed_c10d import PrefixStore
mine, port = int(sys.argv[1]), int(sys.argv[2])
limit = datetime.timedelta(seconds=20)
own = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RESTART_COUNT": "1"}
os.environ.update(own)
join = sys.modules["tally.torch.meeting"]
stores = [dist.TCPStore("127.0.0.1", port, 2, mine == 0, limit)]
stores.append(dist.TCPStore("127.0.0.1", port, 2, False, limit))
turn = threading.Event()
failed = []


def make(number):
    try:
        if number != mine:
            turn.wait()
        jobs[number] = join.join_beside(PrefixStore("g%d" % number, stores[number]), "g%d" % number, mine, 2)
        assert jobs[number].rank == mine
    except Exception as error:
        failed.append(error)


jobs = {}
threads = [threading.Thread(target=make, args=(number,)) for number in (0, 1)]
for thread in threads:
    thread.start()
# The second group of each begins while the first waits for the other process, which begins with the other one.
threads[mine].join(2)
seen = {name: os.environ.get(name) for name in own}
turn.set()
for thread in threads:
    thread.join()
assert not failed, failed
assert seen == own, seen
assert {name: os.environ.get(name) for name in own} == own
for job in jobs.values():
    job.close()
print("good")
"""
    port = jobs.free_port()
    for status, output in by_hand(tmp_path, script, (0, port), (1, port)):
        assert status == 0 and "good" in output, output


def test_advice_for_several_machines_is_not_given_on_loopback(tmp_path):
    script = """
import os, sys, tally
os.environ.update(MASTER_ADDR=sys.argv[1], RANK="0", WORLD_SIZE="2", TALLY_PORT=sys.argv[2], TALLY_JOIN_TIMEOUT="1")
try:
    tally.init()
except tally.Error as error:
    print(error)
"""
    for host in ("127.0.0.1", "localhost", own_address()):
        if host is not None:
            (status, output), = by_hand(tmp_path, script, (host, jobs.free_port()))
            assert status == 0 and "rank 1 did not join" in output, output
            assert ("needs a secret" in output) == (host == own_address()), output
