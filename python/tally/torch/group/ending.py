"""The end of process groups where torch itself does not tell them.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import inspect

import torch.distributed as dist


def have_destroy_tell(ours):
    """Have destroy_process_group() tell our groups, of which `ours` has those that stand.  A PyTorch that shuts no group
    down only forgets them."""
    destroy = dist.destroy_process_group
    code = getattr(inspect.unwrap(destroy), "__code__", None)
    if code is None or "shutdown" in code.co_names:
        return

    @functools.wraps(destroy)
    def destroy_process_group(group=None):
        groups = list(ours)  # torch may hold the only reference
        destroy(group)
        for one in groups:
            if one not in dist.distributed_c10d._world.pg_map:
                one.shutdown()

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group
