"""Tensors as vectors of types that the library has, and back.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import hashlib
import itertools

import torch

from ..calls import DTYPES

_SHOWN = 80  # characters of a note in what ranks that disagree are told


def flat(tensor):
    """The contents of `tensor` as a vector of a type that the library has: in place if it is contiguous, else a copy.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    vector = tensor.contiguous().view(-1)
    if vector.stride(0) != 1:  # one element is contiguous whatever its stride, and yet no bytes to torch
        vector = vector.as_strided((vector.numel(),), (1,))
    if vector.dtype in DTYPES:
        return vector
    return vector.view(torch.uint8)


def note(tensors):
    """The properties of tensors that a vector of the library's types does not show: a type that the library lacks.  For
    several tensors, types and counts of all."""
    if len(tensors) > 1:
        return _list_note(tensors)
    tensor, = tensors
    return None if tensor.dtype in DTYPES else str(tensor.dtype)[len("torch."):]


def _list_note(tensors):
    """Types, where they change, and counts of several tensors, as far as the library shows a note.

    If there is too little room, digests stand for them: ten at most, each over all tensors so far.  So the first digest
    that differs between ranks shows where their lists begin to differ.  The last digest is long: it tells lists apart.
    """
    kinds = [(one.dtype, one.numel()) for one in tensors]
    runs, before = [], None
    for kind, same in itertools.groupby(kinds):
        name = "" if kind[0] is before else str(kind[0])[len("torch."):] + " "
        before, count = kind[0], len(list(same))
        runs.append("%s[%d]%s" % (name, kind[1], " x%d" % count if count > 1 else ""))
    text = "%d tensors: %s" % (len(kinds), " ".join(runs))
    if len(text) <= _SHOWN:
        return text
    step, so_far, digests = -(-len(kinds) // 10), hashlib.blake2b(), []
    for begin in range(0, len(kinds), step):
        so_far.update(repr(kinds[begin:begin + step]).encode())
        digests.append(so_far.hexdigest()[:3])
    digests[-1] = so_far.hexdigest()[:16]
    after = "each" if step == 1 else "every %d" % step
    return "%d tensors, digests after %s: %s" % (len(kinds), after, " ".join(digests))


def put(target, vector):
    """The opposite: copy the result of flat() of a like tensor into `target`."""
    target = target.detach()
    if vector.data_ptr() == target.data_ptr():
        return
    if vector.dtype != target.dtype:
        if vector.data_ptr() % target.element_size():
            vector = vector.clone()
        vector = vector.view(target.dtype)
    target.copy_(vector.view(target.shape))


def landing(tensors):
    """(a vector of a type that the library has, into which results for the tensors may land; what to do afterwards)"""
    tensor = tensors[0].detach()
    if len(tensors) == 1 and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return flat(tensor), None
    aside = together([one.new_empty(one.shape) for one in tensors])
    return aside, functools.partial(apart, tensors, aside)


def spread(targets, vector):
    """Copy the result of flat() of one tensor into several like it."""
    for target in targets:
        put(target, vector)


def overlap(one, other):
    """Whether these vectors share memory."""
    begin, start = one.data_ptr(), other.data_ptr()
    return (begin < start + other.numel() * other.element_size() and start < begin + one.numel() * one.element_size())


def copy(target, source):
    if target.data_ptr() != source.data_ptr():
        target.detach().copy_(source)


def together(tensors):
    """flat() of all tensors, concatenated; as bytes, if their types differ."""
    vectors = [flat(one) for one in tensors]
    if len({one.dtype for one in vectors}) > 1:
        vectors = [one.view(torch.uint8) for one in vectors]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def apart(targets, vector):
    """The opposite of together()."""
    at = 0
    for target in targets:
        size = target.numel() * target.element_size() // vector.element_size()
        put(target, vector[at:at + size])
        at += size
