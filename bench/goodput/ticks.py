"""The whole machine's processor time.  SPDX-License-Identifier: Apache-2.0"""


def machine():
    """(busy, all) ticks of the whole machine's processors."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, idle, waiting, interrupts, soft = map(int, stat.readline().split()[1:8])
    busy = user + nice + system + interrupts + soft
    return busy, busy + idle + waiting
