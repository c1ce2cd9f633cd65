"""Sets of ranks that operate together: Horovod's process sets.

SPDX-License-Identifier: Apache-2.0
"""

import itertools

from .. import _calls, _job


class ProcessSet:
    """Ranks that operate together; usable as `process_set=` once init() or add_process_set() has taken it.

    ranks: numbers of ranks of the job, each once.
    """

    process_set_id = None  # its number, the same on all ranks; None while it cannot be used, as after another init()
    _generation = 0        # of the communicator that knows the group

    def __init__(self, ranks):
        ranks = sorted(ranks)
        if any(not isinstance(rank, int) or rank < 0 for rank in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError("a process set is made of different ranks from 0, not of %r" % (ranks,))
        self.ranks = ranks

    def included(self):
        """Whether this process is in the set."""
        return _job.rank() in self._members()

    def rank(self):
        """This process's place in the set, from 0."""
        if not self.included():
            raise ValueError("rank %d is not in %s" % (_job.rank(), self))
        return self._members().index(_job.rank())

    def size(self):
        """Number of its ranks."""
        return len(self._members())

    def group(self):
        """The library's handle of the ranks; None: all."""
        self._members()  # raises once it has been removed
        if self._generation != _job.generation():
            if not self.included():
                raise ValueError("rank %d is not in %s" % (_job.rank(), self))
            everybody = self.ranks == list(range(_job.size()))
            self._group = None if everybody else _job.make_group("process set %d" % self.process_set_id, self.ranks)
            self._generation = _job.generation()
        return self._group

    def number(self, kind):
        """The number of the next unnamed operation of this kind: how many the set's ranks have begun since init() or
        the last join()."""
        _forget_last_job()
        group = 0 if self.group() is None else self.process_set_id
        return next(_numbers.setdefault((_job.period(), group, kind), itertools.count()))

    def place(self, root_rank, kind, call):
        """The place of a rank of the job in the set.  Raises ValueError if it has none, and tells the other ranks."""
        if self.group() is None:
            return root_rank
        if root_rank not in self.ranks:
            reason = ValueError("root rank %r is not in %s" % (root_rank, self))
            _calls.refuse(kind, call, reason)
            raise reason
        return self.ranks.index(root_rank)

    def _members(self):
        _forget_last_job()
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

    ranks = property(lambda self: list(range(_job.size())))

    def group(self):
        return None

    def place(self, root_rank, kind, call):
        return root_rank


global_process_set = _All()

_generation = 0                  # of the communicator to which the following belongs
_numbers = {}                    # process set or 0, kind -> numbers of unnamed operations
_sets = {0: global_process_set}  # by number
_next = 1                        # numbers are not used again: a group's name says one list of ranks


def _forget_last_job():
    """Begin the numbers of a job anew, as on a rank that was not in the last one.  Sets must be added again."""
    global _generation, _next
    if _generation == _job.generation():
        return
    for number in [number for number in _sets if number]:
        _sets.pop(number).process_set_id = None
    _numbers.clear()
    _next, _generation = 1, _job.generation()


def _add(ranks):
    """Take a set of ranks.  The same set again gives the existing one."""
    global _next
    _forget_last_job()
    process_set = ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks)
    if process_set is global_process_set:
        return process_set
    if not process_set.ranks or process_set.ranks[-1] >= _job.size():
        raise ValueError("%s: a process set has ranks from 0 to %d, and one at least" % (process_set, _job.size() - 1))
    for number, known in _sets.items():
        if known.ranks == process_set.ranks:
            process_set.process_set_id = number
            return process_set
    process_set.process_set_id = _next
    _sets[_next] = process_set
    _next += 1
    return process_set


def add_process_set(process_set):
    """Let some ranks operate together: a ProcessSet, or a list of ranks.  Returns the ProcessSet.

    All ranks of the job must call this for the same sets in the same order.  Nothing is sent.  If ranks' sets of one
    number differ, the operations in which they meet fail.  A set belongs to one job: after shutdown() and init() it
    must be added again.
    """
    return _add(process_set)


def remove_process_set(process_set):
    """Forget a set.  Returns False if that is impossible: for the set of all ranks, or for one that does not exist.
    All ranks must call this."""
    _forget_last_job()
    number = process_set.process_set_id
    if number == 0 or number not in _sets:
        return False
    del _sets[number]
    process_set.process_set_id = None
    return True


def process_set_by_id(process_set_id):
    """The set with that number."""
    _forget_last_job()
    if process_set_id not in _sets:
        raise ValueError("there is no process set %r" % (process_set_id,))
    return _sets[process_set_id]


def process_sets():
    """All sets, in order of their numbers."""
    _forget_last_job()
    return [_sets[number] for number in sorted(_sets)]
