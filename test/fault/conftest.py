"""The tests of faults need the program that they break."""

import pytest

import fault


def pytest_configure(config):
    if not fault.WORKER.exists():
        pytest.exit(f"there is no {fault.WORKER}: run make first", 2)
