"""Tally sums tensors over the ranks of a data-parallel job.

    import numpy as np
    import tally
    tally.init()
    gradient = np.ones(1000, np.float32)
    tally.push_pull(gradient, name="gradient")   # in place: the average over all ranks

`tally.torch` has Horovod's API for PyTorch.

SPDX-License-Identifier: Apache-2.0
"""

from . import _lib
from ._array import alloc, push_pull, push_pull_async
from ._calls import Reduction
from ._errors import Error, NotInitializedError
from ._job import init, is_initialized, local_rank, local_size, machine, machine_count, rank, report, service_count, shutdown, size
from ._operations import Operation, barrier

Average, Sum, Min, Max, Product = (Reduction.Average, Reduction.Sum, Reduction.Min, Reduction.Max,
                                   Reduction.Product)

__version__ = _lib.lib.tally_version().decode()

__all__ = ["Average", "Error", "Max", "Min", "NotInitializedError", "Operation", "Product", "Reduction", "Sum",
           "alloc", "barrier", "init", "is_initialized", "local_rank", "local_size", "machine", "machine_count", "push_pull",
           "push_pull_async", "rank", "report", "service_count", "shutdown", "size"]
