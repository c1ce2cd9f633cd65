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
        self._word = None                # what begin() has returned for this step; None: forward has not ended in a backward
        self._gated = False              # gates have spoken in this step's forward
        self._same = 0                   # looks in a row that have found what is published
        self.looks = self._observes      # at this step

    def used(self, number):
        """Forward is about to use a parameter.  That counts until backward begins."""
        if self._word is None and self.looks:
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
        step = self._step + 1
        order = next((order for first, order in reversed(self._pending) if first <= step), self.order)
        later = [entry for entry in self._pending if entry[0] > step]
        seen = list(self._used) or list(reversed(self._made))
        places, published, same = [0] * self.count, self._published, self._same
        if self._observes and seen:
            published = merged(self._published or order, seen)
            same += 1
            if published != self._published:
                same = 0
                for place, number in enumerate(published):
                    places[number] = 1 + place
        # At once, for signal handlers.
        vars(self).update(order=order, _word=(order != self.order, places), _step=step, _pending=later, _published=published,
                          _same=same, _gated=bool(self._used), _used={}, _made={})
        return self._word

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
        self._word = None
        self.looks = self._observes and (self._same < SETTLED or self._step % EVERY == 0)

    def begin_anew(self, observes, count=None):
        """Ranks may have missed what was published: rank 0 says it again.  Or there are more parameters now."""
        if count is not None and count != self.count:
            self.order = [*self.order, *range(self.count, count)]
            self.count = count
        self._observes, self._published, self._pending = observes, None, []
        self._forget()
