"""The backend "tally" of torch.distributed.

    making.py      how groups are made, and leave
    group.py       the process group
    vectors.py     tensors as vectors of types that the library has
    ranks.py       ranks that operate among themselves on vectors
    work.py        the result of a call
    outcome.py     its future
    methods.py     methods as torch calls them
    dispatched.py  calls as c10d's operators
    lists.py       rules for lists of tensors
    earlier.py     calls that a barrier waits for
    monitored.py   the monitored barrier
    profile.py     ranges for torch.profiler

Uses no other room.

SPDX-License-Identifier: Apache-2.0
"""
