"""PyTorch finds the backend where the package lies without pip: in the build, and where `make install` puts it."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))

pytest.importorskip("torch", reason="there is no PyTorch")

SCRIPT = """
import sys
import torch
import torch.distributed as dist

if not hasattr(torch, "_import_device_backends"):
    import tally.torch
dist.init_process_group("tally", init_method="file://" + sys.argv[1], rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
import tally
import tally.jax
print(tally.__file__, tally._lib.blocking._name, tally.jax._find_library(), sep="\\n")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder with the package, as `make install DESTDIR=…` leaves it."""
    root = tmp_path_factory.mktemp("root")
    meson = "/usr/bin/meson" if os.access("/usr/bin/meson", os.X_OK) else shutil.which("meson")
    subprocess.run([meson, "install", "-C", BUILD / "meson", "--no-rebuild"], env={**os.environ, "DESTDIR": str(root)},
                   check=True, stdout=subprocess.DEVNULL, timeout=120)
    return next(root.rglob("tally_autoload.py")).parent


@pytest.fixture(params=("in place", "installed"))
def place(request):
    return BUILD / "python" if request.param == "in place" else request.getfixturevalue("installed")


def test_torch_finds_the_backend(place, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
    done = subprocess.run([sys.executable, script, tmp_path / "store"], env={**env, "PYTHONPATH": str(place)},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    package, *libraries = done.stdout.splitlines()
    assert package == str(place / "tally" / "__init__.py")
    top = BUILD if place == BUILD / "python" else place / "tally"
    assert all(pathlib.Path(library).is_relative_to(top) for library in libraries), libraries


def test_metadata(place):
    found = list(importlib.metadata.distributions(name="tally", path=[str(place)]))
    assert len(found) == 1
    assert found[0].version and found[0].read_text("INSTALLER") == "make\n" and found[0].read_text("RECORD") is None
    assert {(e.group, e.name, e.value) for e in found[0].entry_points} == {
        ("torch.backends", "tally", "tally_autoload:register"),
        ("torch.distributed.backends", "tally", "tally_autoload:register")}


@pytest.mark.parametrize("module", ("tally.py", "tally/__init__.py"))
def test_a_module_that_hides_the_package_is_named(tmp_path, module):
    """Without running it."""
    pytest.importorskip("torch")
    import torch
    if not hasattr(torch, "_import_device_backends"):
        pytest.skip("this PyTorch does not look for backends")
    hides, script = tmp_path / module, tmp_path / "script.py"
    hides.parent.mkdir(exist_ok=True)
    hides.write_text("raise SystemExit('it has run')")
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python")}
    done = subprocess.run([sys.executable, script, tmp_path / "store"], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert f"ImportError: {hides} hides the Python package tally: rename it" in done.stderr
