"""The whole machine's processor time; and a rank's side of being observed, as in rank.c.  SPDX-License-Identifier: Apache-2.0"""

import os


def machine():
    """(busy, all) ticks of the whole machine's processors."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, idle, waiting, interrupts, soft = map(int, stat.readline().split()[1:8])
    busy = user + nice + system + interrupts + soft
    return busy, busy + idle + waiting


def be_observed(rank, barrier):
    """Have the program that started the job look at all its processes while no rank works (be_observed of rank.c)."""
    fifos = os.environ.get("BENCH_OBSERVER")
    if not fifos:
        return
    barrier()
    if rank == 0:
        with open(fifos + ".ask", "wb", buffering=0) as ask, open(fifos + ".answer", "rb", buffering=0) as answer:
            ask.write(b"x")
            answer.read(1)
    barrier()
