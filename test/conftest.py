"""`long`: one more of a kind of which the ordinary run has some, or many steps of what it does a few of.

--long=all runs them too, --long=3/8 the third of eight parts of them: which part a test is in depends on its name alone.
`@pytest.mark.long(turn=4)`: it is in each fourth part.
scripts/run_tests applies chooses() to C tests."""

import zlib


def pytest_addoption(parser):
    parser.addoption("--long", default="none", metavar="none|all|I/N", help="which tests marked `long` run, too")


def pytest_configure(config):
    config.addinivalue_line("markers", "long(turn=N): for make test-all, and every so manieth of CI's runs")


def chooses(option, turn=0):
    """Whether a test of this name runs, as a function.  `turn`: it is in every so manieth part; 0: in one."""
    if option in ("none", "all"):
        return lambda name: option == "all"
    part, parts = map(int, option.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"--long={option}: there is no such part")
    turn = min(turn or parts, parts)
    return lambda name: zlib.crc32(name.encode()) % turn == (part - 1) % turn


def pytest_collection_modifyitems(config, items):
    option, later = config.getoption("--long"), set()
    for item in items:
        mark = item.get_closest_marker("long")
        if mark and not chooses(option, **mark.kwargs)(item.nodeid):
            later.add(item)
    config.hook.pytest_deselected(items=list(later))
    items[:] = [item for item in items if item not in later]
