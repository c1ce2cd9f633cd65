"""Updates behind step(): an optimizer without a barrier makes them when their parameters are read.

    gates.py     what reads a parameter, and makes its update
    groups.py    an optimizer's param_groups, which read
    deferred.py  the updates that are due; find_stale_reads()

Uses no other room.

SPDX-License-Identifier: Apache-2.0
"""
