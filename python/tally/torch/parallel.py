"""BytePS's place for DistributedDataParallel: torch's, with gradients through Tally.

SPDX-License-Identifier: Apache-2.0
"""

import torch
import torch.distributed as dist

from .. import _job
from .ddp.hooks import ddp_hook, ddp_hook_bf16, ddp_hook_fp16, state
from .horovod.compression import Compression
from .horovod.functions import broadcast_object

_HOOKS = {Compression.none: ddp_hook, Compression.fp16: ddp_hook_fp16, Compression.bf16: ddp_hook_bf16}


def _store():
    """A store in rank 0, where groups of other backends meet; the job itself needs none.  Collective."""
    place = store = None
    if _job.rank() == 0:
        host = _job.report()["services"][_job.machine()]["address"]  # that all have connected to
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = host, store.port
    place = broadcast_object(place, 0, "tally.torch.parallel")
    return store or dist.TCPStore(*place, wait_for_workers=False)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with gradients averaged by Tally's hook.

    compression: Compression.none, fp16 or bf16; all other arguments are torch's.  If there is no process group, one
        with the backend tally is made of all ranks of the job: a script needs only tally.torch.init().
    """

    def __init__(self, module, *args, compression=Compression.none, **kwargs):
        if compression not in _HOOKS:
            raise ValueError("compression must be Compression.none, fp16 or bf16, not %r" % (compression,))
        if not dist.is_initialized():
            _job.init()
            dist.init_process_group("tally", store=_store(), rank=_job.rank(), world_size=_job.size())
        super().__init__(module, *args, **kwargs)
        self.register_comm_hook(state(), _HOOKS[compression])
