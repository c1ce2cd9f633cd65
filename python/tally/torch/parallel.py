"""BytePS's place for DistributedDataParallel: torch's, with gradients through Tally.

SPDX-License-Identifier: Apache-2.0
"""

import torch
import torch.distributed as dist

from .. import _core
from .compression import Compression
from .hooks import ddp_hook, ddp_hook_bf16, ddp_hook_fp16, state

_HOOKS = {Compression.none: ddp_hook, Compression.fp16: ddp_hook_fp16, Compression.bf16: ddp_hook_bf16}


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel whose gradients are averaged by Tally's hook.

    compression: Compression.none, fp16 or bf16; all else is torch's.  Where there is no process group, one of the
    backend tally is made of all ranks of the job: a script needs tally.torch.init() and nothing else.
    """

    def __init__(self, module, *args, compression=Compression.none, **kwargs):
        if compression not in _HOOKS:
            raise ValueError("compression must be Compression.none, fp16 or bf16, not %r" % (compression,))
        if not dist.is_initialized():
            _core.init()
            # The job is there already: nobody has to meet in the store.
            dist.init_process_group("tally", store=dist.HashStore(), rank=_core.rank(), world_size=_core.size())
        super().__init__(module, *args, **kwargs)
        self.register_comm_hook(state(), _HOOKS[compression])
