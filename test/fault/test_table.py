"""docs/failures.md names, for every fault, tests that show what is promised of it; they must be there."""

import re

import pytest

import fault

DOCUMENT = fault.ROOT / "docs" / "failures.md"
LETTERS = {"s": "test/fault/test_scenarios.py", "n": "test/fault/test_network.py"}


def column(title):
    """The cells of the table's column of that title, by the fault."""
    lines = DOCUMENT.read_text(encoding="utf-8").split("\n## The table\n")[1].split("\n## ")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[head.index(title)] for row in rows}


def list_tests(path):
    """Of pytest, or of cmocka, which must also run them."""
    pattern = r"^def (test_\w+)" if path.suffix == ".py" else r"cmocka_unit_test\w*\((\w+)"
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.M)


def lacks(cell):
    """What a cell names and is not there, or that it names no test.  A letter or a file says where the tests lie that follow
    up to the next semicolon; of others the folder of this file has them.  `…` stands for the rest of a name."""
    lacking, found = [], 0
    for part in cell.split(";"):
        places = sorted((fault.ROOT / "test" / "fault").glob("test_*.py"))
        for letter, name in re.findall(r"(?:\b([sn]) )?`([^`]+)`", part):
            if letter:
                places = [fault.ROOT / LETTERS[letter]]
            if "/" in name or re.search(r"\.\w+$", name):
                places = [fault.ROOT / name]
                lacking += [] if places[0].is_file() else [name]
                continue
            pattern = re.escape(name).replace("…", r"\w*")
            if any(re.fullmatch(pattern, test) for place in places if place.is_file() for test in list_tests(place)):
                found += 1
            else:
                lacking.append(name)
    return lacking or ([] if found else ["a test"])


@pytest.mark.parametrize("what", column("fault"))
def test_what_a_row_names_is_there(what):
    assert lacks(column("shown by")[what]) == []


@pytest.mark.parametrize("cell", [
    "", "chaos", "`test/service/`", "`test/service/epoch_test.c`", "`test/service/no_test.c` `test_one_killed`",
    "`test_table.py`", "s `test_of_nothing`", "`test/service/epoch_test.c` `test_of_nothing`", "s `test_seed`",
    "s `test_undisturbed`; n `test_undisturbed`", "s `test_undisturbed`, `test_of_nothing…`"])
def test_a_cell_that_names_what_is_not_there(cell):
    assert lacks(cell)


def test_the_files_that_the_text_names_are_there():
    named = re.findall(r"`((?:test|src|docs|man)/[^`]*)`", DOCUMENT.read_text(encoding="utf-8"))
    assert named and [name for name in named if not (fault.ROOT / name).exists()] == []
