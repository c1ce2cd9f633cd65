"""The documents' examples run as they stand.

README.md and docs/*.md mark fenced blocks that a reader can run:

    ```python file=NAME        the block is saved as NAME
    ```sh run                  the block runs in the folder of the saved files
    ```sh run in=repository    the block runs in the root of the repository
    ```text prints             the last run printed each of these lines; "…" stands for anything

A document's blocks run in order, in a folder of their own, with `tally`, `tallyd` and the package as an installation
would have them.  Their `python3` is the warm Python (test/python/warm.py); `torchrun` starts new interpreters.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "python"))
import warm  # noqa: E402

BLOCK = re.compile(r"^```(\w+) +(\S[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = {"file", "run", "in", "prints"}


def blocks(text):
    """(line number, {word: value}, body) of each marked block."""
    found = []
    for block in BLOCK.finditer(text):
        words = dict((w.split("=", 1) + [""])[:2] for w in block[2].split())
        line = text.count("\n", 0, block.start()) + 1
        if not words.keys() <= WORDS:
            raise ValueError(f"line {line}: unknown mark '{block[2]}'")
        found.append((line, words, block[3]))
    return found


def missing(wanted, output):
    """The lines of `wanted` that `output` lacks."""
    return [line for line in wanted.splitlines()
            if not re.search(".*?".join(map(re.escape, line.split("…"))), output)]


def environment(folder):
    python = folder / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nexec {shlex.join(warm.python())} \"$@\"\n", encoding="utf-8")
    python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TALLY_", "MASTER_", "SLURM_"))}
    return {**env, "PYTHONPATH": str(ROOT / "build" / "python"), "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([*map(str, (python.parent, ROOT / "build" / "bin", pathlib.Path(sys.executable).parent)),
                                     os.environ["PATH"]])}


DOCUMENTS = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
             if blocks(p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_blocks_run(document, tmp_path):
    env, output = environment(tmp_path), ""
    for line, words, body in blocks(document.read_text(encoding="utf-8")):
        where = f"{document.name}:{line}"
        if "file" in words:
            (tmp_path / words["file"]).write_text(body, encoding="utf-8")
        elif "run" in words:
            done = subprocess.run(["sh", "-eu", "-c", body], cwd=ROOT if words.get("in") else tmp_path, env=env,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, timeout=300, check=False)
            output = done.stdout
            assert done.returncode == 0, f"{where}: exit status {done.returncode}\n{output}"
        else:
            assert not missing(body, output), f"{where}: not printed: {missing(body, output)}\nbut:\n{output}"


def test_marks_are_read():
    text = "a\n```python file=x.py\nprint(1)\n```\n```sh\nnot run\n```\n```sh run\npython3 x.py\n```\n"
    assert blocks(text) == [(2, {"file": "x.py"}, "print(1)\n"), (8, {"run": ""}, "python3 x.py\n")]
    assert missing("port … is (free)\nnone\n", "the port 17 is (free) now\n") == ["none"]
    with pytest.raises(ValueError, match="line 1: unknown mark 'ruin'"):
        blocks("```sh ruin\n```\n")


def test_the_readme_is_among_them():
    assert DOCUMENTS[0].name == "README.md"
