"""`long`: one more of a kind of which the ordinary run has some; --long and `make chaos` run it."""

import os

import pytest

import fault


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run all of each kind")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: for --long and make chaos")
    if not fault.WORKER.exists():
        pytest.exit(f"there is no {fault.WORKER}: run make first", 2)


def pytest_collection_modifyitems(config, items):
    if not (config.getoption("--long") or os.environ.get("TALLY_CHAOS")):
        later = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
