"""One rank of adapt.py: sums one tensor again and again until a file is there, and prints when each step ended and how long
it took.  SPDX-License-Identifier: Apache-2.0

    rank.py BYTES STOP
"""

import array
import json
import logging
import os
import pathlib
import sys
import time

import tally


def main():
    count, stop = int(sys.argv[1]) // 4, pathlib.Path(sys.argv[2])
    logging.basicConfig(level=os.environ.get("TALLY_LOG", "info").upper(), format="%(levelname)s %(message)s")
    tally.init()
    gradient = array.array("f", [0.0]) * count
    going = array.array("f", [0.0])
    steps = []
    while True:
        before = time.monotonic()
        tally.push_pull(gradient, name="gradient")
        now = time.monotonic()
        steps.append((now, now - before))
        # All end with the same step: the first that sees the file says so.
        going[0] = float(stop.exists())
        if tally.push_pull(going, name="going")[0] > 0:
            break
    print("STEPS " + json.dumps(steps), flush=True)
    tally.shutdown()


if __name__ == "__main__":
    main()
