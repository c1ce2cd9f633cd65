#!/usr/bin/env python3
"""A job of many rounds whose processes must stay as large as they were: memory and descriptors of ranks and tallyd.

    test/fault/soak.py [--rounds 100000] [--ranks 3] [--services 2] [--churn] [--folder DIR] [NAME=VALUE...]

A round is one operation: the worker's steps have one of each size and kind. With --churn tallyd join and leave all the
while, but for the first, which is looked at as the ranks are. Settings are given as NAME=VALUE. Prints a line now and then; in the end every result is compared with the
reference, which takes longer than the job. Ends with 0 if all were right and nothing grew, else with 1."""

import argparse
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import fault  # noqa: E402

# A broadcast (5), a gather (7), sums in and out of place: of a few bytes, one part, and several.
SIZES = (1, 300, 5000, 0, 20000, 64, 200000, 700)
WARM = 0.25  # of the rounds: until then caches, pools and names may still fill
SLACK_BYTES = 2 << 20  # what the allocators may differ by
SETTLE_S = 20  # for a change of services under way to be over: until then one more descriptor is open


def usage(process):
    """Resident bytes that are no file's, and descriptors."""
    pid = process.popen.pid
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))


class Steps:
    """Counts a rank's steps without reading its history again and again."""

    def __init__(self, path):
        self.path, self.at, self.count, self.rest = path, 0, 0, b""

    def now(self):
        if self.path.exists():
            with open(self.path, "rb") as f:
                f.seek(self.at)
                text = self.rest + f.read()
                self.at = f.tell()
            self.rest = text[text.rfind(b"\n") + 1:]
            self.count += text[: len(text) - len(self.rest)].count(b" step ")
        return self.count


def relieve(job):
    """A tallyd joins, and of those before it the one that has been there for longest leaves; the first stays."""
    old = next((p for p in job.services[1:] if p.running()), None)
    new = job.add_service()
    job.await_true(lambda: "serving job" in new.output(), "the new tallyd joins")
    if old:
        job.drain(old)
        job.await_true(lambda: not old.running(), "the old tallyd leaves")


def soak(job, rounds, tell=None, churn=False):
    """Let the job do so many rounds; sentences about what grew."""
    processes = job.ranks + (job.services[:1] if churn else job.services)
    for service in processes[len(job.ranks):]:  # one that came while the job began is in it a while later
        job.await_true(lambda service=service: "serving job" in service.output(), f"{service.name} joins")
    steps = Steps(job.folder / "rank-0")
    enough = -(-rounds // (len(job.sizes) + 1))  # and one that asks whether to stop
    warm, told = None, 0
    while True:
        if churn:
            relieve(job)
        done = steps.now()
        if not all(p.running() for p in processes):
            raise AssertionError(job.account())
        if done >= enough * WARM and warm is None:
            warm = {p.name: usage(p) for p in processes}
        if tell and time.monotonic() - told > 5:
            told = time.monotonic()
            tell(done * (len(job.sizes) + 1), {p.name: usage(p) for p in processes})
        if done >= enough:
            break
        time.sleep(0.05)
    until = time.monotonic() + SETTLE_S
    while any(usage(p)[1] > warm[p.name][1] for p in processes) and time.monotonic() < until:
        time.sleep(0.05)
    grown = []
    for p in processes:
        (memory, descriptors), (memory_now, descriptors_now) = warm[p.name], usage(p)
        if memory_now > memory + SLACK_BYTES:
            grown.append(f"{p.name} grew from {memory >> 10} to {memory_now >> 10} KB")
        if descriptors_now > descriptors:
            grown.append(f"{p.name} has {descriptors_now} descriptors, and had {descriptors}")
    return grown


def main():
    parser = argparse.ArgumentParser(description="memory and descriptors over many rounds")
    parser.add_argument("--rounds", type=int, default=100000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--services", type=int, default=2)
    parser.add_argument("--churn", action="store_true", help="tallyd join and leave all the while")
    parser.add_argument("--folder", help="of histories and logs; default a temporary one")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    arguments = parser.parse_args()

    def tell(rounds, now):
        print("%8d rounds  %s" % (rounds, "  ".join(f"{n} {m >> 10} KB {d}" for n, (m, d) in now.items())), flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(arguments.folder or temporary) / "soak"
        env = dict(s.split("=", 1) for s in arguments.settings)
        with fault.Job(folder, ranks=arguments.ranks, services=arguments.services, sizes=SIZES, env=env,
                       words=("pause_ms=0",)) as job:
            grown = soak(job, arguments.rounds, tell, arguments.churn)
            job.finish()
    for sentence in grown:
        print(sentence)
    print("all results are right, and %s" % ("something grew" if grown else "nothing grew"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
