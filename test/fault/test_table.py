"""docs/failures.md names tests; they must be there."""

import pathlib
import re

import fault

HERE = pathlib.Path(__file__).resolve().parent


def test_the_tests_that_the_table_names_are_there():
    text = (fault.ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    there = re.findall(r"^def (test_\w+)", "\n".join(p.read_text(encoding="utf-8") for p in HERE.glob("test_*.py")), re.M)
    named = re.findall(r"`(…?)((?:test)?_\w+)(…?)`", text)
    assert named

    def is_there(before, name, after):
        pattern = (".*" if before else "") + name + (".*" if after else "")
        return any(re.fullmatch(pattern, t) for t in there)

    lacking = [name for name in named if not is_there(*name)]
    assert lacking == []
