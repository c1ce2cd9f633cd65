"""Running the `tally` of the build in TALLY_TEST_BUILD, by default build/ of the sources."""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
TALLY = str(BUILD / "bin" / "tally")


def environment(extra=None):
    """This process's, without what a launcher or a user may have set."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    env = {k: v for k, v in os.environ.items() if not k.startswith("TALLY_") and k not in foreign}
    env.update(extra or {})
    return env


def tally(*arguments, env=None, timeout=60, **more):
    """Run to the end; the result has returncode, stdout and stderr."""
    return subprocess.run(
        [TALLY, *map(str, arguments)],
        env=environment(env),
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **more,
    )
