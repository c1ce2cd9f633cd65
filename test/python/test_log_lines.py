"""Log lines: with and without logging, and the last line of a job."""

import re
import textwrap

import jobs


def test_log_lines_go_to_logging():
    """A late rank is named in a warning of the logger `tally`."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import logging, threading, numpy as np, tally
        warned = threading.Event()
        class Handler(logging.Handler):
            def emit(self, record):
                if record.levelno == logging.WARNING and "slow.weight" in record.getMessage():
                    warned.set()
        logging.getLogger("tally").addHandler(Handler())
        tally.init()
        if tally.rank() == 0:
            operation = tally.push_pull_async(np.ones(3), "slow.weight", tally.Sum)
            assert warned.wait(30), "no warning"
        tally.push_pull(np.ones(1), "go")
        if tally.rank() == 1:
            operation = tally.push_pull_async(np.ones(3), "slow.weight", tally.Sum)
        assert (operation.wait() == 2).all()
        print("good")
    """)], env={"TALLY_LATE_WARNING": "0.3"})
    assert status == 0 and output.count("good") == 2, output


def test_log_lines_without_logging():
    """A program that has set up no logging gets the same lines as from C, notices too: level, rank, what."""
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import time, numpy as np, tally
        tally.init()
        if tally.rank() == 1:
            time.sleep(1)
        tally.push_pull(np.ones(3), "slow.weight", tally.Sum)
        tally.shutdown()
    """)], env={"TALLY_LATE_WARNING": "0.3"})
    assert status == 0, output
    assert "tally warning rank 0 comm: 'slow.weight' has waited 0 s for rank 1" in output, output
    assert re.search(r"tally info rank 0 comm: the job is done after [0-9.]+ s on 2 ranks: 1 operation, 24 B", output), output


def test_the_last_line_says_what_the_sums_cost():
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import numpy as np, tally
        tally.init()
        tally.push_pull(np.ones(1 << 20, np.float32), "a", tally.Sum)
        tally.shutdown()
    """)])
    assert status == 0, output
    assert re.search(r"1 operation, 4\.19 MB; [0-9.]+ s of processor time for 1 GB on this rank", output), output


def test_a_failed_job_ends_so():
    status, output = jobs.run(2, 0, ["-c", textwrap.dedent("""
        import numpy as np, tally
        tally.init()
        tally.push_pull(np.ones(3), "w", tally.Sum)
        operation = tally.push_pull_async(np.ones(3), "only on rank %d" % tally.rank(), tally.Sum)
        try:
            operation.wait()
        except tally.Error as error:
            print("%s.%s" % (type(error).__module__, type(error).__qualname__))
        tally.shutdown()
    """)], env={"TALLY_TIMEOUT": "1"})
    assert output.count("tally.Error\n") == 2 and "rank 0 comm: the job has failed after" in output, output
    assert "is done" not in output, output
