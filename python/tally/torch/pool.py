"""Tensors in memory that the ranks of a machine share: they are reduced without a copy.

SPDX-License-Identifier: Apache-2.0
"""

import sys

import torch

from .. import _job, _memory


def alloc(*size, dtype=None):
    """A tensor of zeros, for gradients for example; its memory is given back with the last tensor that uses it.

    size: as for torch.zeros(); dtype: torch's default if None.  The tensor is contiguous and page aligned.  If this
        machine's ranks do not sum in shared memory (tally_alloc() in tally.h says when), it is ordinary memory, as from
        torch.zeros(). A forked process (a DataLoader's worker) does not have it and must not read it.  MemoryError
        names the limit.
    """
    size = size or ((),)
    like = torch.empty(*size, dtype=dtype, device="meta")
    if not like.numel():
        return torch.zeros(*size, dtype=dtype, device="cpu")
    memory = _memory.alloc(like.numel() * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)


_BEGIN = 64  # bytes of which a tensor's place is a multiple


def _alone():
    """The result of getrefcount() for an object that only a dictionary and a local hold: 3, or fewer if arguments are
    borrowed."""
    at = {0: object()}
    place = at.get(0)
    return sys.getrefcount(place)


_ALONE = _alone()


class Places:
    """The places of some parameters' gradients in the pool.

    A gradient that backward has made elsewhere is copied to its place, which then is the parameter's `grad`, as with
    DistributedDataParallel's gradient_as_bucket_view.  It stays there as long as gradients are set to zero.  If they
    are set to None, each backward's gradient is copied, while the cache still holds it.  These gradients stay where
    they are: sparse, not contiguous, on a device, with a graph of their own, of a parameter whose shape has changed, or
    without memory for them.
    """

    def __init__(self, parameters):
        self._parameters = list(parameters)
        self._at = None        # id(parameter) -> its place; made with the first gradient
        self._generation = 0   # of the communicator whose pool they are in

    def _make(self):
        """One stretch of memory for all, in the order of `parameters`."""
        self._generation, self._at = _job.generation(), {}
        if not _memory.has_pool():
            return
        begins, length = {}, 0
        for p in self._parameters:
            if p.is_cpu and p.layout is torch.strided and p.is_contiguous() and p.numel():
                begins[id(p)] = length, p
                length += -(-p.numel() * p.element_size() // _BEGIN) * _BEGIN
        try:
            memory = _memory.alloc(length) if length else None
        except MemoryError:  # then the gradients stay where they are
            return
        for number, (begin, p) in begins.items():
            self._at[number] = torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=begin).view(p.shape)

    def place(self, p):
        """Move p.grad to its place, if possible."""
        if self._at is None or self._generation != _job.generation():
            self._make()
        place, gradient = self._at.get(id(p)), p.grad
        if place is None or gradient is place:
            return
        if (gradient.layout is not torch.strided or not gradient.is_cpu or not gradient.is_contiguous()
                or gradient.dtype != place.dtype or gradient.shape != place.shape or gradient.requires_grad
                or gradient.data_ptr() == place.data_ptr()):
            return
        if sys.getrefcount(place) > _ALONE:
            # Somebody has kept an earlier gradient: it stays theirs, as it is.
            try:
                place = self._at[id(p)] = alloc(p.shape, dtype=p.dtype)
            except MemoryError:
                return
        with torch.no_grad():
            place.copy_(gradient)
        p.grad = place
