"""Jobs that tests share.  Functions that run on the ranks are module-level and have no `test_` in their names."""

import os
import sys
import tempfile

import pytest

import jobs

sys.path.insert(0, str(jobs.BUILD / "python"))


def _job(ranks, services, **more):
    @pytest.fixture(scope="session")
    def fixture():
        job = jobs.Ranks(ranks, services, **more)
        yield job
        job.close()
    return fixture


two = _job(2, 1)
four = _job(4, 2)   # 4 machines of one rank, 2 tallyd
three = _job(3, 1)  # a tree that is not full
machine = _job(3, 0, machines=1)  # ranks of one machine, which share memory


@pytest.fixture
def store():
    """Path for a FileStore that nobody has used."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "store")


def pytest_configure(config):
    if not (jobs.BUILD / "bin" / "tally").exists():
        pytest.exit("%s has no bin/tally: run make first" % jobs.BUILD, 2)
