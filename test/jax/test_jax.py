"""JAX's own collectives over Tally: jobs of 2, 3 and 4 processes, unmodified JAX, against NumPy bit by bit."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs.py"
PATIENCE_S = 280

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="there is no JAX")


def environment(**more):
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("TALLY_", "JAX_", "MPITRAMPOLINE_"))
           and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "XLA_FLAGS")}
    env.update(PYTHONPATH=str(BUILD / "python"), JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", **more)
    return env


def job(ranks, *program, tallyd=0, machines=None, status=0, **more):
    """What the job's processes print.  status: of `tally run`; None: any."""
    options = ["-n", ranks, "-k", tallyd, *(["--machines", machines] if machines else [])]
    command = [BUILD / "bin" / "tally", "run", *options, "--", sys.executable, PROGRAMS, *program]
    done = subprocess.run([str(word) for word in command], env=environment(**more), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S)
    assert status in (done.returncode, None), done.stdout[-8000:]
    return done.stdout


def all_ended(output, ranks, name):
    assert len(re.findall(r"rank \d: %s ended" % name, output)) == ranks, output[-8000:]


def in_turn(*values):
    """One more of its kind, whose ranks compile for seconds."""
    return pytest.param(*values, marks=pytest.mark.long(turn=4))


@pytest.mark.parametrize("ranks, tallyd, machines", ((3, 1, None), in_turn(2, 0, None), in_turn(3, 0, None), in_turn(4, 0, None),
                                                     in_turn(4, 2, None), in_turn(4, 0, 2)))
def test_collectives(ranks, tallyd, machines):
    output = job(ranks, "collectives", tallyd=tallyd, machines=machines)
    all_ended(output, ranks, "collectives")
    assert "is done after" in output, "Tally was not asked at all"
    halves = re.findall(r"rank 0: \w+ of (?:b?float16): (?:exact|refused by JAX)", output)
    assert len(halves) == 10, output[-8000:]


def test_data_that_only_move():
    all_ended(job(2, "moved"), 2, "moved")


@pytest.mark.parametrize("ranks", (2, in_turn(4)))
def test_reduce_scatter_of_large_chunks(ranks):
    """150 times 4 MiB for each rank, which Gloo gets wrong."""
    all_ended(job(ranks, "scatter", 150, 4096), ranks, "scatter")


@pytest.mark.parametrize("optimizer", ("plain", in_turn("optax")))
def test_training(optimizer):
    if importlib.util.find_spec(optimizer) is None and optimizer != "plain":
        pytest.skip("there is no %s" % optimizer)
    bits = set()
    for _ in range(2):
        output = job(4, "train", optimizer)
        all_ended(output, 4, "train")
        bits |= set(re.findall(r"bits (\w+)", output))
    assert len(bits) == 1, bits


def test_asynchronous_dispatch():
    all_ended(job(3, "dispatch"), 3, "dispatch")


def test_a_rank_dies():
    output = job(3, "die", 1, status=137)
    told = re.findall(r"rank (\d): told (.*)", output)
    assert told and all("rank 1" in sentence for _, sentence in told), output[-8000:]


def test_a_communicator_that_one_rank_does_not_make():
    # Rank 1 is ended by JAX's service, which the others leave.
    output = job(3, "missing", status=None, TALLY_TIMEOUT="4")
    told = dict(re.findall(r"rank (\d): told (.*)", output))
    assert set(told) == {"0", "2"} and all("rank 1" in sentence for sentence in told.values()), output[-8000:]
    assert all("on all ranks before a program that only some run" in sentence for sentence in told.values()), told


# --- the names -------------------------------------------------------------------------------------------------------


def test_every_name_that_jaxlib_asks_for():
    """MPItrampoline's names stand as strings in jaxlib; it ends the process if one does not resolve."""
    library = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent / "libjax_common.so"
    if not library.exists():
        pytest.skip("this jaxlib has no libjax_common.so")
    asked = set()
    with open(library, "rb") as file:
        rest = b""
        while block := file.read(1 << 24):
            asked |= set(re.findall(rb"\0((?:MPIX?ABI|mpiwrapper|mpiabi)_\w+)\0", (rest + block).replace(b"\0", b"\0\0")))
            rest = block[-200:]
    asked = {name.decode() for name in asked if b"loaded" not in name}
    assert len(asked) >= 640, len(asked)
    table = subprocess.run(["nm", "-D", "--defined-only", BUILD / "lib" / "libtally_mpi.so"], capture_output=True,
                           text=True, check=True).stdout
    assert asked - {line.split()[-1] for line in table.splitlines()} == set()


