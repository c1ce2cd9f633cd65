"""The cheap parts of `make lint`: ruff over the Python files, codespell over all.  scripts/setup.sh puts both into build/lint."""

import subprocess

import pytest
from tree import ROOT

TOOLS = ROOT / "build" / "lint" / "bin"


def run(tool, *arguments, **options):
    if not (TOOLS / tool).exists():
        pytest.skip(f"there is no {tool}: `scripts/setup.sh test` installs it where it can be had")
    return subprocess.run([TOOLS / tool, *arguments], cwd=ROOT, capture_output=True, text=True, **options)


@pytest.mark.parametrize("command", [("ruff", "check", "--quiet", "--no-cache"), ("codespell",)], ids=lambda c: c[0])
def test_finds_nothing(command):
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command, text", [(("ruff", "check", "--no-cache", "-"), "import os\n"), (("codespell", "-"), "reci" "eve\n")],
                         ids=["ruff", "codespell"])
def test_would_find_something(command, text):
    done = run(*command, input=text)
    assert done.returncode != 0 and ("F401" in done.stdout or "receive" in done.stdout), done.stdout + done.stderr
