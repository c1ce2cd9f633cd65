"""An optimizer's param_groups whose parameters are read updated, see deferred.py.

A Group stands for one dictionary of `param_groups` and keeps nothing itself, so readers of the dictionary and of the Group
see the same.  Asking for "params" passes the gates of these parameters; other entries, such as a scheduler's "lr", wait for
nothing.

SPDX-License-Identifier: Apache-2.0
"""

from collections.abc import MutableMapping

from . import gates


class Group(MutableMapping, dict):
    """A dictionary of param_groups.  Copies and pickles of it are plain dictionaries."""

    __slots__ = ("plain",)

    def __init__(self, plain):
        self.plain = plain

    def __getitem__(self, name):
        value = self.plain[name]
        if name == "params":
            gates.read(value)
        return value

    def __setitem__(self, name, value):
        self.plain[name] = value

    def __delitem__(self, name):
        del self.plain[name]

    def __iter__(self):
        return iter(self.plain)

    def __len__(self):
        return len(self.plain)

    def __reversed__(self):
        return reversed(self.plain)

    def __repr__(self):
        return repr(self.plain)

    def __or__(self, other):
        return dict(self) | other

    def __ror__(self, other):
        return other | dict(self)

    def __ior__(self, other):
        self.update(other)
        return self

    __hash__ = None

    def __contains__(self, name):
        return name in self.plain

    def copy(self):
        return dict(self)

    def __reduce_ex__(self, protocol):
        return dict, (dict(self),)


def gate(optimizer):
    """Put Groups in the optimizer's param_groups, in place."""
    groups = optimizer.__dict__["param_groups"]
    groups[:] = [group if type(group) is Group else Group(group) for group in groups]


def plain(optimizer):
    """The dictionaries themselves: their parameters are named, and nobody reads them."""
    return [group.plain if type(group) is Group else group for group in optimizer.__dict__["param_groups"]]


class Shared:
    """Mixin of optimizers that share groups and state: a new state gets into the existing ones."""

    def __setstate__(self, state):
        """Like the optimizer's own, into the existing groups and state: a scheduler made before the
        DistributedOptimizer holds the original, which shares them."""
        groups, kept = self.__dict__.get("param_groups"), self.__dict__.get("state")
        super().__setstate__(state)
        if groups is None:
            return
        new = [dict(group) for group in self.param_groups]
        for group, options in zip(groups, new):
            group.clear()
            group.update(options)
        if kept is not self.state:
            kept.clear()
            kept.update(self.state)
        self.param_groups, self.state = groups, kept