# --- tally.jax -------------------------------------------------------------------------------------------------------


def alone(script, status=0, **more):
    done = subprocess.run([sys.executable, "-c", script], env=environment(**more), capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_too_late():
    said = alone("import jax, tally.jax; tally.jax.setup()", status=1)
    assert "RuntimeError" in said and "before the first import of jax" in said


def test_setup_first():
    said = alone("import tally.jax; tally.jax.setup(); tally.jax.setup(); import jax; tally.jax.setup(); "
                 "print(jax.config.jax_cpu_collectives_implementation)")
    assert said.strip() == "mpi"


def test_other_collectives_are_asked_for():
    said = alone("import tally.jax; tally.jax.setup()", status=1, JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")
    assert "'gloo'" in said
    said = alone("import tally.jax; tally.jax.setup()", status=1, MPITRAMPOLINE_LIB="/usr/lib/libmpiwrapper.so")
    assert "/usr/lib/libmpiwrapper.so" in said


@pytest.mark.parametrize("more, name", (
    ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "xla_force_host_platform_device_count"),
    ({"JAX_NUM_CPU_DEVICES": "2"}, "jax_num_cpu_devices")))
def test_more_devices_are_refused(more, name):
    said = alone("import tally.jax; tally.jax.initialize('127.0.0.1:1', 2, 0)", status=1, **more)
    assert "ValueError" in said and name in said and "one CPU device" in said


def test_arguments_and_launchers():
    """Without JAX: what is taken from whom."""
    script = """
import os, tally.jax as t
nothing = dict(coordinator_address=None, num_processes=None, process_id=None)
assert t._from_launcher(dict(nothing)) == nothing
os.environ.update(RANK="3", WORLD_SIZE="8", MASTER_ADDR="10.0.0.1", MASTER_PORT="500")
assert t._from_launcher(dict(nothing)) == dict(coordinator_address="10.0.0.1:500", num_processes=8, process_id=3)
assert t._from_launcher(dict(nothing, coordinator_address="a:1", process_id=0)) == dict(
    coordinator_address="a:1", num_processes=8, process_id=0)
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
try:
    t._from_launcher(dict(nothing))
except ValueError as error:
    assert "torchrun" in str(error)
else:
    raise AssertionError
try:
    t._export(1, 4, "10.0.0.1:500")
except ValueError as error:
    assert "WORLD_SIZE is 8" in str(error)
else:
    raise AssertionError
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
    del os.environ[name]
t._export(1, 4, "[fe80::1]:500")
assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TALLY_COORD"]) == ("1", "4", "fe80::1")
"""
    alone(script)


def test_initialize_with_arguments():
    """No launcher: two processes that say what jax.distributed.initialize() asks for, in the other order of ranks."""
    script = """
import os, sys
import tally.jax
rank = int(sys.argv[1])
if sys.argv[3] == "turned":
    os.environ.update(RANK=str(1 - rank), WORLD_SIZE="2")
tally.jax.initialize("127.0.0.1:" + sys.argv[2], 2, rank)
import jax, numpy as np
P = jax.sharding.PartitionSpec
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
x = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, P("x")), np.full((1, 3), rank, np.int32))
y = jax.jit(jax.shard_map(lambda a: jax.lax.all_gather(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)
assert np.asarray(y.addressable_shards[0].data).ravel().tolist() == [0] * 3 + [1] * 3
"""
    import socket
    for order in ("straight", "turned"):
        ports = []
        for _ in range(2):
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                ports.append(listener.getsockname()[1])
        env = environment(TALLY_PORT=str(ports[1]))
        processes = [subprocess.Popen([sys.executable, "-c", script, str(rank), str(ports[0]), order], env=env,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
        try:
            for process in processes:
                said, _ = process.communicate(timeout=PATIENCE_S)
                assert process.returncode == 0, said
        finally:
            for process in processes:
                process.kill()
