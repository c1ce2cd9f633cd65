"""Methods of a process group as torch calls them: by c10d's names of arguments, on any device, past any mode.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import inspect

import torch.distributed as dist

from . import dispatched

# What the same argument is called in c10d's methods, whose shorter forms have a field of the options in their place.
_SAME = (("tensors", "tensor"), ("dst", "dstRank"), ("src", "srcRank"), ("opts", "root", "op", "timeout"),
         ("output", "outputs", "output_tensor", "output_tensors", "outputTensor", "outputTensors", "output_lists"),
         ("input", "inputs", "input_tensor", "input_tensors", "inputTensor", "inputTensors", "input_list"))


def _renamed(name, parameters):
    """The parameter that an argument of this name stands for."""
    same = next((names for names in _SAME if name in names), ())
    return name if name in parameters else next((one for one in parameters if one in same), name)


def takes_any_names(method, *names):
    """A method of Group that takes all names of its arguments.  `names`: the method's; the first is this one's.

    It leaves tensors to another backend for their device: to the first of that backend's methods of these names, which
    changed between releases of PyTorch.  Where PyTorch's dispatcher must see the call, it goes through that."""
    signature = inspect.signature(method)
    parameters = signature.parameters
    operator = next((name for name in names if hasattr(dist.ProcessGroup, name)), None)  # the one that calls c10d's operator

    def reduction(*arguments, **named):
        given = signature.bind(*arguments, **named).arguments
        options = given.get("opts", given.get("op"))
        reduction = getattr(options, "reduceOp", options)
        return dist.ReduceOp.SUM if reduction is None else reduction

    @functools.wraps(method)
    def call(self, *arguments, **named):
        if self.mixed:
            tensor = dispatched.first((*arguments, *named.values()))
            other = None if tensor is None else self.other(tensor.device)
            if other is not None:
                name = next((name for name in names if hasattr(other, name)), names[0])
                return getattr(other, name)(*arguments, **named)
        given = named and {_renamed(name, parameters): value for name, value in named.items()}
        if dispatched.passes(arguments, named) and operator is not None:
            return dispatched.call(self, operator, reduction(self, *arguments, **given), arguments, named)
        return method(self, *arguments, **given)

    call.direct = method
    return call
