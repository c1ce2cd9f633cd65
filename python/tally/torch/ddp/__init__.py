"""Models that torch wraps.

    hooks.py          communication hooks of DistributedDataParallel
    cross_barrier.py  cross_barrier(): its updates behind step()
    hsdp.py           replicas of FSDP2's models

Uses crossing, group, horovod.

SPDX-License-Identifier: Apache-2.0
"""
