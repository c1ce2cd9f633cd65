"""The backend "tally" of torch.distributed.

    group.py       the process group, and how it is made
    ranks.py       ranks that operate among themselves on vectors
    work.py        the result of a call
    outcome.py     its future
    methods.py     methods as torch calls them
    dispatched.py  calls as c10d's operators
    lists.py       rules for lists of tensors
    earlier.py     calls that a barrier waits for
    monitored.py   the monitored barrier
    profile.py     ranges for torch.profiler
    ending.py      the end of groups where torch does not tell it

Uses no other room.

SPDX-License-Identifier: Apache-2.0
"""
