"""What local.py and moves.py share: sizes, the programs that they run, and arguments.

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text):
    """Bytes from "64M"."""
    return int(float(text[:-1]) * UNITS[text[-1].upper()]) if text[-1].upper() in UNITS else int(text)


def rows_of(command, environment):
    """The JSON rows that a program prints; it must end well."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        sys.exit("%s\nended with status %d:\n%s%s" % (" ".join(command), done.returncode, done.stdout, done.stderr))
    return rows


def ranks_of(build, ranks, *command):
    """A command that starts so many ranks."""
    return [os.path.join(build, "src", "cli", "tally"), "run", "--no-prefix", "-n", str(ranks), "--", *command]


def tail(arguments):
    """The last arguments of each program."""
    return [str(value) for value in (arguments.first, arguments.last, arguments.seconds, arguments.rounds)]


def add_arguments(parser, first, last, seconds, rounds, quick):
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--from", dest="first", type=size, default=size(first), help="bytes of the first size (%s)" % first)
    parser.add_argument("--to", dest="last", type=size, default=size(last), help="of the last (%s); each is 4 times the one "
                        "before" % last)
    parser.add_argument("--seconds", type=float, default=seconds, help="for each measurement in a job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="in how many turns (%(default)s)")
    parser.add_argument("--build", metavar="DIR", type=os.path.abspath, default=os.path.join(ROOT, "build", "meson"),
                        help="Meson's folder")


def shorten(arguments, seconds, rounds):
    """What --quick does to the arguments."""
    if arguments.quick:
        arguments.last, arguments.seconds, arguments.rounds = min(arguments.last, size("4M")), seconds, rounds


def say_where(what):
    print("# %s; Linux %s, %d CPUs, load %.1f" % (what, os.uname().release, os.cpu_count(), os.getloadavg()[0]))


def close(rows, file):
    """Write the rows to the file, if there is one.  Returns the exit status: 1 if a result was wrong."""
    if file:
        with open(file, "w", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(row) + "\n")
    return int(any(row["wrong"] for row in rows))
