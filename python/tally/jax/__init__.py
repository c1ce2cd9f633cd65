"""JAX's own collectives through Tally, on CPUs.

    import tally.jax
    tally.jax.initialize()          # before the first import of jax; takes jax.distributed.initialize()'s arguments

From then on `jax.lax.psum` and the like, sharded arrays and `jax.jit` go through Tally.  jaxlib loads libtally_mpi.so
as its MPI.  Of JAX itself initialize() changes two functions, which move what jaxlib gives to no MPI (_narrow.py).

SPDX-License-Identifier: Apache-2.0
"""

import ctypes.util
import os
import re
import sys

from .. import _address

__all__ = ["setup", "initialize"]

_LIBRARY = "libtally_mpi.so"


def _find_library():
    """The library's path or name: beside the libtally.so that this package loads, or where the system's loader looks."""
    from .. import _lib
    beside = os.path.join(os.path.dirname(os.path.abspath(_lib.blocking._name)), _LIBRARY)
    if os.path.exists(beside):
        return beside
    found = ctypes.util.find_library("tally_mpi")
    if not found:
        raise ImportError("there is no %s, neither at %s nor where the system's loader looks; build it with `make`, or "
                          "install the wheel" % (_LIBRARY, beside))
    return found


def _maps():
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return maps.read().splitlines()


def _is_loaded(library):
    """Whether this process has loaded the library."""
    return any(line.endswith("/" + library) for line in _maps())


def setup():
    """Make jaxlib load Tally as its MPI.  Call it before the first import of jax; initialize() does so.

    Raises RuntimeError if jaxlib has been loaded already without Tally, and ValueError if the environment asks for other
    collectives."""
    asked = os.environ.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "mpi")
    if asked != "mpi":
        raise ValueError("JAX_CPU_COLLECTIVES_IMPLEMENTATION is %r, so JAX would not use Tally; unset it" % asked)
    if _is_loaded(_LIBRARY):
        os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = asked
        if "jax" in sys.modules:  # which reads the environment when it is imported
            sys.modules["jax"].config.update("jax_cpu_collectives_implementation", asked)
        return
    if _is_loaded("libjax_common.so") or "jaxlib.xla_client" in sys.modules:
        raise RuntimeError("tally.jax.setup() comes too late: jaxlib, which chooses its MPI when it is loaded, has been "
                           "loaded already. Call tally.jax.setup() or tally.jax.initialize() before the first import of "
                           "jax")
    path = _find_library()
    other = os.environ.get("MPITRAMPOLINE_LIB")
    if other and other != path and not (os.path.exists(other) and os.path.samefile(other, path)):
        raise ValueError("MPITRAMPOLINE_LIB names another MPI, %s; unset it" % other)
    os.environ["MPITRAMPOLINE_LIB"] = path
    os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = asked


def _refuse_more_devices(jax):
    """Raise ValueError for more than one CPU device a process: XLA's MPI collectives would wait for each other."""
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    asked = [("jax_num_cpu_devices", getattr(jax.config, "jax_num_cpu_devices", None) or 1),
             ("--xla_force_host_platform_device_count in XLA_FLAGS", int(flags[-1]) if flags else 1)]
    for name, count in asked:
        if count > 1:
            raise ValueError("%s is %d, but Tally's collectives serve one CPU device a process: set it to 1 and start "
                             "more processes" % (name, count))


def _from_launcher(given):
    """Replace arguments that are None by the variables of torchrun and `tally run`.  JAX itself knows Slurm and Open MPI."""
    found = {"num_processes": os.environ.get("WORLD_SIZE"), "process_id": os.environ.get("RANK")}
    if None in found.values():
        return given
    merged = dict(given)
    for name, text in found.items():
        if merged.get(name) is None:
            merged[name] = int(text)
    if merged.get("coordinator_address") is None and "JAX_COORDINATOR_ADDRESS" not in os.environ:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ValueError("torchrun listens at MASTER_PORT itself; give coordinator_address, or set "
                             "JAX_COORDINATOR_ADDRESS, to a free port of the host of rank 0")
        if host and port:
            merged["coordinator_address"] = _address.join(host, port)
    return merged


def _export(process_id, num_processes, coordinator_address):
    """Export this process's rank and rank 0's host for Tally, which joins the job when JAX makes its first backend."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        size = os.environ.get("WORLD_SIZE")
        if size != str(num_processes):
            raise ValueError("WORLD_SIZE is %s, but JAX has %d processes; both must be the same job" % (size, num_processes))
    else:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(process_id), str(num_processes)
    if "TALLY_COORD" not in os.environ and "MASTER_ADDR" not in os.environ:
        os.environ["TALLY_COORD"] = _address.split(coordinator_address)[0]


def initialize(coordinator_address=None, num_processes=None, process_id=None, local_device_ids=None, **more):
    """setup(), then jax.distributed.initialize() with the same arguments.  From then on process_allgather() and
    broadcast_one_to_all() of jax.experimental.multihost_utils move float16, float8, float6 and float4, too.

    Arguments that are None come from `tally run` or torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or from where
    JAX finds them (Slurm, Open MPI, JAX_COORDINATOR_ADDRESS).  If no launcher gives Tally the rank and the number of
    ranks, JAX's process_id and num_processes are exported as RANK and WORLD_SIZE.  If neither TALLY_COORD nor MASTER_ADDR
    is set, TALLY_COORD becomes the host of coordinator_address.  Tally has a port of its own, TALLY_PORT.

    Raises the exceptions of setup(), and ValueError for more than one CPU device a process."""
    setup()
    import jax
    _refuse_more_devices(jax)
    jax.distributed.initialize(**_from_launcher(dict(
        coordinator_address=coordinator_address, num_processes=num_processes, process_id=process_id,
        local_device_ids=local_device_ids, **more)))
    from jax._src.distributed import global_state

    from . import _narrow
    _export(global_state.process_id, global_state.num_processes, global_state.coordinator_address)
    _narrow.replace()
