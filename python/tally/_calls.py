"""Calls: what the ranks agree on besides memory.  A Call has all that, and the library's options are made from it.

A call that this rank cannot make is refused: the other ranks' calls, which would wait for it, fail with the reason.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import ctypes
import enum

from . import _lib, _where
from ._job import own, period
from ._lib import lib

# Name spaces: of arrays; of what the package makes up, which a user's names never meet; of Horovod's API.
USER, GRADIENT, STATE, BUCKET, HOROVOD = range(5)

_names = []  # arrays that the library may have a pointer to


def name_calls(spaces, *names):
    """Have messages call operations in these name spaces by these names, in the order of the kinds' numbers."""
    _names.append((ctypes.c_char_p * (1 + len(names)))(None, *[name.encode() for name in names]))
    for space in spaces:
        lib.tally_name_calls(space, _names[-1])


name_calls([USER], "push_pull", "broadcast", "allgather", "barrier", "reduce", "reduce_scatter", "alltoall", "gather", "scatter")


class Reduction(enum.IntEnum):
    """The reduction of the ranks' elements."""

    Sum = 0
    Average = 1
    Min = 2
    Max = 3
    Product = 4


class Call:
    """A call that the ranks make on some memory.  It does not change, so it may be submitted again.

    name: the ranks' calls meet by it; None: by their number among the calls of their kind.
    reduction: a Reduction or its number.  prescale, postscale: factors of inputs and of the result; not 0.
    group: from make_group(); None: all ranks.
    priority: higher goes first.
    space: of names; equal names in different spaces do not meet.
    note: text that must be equal on all ranks.
    partial: an allgather does not fail if a rank has joined, which contributes nothing.
    then: called with the operation at its end, in another thread or before the submission returns.
    finish: result -> what wait() returns; the first waiter calls it, after success.  If a signal handler's exception breaks
        it off, the next waiter calls it again.
    line: in an ordered name space, the calls before this one; see tally.torch.device.
    job: the Job that it is made in; None: the one that init() has joined.
    """

    _TERMS = ("name", "reduction", "group", "priority", "prescale", "postscale", "space", "note", "partial", "then", "finish",
              "line", "job")
    # Made once for all submissions.  options: (shape, the library's options) of the last one; encoded: the name as bytes.
    __slots__ = (*_TERMS, "options", "encoded")

    def __init__(self, name=None, reduction=0, group=None, priority=0, prescale=1.0, postscale=1.0, space=HOROVOD, note=None,
                 partial=False, then=None, finish=None, line=None, job=None):
        self.name = name
        self.reduction = reduction
        self.group = group
        self.priority = priority
        self.prescale = prescale
        self.postscale = postscale
        self.space = space
        self.note = note
        self.partial = partial
        self.then = then
        self.finish = finish
        self.line = line
        self.job = job
        self.options = self.encoded = None

    def but(self, **changes):
        """A copy with other values."""
        return Call(**{**{name: getattr(self, name) for name in self._TERMS}, **changes})


_known = {}


def reducing(name, reduction, group, priority, prescale, postscale, space=HOROVOD):
    """The Call of a reduction: the one of last time, where all is the same."""
    key = name, reduction, group, priority, prescale, postscale, space
    try:
        call = _known.get(key)
    except TypeError:  # of a type that makes no key: submitting it says what is wrong
        return Call(*key)
    if call is None:
        if len(_known) >= 8192:  # names without end
            _known.clear()
        call = _known[key] = Call(*key)
    return call


# Options are pure functions of these few values and the library only reads them: made once each, then shared.
_options = {}
_OPTIONS_SIZE = ctypes.sizeof(_lib.Options)


def options_of(call, shape, stream=None):
    """(address, what must live as long as it is used) of a call's options.

    stream: the CUstream after whose work the input is ready, for memory of a GPU; None: memory of the host."""
    known = call.options
    if known is None or known[0] != shape or stream is not None:
        key = (shape, call.priority, call.prescale, call.postscale, call.space, call.then is not None, call.group, call.note,
               call.partial, stream)
        known = shape, _options.get(key) or _make_options(*key)
        if stream is None:
            call.options = known
    return known[1]


def _make_options(*key):
    shape, priority, prescale, postscale, space, queued, group, note, partial, stream = key
    if prescale == 0 or postscale == 0:
        raise ValueError("prescale_factor and postscale_factor must not be 0")
    dims = (ctypes.c_int64 * len(shape))(*shape)
    options = _lib.Options(size=_OPTIONS_SIZE, priority=max(-2**31, min(2**31 - 1, priority)), ndim=len(shape),
                           shape=dims, prescale=prescale, postscale=postscale, space=space,
                           queued=queued, group=group, note=note and note.encode(), partial=partial,
                           place=stream is not None, stream=stream)
    if len(_options) >= 8192:  # shapes without end, say of variable batches
        _options.clear()
    entry = _options[key] = (ctypes.addressof(options), options, dims)
    return entry


def encode(name):
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError("name must be a string, not %s" % type(name).__name__)
    if not name or "\0" in name:
        raise ValueError("name %r: must not be empty or hold a NUL" % name)
    return name.encode()


def meeting(kind, call):
    """Where the ranks' calls meet, as a key."""
    return period(), kind, call.name, call.space, call.group, call.job


_refusals = collections.Counter()


def refusals(kind, call):
    """How often this rank has refused such a call in this job."""
    return _refusals[meeting(kind, call)]


def refuse(kind, call, reason):
    """Tell the ranks that submit this call (without a name: the next one) why this rank cannot.  Their calls fail with the
    reason.  Nobody is told about a message (kind None)."""
    comm = (call.job or own).comm
    if comm is None or kind is None:
        return
    if call.name is not None:
        _refusals[meeting(kind, call)] += 1
    options, where = options_of(Call(space=call.space, group=call.group), ()), _where.of_caller()
    text = str(reason)
    lib.tally_refuse(comm, encode(call.name), kind, options[0], (text if text.endswith(where) else text + where).encode())
