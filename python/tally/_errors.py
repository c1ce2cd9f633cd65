"""Errors: the exceptions of the package, and the library's sentences in words of the model.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import errno
import os

from . import _lib, _where


class Error(RuntimeError):
    """An operation or the communicator failed.  `errno` is the C library's error number (positive)."""

    __module__ = "tally"  # the public name, for tracebacks

    def __init__(self, sentence="", number=0):
        super().__init__(sentence)
        self.errno = number

    def __reduce__(self):
        return type(self), (str(self), self.errno)


class NotInitializedError(RuntimeError, ValueError):
    """A call before init(), after shutdown(), or in a forked child of the process that called init()."""

    __module__ = "tally"


def again(failure):
    """Return a copy of a stored failure, to raise.  The failure itself would keep each frame that it leaves, with its
    contents.  Returns the failure itself if a user's class cannot be copied."""
    try:
        return copy.copy(failure)
    except Exception:
        return failure


def failed(status, what, sentence=None):
    """The exception for a call that returned `status`.  sentence: the library's; None: the calling thread's tally_error()."""
    return Error((_lib.error() if sentence is None else sentence) or "%s: %s" % (what, os.strerror(-status)), -status)


explainers = []  # sentence -> sentence


def explain(sentence):
    """A sentence of the library's in words of the model: which parameters its buckets hold, as the explainers say."""
    for explainer in explainers:
        try:
            sentence = explainer(sentence)
        except Exception as error:  # the sentence itself matters more
            if _where.is_handlers(error):
                raise
    return sentence


def disagreement(what, meant):
    """The exception for ranks that disagree about `what`, worded as the library does.  meant: rank -> its side in words."""
    sides = {}
    for rank, words in sorted(meant.items()):
        runs = sides.setdefault(words, [])
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = ["%s on %s %s" % (words, "rank" if runs[0][0] == runs[-1][1] else "ranks",
                             ", ".join("%d" % a if a == b else "%d-%d" % (a, b) for a, b in runs))
            for words, runs in sides.items()]
    return Error(explain("%s: the ranks disagree: %s" % (what, ", ".join(said))), errno.EINVAL)
