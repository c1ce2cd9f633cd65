#!/usr/bin/env python3
"""push_pull of one tensor beside what the same connections carry, over sizes and layouts of a job on this machine.

    bench/push_pull.py [--quick] [--json FILE] [--layouts 2x2,4x2,2x0,4x0] [--checksum] [--build DIR] [-- options of push_pull.c]

A layout is ranks x tallyd; 2x0 is two ranks on one machine.  push_pull.c does the work, and says what is measured.
Settings of Tally are taken from the environment: TALLY_PART_BYTES=512K bench/push_pull.py

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import os
import platform
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def processor():
    """The CPU's name, as far as the kernel tells."""
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def main():
    parser = argparse.ArgumentParser(description="push_pull beside the connections' own speed")
    parser.add_argument("--quick", action="store_true", help="a few seconds a layout, up to 16 MB")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--layouts", default="2x2,4x2,2x0,4x0", help="ranks x tallyd, by comma (%(default)s)")
    parser.add_argument("--checksum", action="store_true", help="each layout once more with TALLY_CHECKSUM=1")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    parser.add_argument("more", nargs="*", metavar="OPTION",
                        help="behind --: --from, --to, --factor, --seconds, --rounds")
    arguments = parser.parse_args()
    layouts = [tuple(map(int, layout.split("x"))) for layout in arguments.layouts.split(",")]

    options = ["--quick"] * arguments.quick + arguments.more
    if arguments.json:
        open(arguments.json, "w").close()
        options += ["--json", os.path.abspath(arguments.json)]
    environment = dict(os.environ)
    environment.setdefault("TALLY_LOG", "warning")
    runs = [(layout, settings) for layout in layouts
            for settings in [{}] + [{"TALLY_CHECKSUM": "1"}] * arguments.checksum]
    for (ranks, servers), settings in runs:
        print("\n# %s, %d CPUs, load %.1f%s" % (processor(), os.cpu_count(), os.getloadavg()[0],
                                                "".join(", %s=%s" % pair for pair in settings.items())), flush=True)
        subprocess.run([os.path.join(arguments.build, "src", "cli", "tally"), "run", "--no-prefix", "-n", str(ranks),
                        "-k", str(servers), "--tallyd", os.path.join(arguments.build, "src", "tallyd", "tallyd"), "--",
                        os.path.join(arguments.build, "bench", "bench_push_pull")] + options,
                       check=True, env=environment | settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
