"""Sets of ranks that operate together: Horovod's process sets.

SPDX-License-Identifier: Apache-2.0
"""

from .. import _core


class ProcessSet:
    """Ranks that operate together; for `process_set=` once init() or add_process_set() has taken it.

    ranks: numbers of ranks of the job, each once.
    """

    process_set_id = None  # its number, the same on all ranks; None while it cannot be used

    def __init__(self, ranks):
        ranks = sorted(ranks)
        if any(not isinstance(rank, int) or rank < 0 for rank in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError("a process set is made of different ranks from 0, not of %r" % (ranks,))
        self.ranks = ranks

    def included(self):
        """Whether this process is in it."""
        return _core.rank() in self._members()

    def rank(self):
        """This process's place in it, from 0."""
        if not self.included():
            raise ValueError("rank %d is not in %s" % (_core.rank(), self))
        return self._members().index(_core.rank())

    def size(self):
        """Number of its ranks."""
        return len(self._members())

    def group(self):
        """What the library knows its ranks by; None: all."""
        if len(self._members()) == _core.size():
            return None
        raise NotImplementedError("%s: sets of some of the ranks are not supported yet" % self)

    def _members(self):
        if self.process_set_id is None:
            raise ValueError("%s has not been added; hand it to init() or add_process_set()" % self)
        return self.ranks

    def __str__(self):
        return "ProcessSet(process_set_id=%s, ranks=%s)" % (self.process_set_id, self.ranks)


class _All(ProcessSet):
    """All ranks of the job."""

    process_set_id = 0

    def __init__(self):
        pass

    ranks = property(lambda self: list(range(_core.size())))

    def group(self):
        return None


global_process_set = _All()
