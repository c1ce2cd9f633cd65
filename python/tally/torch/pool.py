"""Tensors in memory that the ranks of a machine share: they are reduced without a copy.  Places of gradients side by side.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import mmap
import sys

import torch

from .. import _job, _memory
from . import patches


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


def offsets(lengths):
    """Where things of these bytes lie side by side, each at a multiple of 64, and the bytes of all of them."""
    begins, end = [], 0
    for length in lengths:
        begins.append(end)
        end += -(-length // _BEGIN) * _BEGIN
    return begins, end


def bytes_of(tensor):
    return tensor.numel() * tensor.element_size()


def fits(tensor):
    """Whether a tensor is a plain stretch of host memory."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.numel() > 0


class Places:
    """The places of some parameters' gradients, in one stretch of memory.

    units: lists of parameters.  They lie in this order, and the parameters of a list, which are of one type, side by side,
        with zeros between them.  Memory: the pool that the ranks of a machine share; where there is none or no room in it,
        ordinary memory if `ordinary`, else gradients stay where they are.

    Autograd cannot write to a place.  So a gradient that backward has made elsewhere is copied to its place, which then is
    the parameter's `grad`, as with DistributedDataParallel's gradient_as_bucket_view.  So until synchronize() has ended, `grad`
    may become another tensor.  A gradient stays in its place as long as code sets gradients to zero.  If code sets them to None,
    each backward's gradient is copied, while the cache still holds it.  These gradients stay where backward
    makes them: sparse, not contiguous, on a device, with a graph of their own, or of a parameter whose shape or type has changed.
    """

    def __init__(self, units, ordinary=False):
        self._units = [list(unit) for unit in units]
        self._number = {id(p): number for number, unit in enumerate(self._units) for p in unit}
        self._ordinary = ordinary
        self._at = None        # id(parameter) -> its place; made with the first gradient
        self._home = {}        # id(parameter) -> (the place's address, its shape, what makes a tensor of it)
        self._wholes = {}      # number of a unit -> all its places and what is between them, as one tensor
        self._generation = 0   # of the communicator whose pool they are in

    def _allocate(self, length):
        """Zeros, as a buffer, or None."""
        if length and _memory.has_pool():
            try:
                return _memory.alloc(length)
            except MemoryError:
                pass
        if length and self._ordinary:
            return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return None

    def _make(self):
        self._generation, self._at, self._home, self._wholes = _job.generation(), {}, {}, {}
        fitting = [number for number, unit in enumerate(self._units) if all(map(fits, unit))]
        begins, length = offsets([offsets(map(bytes_of, self._units[number]))[1] for number in fitting])
        memory = self._allocate(length)
        if memory is not None:
            for number, begin in zip(fitting, begins):
                self._lay(number, self._units[number], memory, begin)

    def _lay(self, number, like, memory, begin):
        """The places of a unit, of types and shapes like these tensors', are there from now on."""
        begins, length = offsets(map(bytes_of, like))
        for p, one, offset in zip(self._units[number], like, begins):
            # A tensor of its own, not a view of the whole: each place counts its versions by itself.
            make = functools.partial(torch.frombuffer, memory, dtype=one.dtype, count=one.numel(), offset=begin + offset)
            self._at[id(p)] = place = make().view(one.shape)
            self._home[id(p)] = place.data_ptr(), place.shape, make
        self._wholes[number] = torch.frombuffer(memory, dtype=one.dtype, count=length // one.element_size(), offset=begin)

    def _move(self, number):
        """Give a unit other memory: code has kept an earlier gradient, which stays as it is.  Returns whether there is some."""
        unit, whole = self._units[number], self._wholes[number]
        memory = self._allocate(bytes_of(whole))
        if memory is None:
            return False
        before = [self.at(p) for p in unit]
        self._lay(number, before, memory, 0)
        self._wholes[number].copy_(whole)
        for p, place in zip(unit, before):
            if p.grad is place:
                p.grad = self._at[id(p)]
        return True

    def at(self, p):
        """p's place, or None.  It is another tensor if code has given the last one other memory, as `p.grad.data = …` does."""
        if self._at is None or self._generation != _job.generation():
            self._make()
        place = self._at.get(id(p))
        if place is not None:
            address, shape, make = self._home[id(p)]
            if place.data_ptr() != address:
                place = self._at[id(p)] = make().view(shape)
        return place

    def free(self, p):
        """p's place, to write to, or None.  If code has kept an earlier gradient that lies there, it is another place."""
        place = self.at(p)
        if place is not None and p.grad is not place and sys.getrefcount(place) > _ALONE:
            self._move(self._number[id(p)])
            place = self._at[id(p)]
        return place

    def whole(self, p):
        """The places of p's unit and what is between them, as one tensor; p has a place."""
        return self._wholes[self._number[id(p)]]

    def place(self, p, late=None):
        """Move p.grad to its place, if possible.  Returns whether it is there.

        late: a list for copy(), which moves it.  Until then p.grad stays as it is."""
        place, gradient = self.at(p), p.grad
        if place is None or gradient is place:
            return place is not None
        if (gradient.layout is not torch.strided or not gradient.is_cpu or not gradient.is_contiguous()
                or gradient.dtype != place.dtype or gradient.shape != place.shape or gradient.requires_grad):
            return False
        if gradient.data_ptr() == place.data_ptr():
            return True
        if sys.getrefcount(place) > _ALONE:
            del place
            if not self._move(self._number[id(p)]):
                return False
            place = self._at[id(p)]
        if late is None:
            place.copy_(gradient)
            p.grad = place
        else:
            late.append(p)
        return True

    def copy(self, late):
        """Move gradients that place() has left where they are."""
        if late:
            patches.copy_together([self._at[id(p)] for p in late], [p.grad for p in late])
        for p in late:
            p.grad = self._at[id(p)]
