"""Every function of tally.h and every TALLY_* setting is in the manual."""

import re

import pytest
from tree import BUILT, ROOT, parameters, public_functions

MAN = ROOT / "man"


def page(name):
    """A manual page's text, from the sources or as built; `.so man3/other.3` is followed."""
    for folder in (MAN, BUILT / "man"):
        path = folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8")
            other = re.match(r"\.so man\d/(\S+)", text)
            return page(other[1]) if other else text
    raise AssertionError(f"there is no man/{name}")


def plain(text):
    """troff's escapes for dashes and fonts away."""
    return re.sub(r"\\f[BIRP]|\\&", "", text).replace("\\-", "-")


@pytest.mark.parametrize("function", public_functions())
def test_function_has_a_page(function):
    text = plain(page(f"{function}.3"))
    for section in ("NAME", "SYNOPSIS"):
        body = re.search(rf"^\.SH \"?{section}\"?$(.*?)(?=^\.SH|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        assert body, f"{function}(3) has no section {section}"
        assert re.search(
            rf"\b{function}\b", body[1]
        ), f"{function}(3) does not name the function under {section}"


@pytest.mark.parametrize("parameter", parameters())
def test_setting_is_in_the_manual(parameter):
    assert re.search(rf"\b{parameter}\b", plain(page("tally-params.7")))


def test_manual_names_only_settings_that_are_there():
    assert (
        sorted(set(re.findall(r"\bTALLY_[A-Z_]+\b", plain(page("tally-params.7")))) - set(parameters())) == []
    )


def test_there_is_something_to_look_for():
    assert "tally_push_pull" in public_functions()
    assert "TALLY_COORD" in parameters()
