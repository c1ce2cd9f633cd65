"""The wheel of `pip install .`, in an environment that has nothing else of Tally."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))

pytest.importorskip("mesonpy", reason="meson-python is not installed, which builds the wheel")


def run(*command, **more):
    env = {name: value for name, value in os.environ.items()
           if name != "PYTHONPATH" and not name.startswith("TALLY_") and name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=env, timeout=500, **more)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--disable-pip-version-check",
        "-Cbuild-dir=%s" % (BUILD / "wheel"), "-w", folder, ROOT)
    wheels = list(folder.iterdir())
    assert len(wheels) == 1
    return wheels[0]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a new environment with the wheel, and what this one has beside Tally."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "others.pth").write_text("".join(
        path + "\n" for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    run(folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check",
        wheel)
    return folder / "bin"


def test_one_wheel_for_every_python(wheel):
    assert "-py3-none-linux_" in wheel.name
    names = [name.split("/", 2)[-1] for name in zipfile.ZipFile(wheel).namelist()]
    for wanted in ("tally/libtally.so", "tally/libtally_mpi.so", "tally/_operations.py", "tally/torch/group/group.py",
                   "tally/jax/__init__.py", "tally", "tallyd", "man1/tally.1", "man7/tally-params.7",
                   "man8/tallyd.8", "man3/tally_push_pull.3"):
        assert any(name == wanted or name.endswith("/" + wanted) for name in names), (wanted, names)
    assert not any("test" in name or name.endswith(".h") for name in names)
    metadata = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt")]
    assert len(metadata) == 1 and metadata[0].endswith(".dist-info/entry_points.txt"), metadata


@pytest.mark.parametrize("program", ("tally", "tallyd"))
def test_programs_need_no_libtally(installed, program):
    assert "libtally" not in run("ldd", installed / program)
    assert run(installed / program, "--version")


def test_manual_pages(installed):
    """Where `man` looks for a folder of the PATH."""
    for page in ("man1/tally.1", "man3/tally_push_pull.3", "man7/tally-params.7", "man8/tallyd.8"):
        assert (installed.parent / "share" / "man" / page).read_text(encoding="utf-8").startswith(".")


SCRIPT = """
    import os
    import sys
    import torch
    import torch.distributed as dist

    assert "tally" not in sys.modules, "importing torch imports nothing of Tally"
    if not hasattr(torch, "_import_device_backends"):
        import tally.torch
    rank = int(os.environ["RANK"])
    dist.init_process_group("tally", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    x = torch.full((1000,), rank + 1.0)
    dist.all_reduce(x)
    assert x.eq(3).all()
    import tally
    assert tally.__file__.startswith(sys.prefix), tally.__file__
    dist.destroy_process_group()
    print("done")
"""


def test_runs_from_the_wheel(installed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    output = run(installed / "tally", "run", "-n", "2", "-k", "1", "--", installed / "python", script,
                 tmp_path / "store", cwd=tmp_path)
    assert output.count("] done\n") == 2


JAX_SCRIPT = """
    import tally.jax
    tally.jax.initialize()
    import jax
    import numpy as np
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    x = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, P("x")), np.ones((1, 1000), np.uint64))
    total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))(x)
    assert (np.asarray(total.addressable_shards[0].data) == 2).all()
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libtally" in line}
    import sys
    assert len(loaded) == 2 and all(path.startswith(sys.prefix) for path in loaded), loaded
    print("done")
"""


@pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="there is no JAX")
def test_jax_from_the_wheel(installed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(JAX_SCRIPT))
    output = run(installed / "tally", "run", "-n", "2", "--", installed / "python", script, cwd=tmp_path)
    assert output.count("] done\n") == 2
