"""The records of docs/why/: four parts, short, listed in the index, and what they name is there."""

import re
import subprocess
import textwrap

import pytest
from tree import ROOT

WHY = ROOT / "docs" / "why"
PARTS = ("Decision.", "Why.", "Evidence.", "Rejected")
MOST_LINES = 12


def records():
    for path in sorted(WHY.glob("*.md")):
        for text in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            title, _, body = text.partition("\n")
            yield pytest.param(body, id=f"{path.stem}: {title}")


def tracked():
    # GIT_DIR in the environment would name another repository.
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in names.stdout.splitlines()] or [p for p in ROOT.rglob("*") if p.is_file()]


@pytest.mark.parametrize("body", list(records()))
def test_record_has_four_parts_and_is_short(body):
    paragraphs = [" ".join(p.split()) for p in body.split("\n\n") if p.strip()]
    assert [part for part in PARTS if not any(p.startswith(f"**{part}") for p in paragraphs)] == []
    wrapped = [line for p in paragraphs if p.startswith("**") for line in textwrap.wrap(p, 120)]
    assert len(wrapped) <= MOST_LINES


def test_index_lists_each_file():
    listed = re.findall(r"^\| \[(\w+\.md)\]\(\1\)", (WHY / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in WHY.glob("*.md") if p.name != "README.md")


def test_what_they_name_is_there():
    """Paths from the root, tests by name (`…` stands for the rest), functions and constants."""
    sources = [p for p in tracked() if p.suffix in (".c", ".h", ".py", ".pml", ".sh") and p.is_file()]
    names = set()
    for path in sources:
        names.update(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    stems = {p.stem for p in sources}
    missing = []
    for path in sorted(WHY.glob("*.md")):
        for quoted in re.findall(r"`([^`]+)`", path.read_text(encoding="utf-8")):
            for word in quoted.split():
                if re.match(r"(src|test|bench|python|docs)/", word):
                    if not (ROOT / word).exists():
                        missing.append((path.name, word))
                elif re.fullmatch(r"test_\w+…", word):
                    if not any(name.startswith(word[:-1]) for name in names):
                        missing.append((path.name, word))
                elif re.fullmatch(r"(tly|tally|test|TALLY|TLY)_\w+|\w+_test", word):
                    if word not in names | stems:
                        missing.append((path.name, word))
    assert missing == []
