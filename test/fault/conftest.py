"""`pending`: a promise that is not kept yet; its test is skipped with the reason.  --pending runs it all the same."""

import pytest

import fault


def pytest_addoption(parser):
    parser.addoption("--pending", action="store_true", help="also run what is pending")


def pytest_configure(config):
    config.addinivalue_line("markers", "pending(reason): what it asks for is not there yet")
    if not fault.WORKER.exists():
        pytest.exit(f"there is no {fault.WORKER}: run make first", 2)


def pytest_collection_modifyitems(config, items):
    for item in items:
        mark = item.get_closest_marker("pending")
        if mark and not config.getoption("--pending"):
            item.add_marker(pytest.mark.skip(reason="pending: " + mark.args[0]))
