"""State that survives a failure: Horovod's elastic.State, and its run(), which continues after the job has been joined again.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

Flow: an operation fails because a rank is gone -> run() leaves the job, goes back to the last commit, and joins the job
again when the launcher has restarted all ranks -> the rank with most commits gives its state to all -> the function is called
again.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import errno
import functools

import torch

from .. import _errors, _job
from .crossing import gates
from .horovod.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .horovod.sampler import ElasticSampler

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class State:
    """State that a failure must not undo.  Subclasses have save(), restore() and sync(), and may have reset()."""

    def __init__(self):
        self._reset_callbacks = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks):
        """Register functions without arguments, called after the job has been joined again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self):
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self):
        """Called before those functions."""

    def commit(self):
        """Save the current state.  restore() returns to it."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self):
        """Part of Horovod's interface; does nothing, because the number of ranks does not change while a job runs."""

    def _root(self):
        """The rank whose state all ranks get: the lowest rank with most commits."""
        commits = allgather_object(self._commits)
        self._commits = max(commits)
        return commits.index(max(commits))

    def save(self):
        raise NotImplementedError("save()")

    def restore(self):
        raise NotImplementedError("restore()")

    def sync(self):
        raise NotImplementedError("sync()")


class ObjectState(State):
    """State of Python objects.  Keyword arguments become attributes."""

    def __init__(self, **objects):
        super().__init__()
        self._saved = objects
        self._set()

    def _set(self):
        for name, value in self._saved.items():
            setattr(self, name, value)

    def save(self):
        """Save copies of the objects, so that changes in place do not change them."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self):
        """Return to the saved state."""
        self._saved = copy.deepcopy(self._saved)
        self._set()

    def sync(self):
        """Take the state of the rank with most commits.  Collective."""
        self._sync(self._root())

    def _sync(self, root):
        self._saved = broadcast_object({name: getattr(self, name) for name in self._saved}, root)
        self._set()
        self.save()


class TorchState(ObjectState):
    """State of models, optimizers, schedulers, ElasticSamplers and other objects, as keyword arguments."""

    def __init__(self, model=None, optimizer=None, **objects):
        objects.update(model=model, optimizer=optimizer)
        self._kept = {}  # name -> state_dict
        with_state = {name: value for name, value in objects.items() if hasattr(value, "load_state_dict")}
        for name, value in with_state.items():
            object.__setattr__(self, name, value)
            self._kept[name] = None
        super().__init__(**{name: value for name, value in objects.items() if name not in with_state})
        self.save()

    def save(self):
        for name in self._kept:
            self._kept[name] = copy.deepcopy(getattr(self, name).state_dict())
        super().save()

    def restore(self):
        for name, state in self._kept.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def _sync(self, root):
        for name in self._kept:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root)
            elif isinstance(value, ElasticSampler):
                # What any rank has processed is processed.
                every = allgather_object(value.state_dict())
                value.load_state_dict({"epoch": every[root]["epoch"],
                                       "processed_indices": set().union(*(one["processed_indices"] for one in every
                                                                          if one["epoch"] == every[root]["epoch"]))})
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), root))
        super()._sync(root)


def run(function):
    """Decorator: call function(state, ...) with the same state on all ranks.  If the job fails, join it again and call the
    function again from the last commit.

    All ranks must come back.  The remaining ranks wait in init(), which raises Error if they do not.
    """
    @functools.wraps(function)
    def wrapper(state, *arguments, **keywords):
        _job.init()
        again = False
        while True:
            if again:
                _job.init()
            try:
                if again:
                    state.on_reset()
                state.sync()
                return function(state, *arguments, **keywords)
            except _errors.Error as error:
                if error.errno == errno.EINVAL:
                    raise  # the ranks disagree, or one refuses: coming back would not help
                _job.shutdown()  # first: a state that is loaded in a job ends a step with the other ranks
                gates.drain(quietly=True)  # of updates that failed; all operations have ended
                state.restore()
                again = True
    return wrapper
