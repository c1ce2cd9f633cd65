"""The source tree's manners: it names no machine's own folders, its C is formatted, its files open with a word on
what they are."""

import re
import shutil
import subprocess

import pytest
from tree import ROOT, files

# Somebody's home, or the folder in which somebody builds.
MACHINE_PATH = re.compile(r"(?<![\w.$}\])*/-])/(?:home|root|work|Users|mnt|media)/[\w.-]+")


def text_of(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_paths_of_one_machine():
    found = []
    for path in files():
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_the_pattern_finds_what_it_is_for():
    slash = "/"
    assert MACHINE_PATH.search(f"cd {slash}home{slash}alice/tally")
    assert MACHINE_PATH.search(f'"{slash}root{slash}.cache"')
    assert not MACHINE_PATH.search("test/root/of and https://example.org/home/page and src/work/queue.c")


@pytest.mark.skipif(not shutil.which("clang-format"), reason="there is no clang-format")
def test_c_is_formatted():
    sources = files("*.c", "*.h")
    done = subprocess.run(
        ["clang-format", "--dry-run", "--Werror", "--style=file", *sources],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, "`make format` mends it:\n" + done.stderr[:6000]


def test_sources_open_with_what_they_are():
    opening = {".c": "/*", ".h": "/*", ".py": ('"""', "#")}
    assert [
        str(p.relative_to(ROOT))
        for p in files("*.c", "*.h", "*.py")
        if text_of(p).strip() and not text_of(p).startswith(opening[p.suffix])
    ] == []
