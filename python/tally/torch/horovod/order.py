"""Priorities of gradients: the order in which a forward first uses the parameters, which is the order in which the next
one waits for them.

Rank 0 observes its own order.  The word that all ranks add up once a step (`_compare_frozen` in optimizer.py) carries it,
so it costs no operation: rank 0 fills in the order when it differs from the last one that it published, everybody else
adds zeros.  All ranks apply an order at the beginning of the second step after the one that carried it, so that nobody
waits for it.  An order is a hint: ranks whose priorities differ get the same sums, later.

Gates in forward call used(), backward's hooks call made().  Backward makes gradients in the reverse order of first use, so
where no gate speaks, that order serves, one step later.  To look costs up to 1 ms of a step with 161 parameters.  So once
SETTLED looks in a row have found the same order, rank 0 looks at each EVERY-th step only.

SPDX-License-Identifier: Apache-2.0
"""

# An order that was published in one step counts from so many steps later on.
STEPS_AHEAD = 2

# How often rank 0 looks at the order.
SETTLED, EVERY = 8, 8


def merged(order, seen):
    """`order` with the parameters in `seen` in the order of that list.  The others stay behind those that they followed."""
    moved = set(seen)
    followers, before = {None: []}, None
    for i in order:
        if i in moved:
            before = i
        else:
            followers.setdefault(before, []).append(i)
    result = followers[None]
    for i in seen:
        result += [i, *followers.get(i, ())]
    return result


class Order:
    """The order of `count` parameters, which are known by their numbers, input first.  Owner: the optimizer's thread."""

    def __init__(self, count, observes):
        """observes: this is rank 0, whose order counts."""
        self.count = count
        self.order = list(range(count))  # what counts now: numbers of parameters, first used first
        self._observes = observes
        self._published = self.order     # what all ranks have, or will have; None: unknown
        self._step = 0
        self._pending = []               # (step from which on it counts, order)
        self._forget()

    def _forget(self):
        self._used, self._made = {}, {}  # ordered sets: of this step's forward, of backward
        self._open = True                # forward of this step has not ended in a backward
        self._word = None                # what begin() has returned for this step
        self._gated = False              # gates have spoken in this step's forward
        self._same = 0                   # looks in a row that have found what is published
        self.looks = self._observes      # at this step

    def used(self, number):
        """Forward is about to use a parameter.  That counts until backward begins."""
        if self._open and self.looks:
            self._used.setdefault(number)

    def made(self, number):
        """Backward has made a gradient."""
        if self.looks and not self._gated:
            self._made.setdefault(number)

    def begin(self):
        """Backward begins: the step's word is due.  Returns (whether the order that counts is another one now, numbers for
        the word: 1 + the place of each parameter, or zeros where there is nothing to publish).  A second call behind a signal
        handler returns the same."""
        if self._word is not None:
            return self._word
        step, changed = self._step + 1, False
        while self._pending and self._pending[0][0] <= step:
            new = self._pending.pop(0)[1]
            changed |= new != self.order
            self.order = new
        seen, self._gated = list(self._used) or list(reversed(self._made)), bool(self._used)
        self._used, self._made, self._open = {}, {}, False
        word = changed, self._publish(seen)
        self._step, self._word = step, word
        return word

    def _publish(self, seen):
        zeros = [0] * self.count
        if not self._observes or not seen:
            return zeros
        wanted = merged(self._published or self.order, seen)
        if wanted == self._published:
            self._same += 1
            return zeros
        self._published, self._same = wanted, 0
        for place, number in enumerate(wanted):
            zeros[number] = 1 + place
        return zeros

    def heard(self, words):
        """The sum of what all ranks' begin() returned for this step.  It may be heard again, behind a signal handler."""
        if not any(words):
            return
        order = sorted(range(self.count), key=words.__getitem__)
        entry = self._step + STEPS_AHEAD, order
        if [words[number] for number in order] == list(range(1, self.count + 1)) and entry not in self._pending:
            self._pending.append(entry)

    def next(self):
        """The order that counts from the next step on, if a new one does, else None."""
        return next((order for step, order in self._pending if step == self._step + 1), None)

    def end(self):
        """The step is done: what comes is the next one's forward."""
        self._open, self._word = True, None
        self.looks = self._observes and (self._same < SETTLED or self._step % EVERY == 0)

    def begin_anew(self, observes, count=None):
        """Ranks may have missed what was published: rank 0 says it again.  Or there are more parameters now."""
        if count is not None and count != self.count:
            self.order = [*self.order, *range(self.count, count)]
            self.count = count
        self._observes, self._published, self._pending = observes, None, []
        self._forget()
