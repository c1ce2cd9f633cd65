"""Gates: a parameter that is read through its module has the update that step() has put off.

Structure: `due` maps a parameter (its id) to its owner, the Barrier that has yet to update it.  `flying` maps one to the
owner that reduces its gradient behind backward's end.  Both refer to owners weakly, so these tables keep no model.  They
keep the operations: the garbage collector would end those of an optimizer in a cycle before it asks the optimizer.
`observed` maps one that this forward has not used yet to the Order (horovod/order.py) to tell on its first use.  A Gate is a forward
pre-hook in front of a module's others.  A Parameters is a dictionary in place of the module's `_parameters`, for parameters
that are read without a call of their module.  A FlatWeights is the attribute of torch's recurrent modules that holds a list
of their parameters, for C++.

How: guard() finds every module that holds one of the parameters, and all modules around them, and puts both in place.
They stay: where nothing is due, a gate is a look at an empty dictionary.  A gate updates all that is due of its module.
torch's own modules without children read their parameters by name alone, so the mapping serves them, and they need no Gate:
a hook costs a call 10 us.  Compiled code passes no mapping.  So as soon as torch.compile compiles anything, they get theirs.
Code that torch.compile has made has no gates; the gate in front of it, of the compiled wrapper or the nearest eager
parent, updates all that lies inside.  Compiled code without such a gate is cut where its gates are.
What C++ code or another process may read, past all gates, is in `_exposed`, and step() waits for it.

Any thread may pass a gate: each Barrier has a lock of its own, so that threads which train different models never wait for
each other.  In backward there must be nothing due.

Why several kinds: nn.MultiheadAttention reads `out_proj.weight` without a call, and nn.LSTM reads a list of its own, in a
call or not.  None of the gates sees all of these.  The optimizer gets parameters alone, so guard() finds modules through
the garbage collector, once.
Evidence: test/python/test_cross_barrier.py; bench/train/barrier.py (commit 68c1a03).  Rejected: hooks on all modules of
the process (every module pays); a tensor subclass (it reaches user code); draining in each `parameters()`
(`next(model.parameters()).device` stands in many forwards); keys by the tensor (its Python hash took 0.5 ms of a step
with 161 parameters).

SPDX-License-Identifier: Apache-2.0
"""

import collections
import errno
import functools
import gc
import threading
import time
import weakref
from collections.abc import ItemsView, ValuesView
from contextlib import contextmanager

import torch

from ... import _errors, _job, _where
from .. import patches

# By id(), for a tensor's own hash is slow; the owners keep the parameters.
due = {}       # id(parameter) -> (reference to its owner, operations); changed under the owner's lock
flying = {}    # id(parameter) -> (reference to the owner that reduces its gradient, operation); under the owner's lock
observed = {}  # id(parameter) -> (Order, the parameter's number in that), until forward uses it
changes = 0    # grows when gates that guard() has put in place may fall short: each Barrier then calls it again

_guarded = {}  # id(parameter) -> weak reference to it
_exposed = {}  # id(guarded parameter) -> _SCRIPTED or _SHARED: something reads it past all gates
_bare = weakref.WeakSet()  # modules with Parameters and without a Gate, until torch.compile compiles
_calling = threading.local()  # .through: how many contexts of through() this thread is in; .collecting: it collects garbage
_Module = torch.nn.Module
# Where parameters lie that no gate sees read, and what the user can do.
_SCRIPTED = "a ScriptModule, whose C++ code", "To export a model, script or trace a copy of it (copy.deepcopy)"
_SHARED = "shared memory, where another process", "To share what is trained so far, share a copy (copy.deepcopy)"
_is_compiling, _in_backward = patches.is_compiling, patches.graph_task


def settle(parameters):
    """Make the updates that are due among `parameters`."""
    if getattr(_calling, "through", 0):
        return
    owners = {}
    for p in parameters:
        owner = owner_of(due, p)
        if owner is not None:
            owners.setdefault(owner, []).append(p)
    for owner, wanted in owners.items():
        if _in_backward() != -1:
            raise _errors.Error("%s is read in backward while its update is due: its graph is older than the last "
                                "step(); call synchronize() after step()" % owner.name_of(wanted[0]), errno.EINVAL)
        owner.finish(wanted)


def observe(numbers):
    """Tell orders when forward next uses their parameters.  numbers: id(parameter) -> (Order, the parameter's number in it)."""
    observed.update(numbers)


def ignore(order):
    """Tell `order` nothing any more."""
    for key in [key for key, (one, _) in list(observed.items()) if one is order]:
        observed.pop(key, None)


def _tell(parameters):
    if getattr(_calling, "through", 0):
        return
    for p in parameters:
        order, number = observed.pop(id(p), (None, None))  # all are observed anew when their order opens
        if order is not None:
            order.used(number)


def land(p):
    """Have the gradient of p reduced: somebody reads p, perhaps to look at that.  Backward itself does not."""
    owner = owner_of(flying, p)
    if owner is not None and not getattr(_calling, "through", 0) and _in_backward() == -1:
        owner._tally_land()


def read(parameters):
    """Have these parameters updated, and their gradients reduced."""
    if due:
        settle(parameters)
    if flying:
        for p in parameters:
            land(p)


def owner_of(table, p):
    """The owner of p in `due` or `flying`, or None."""
    entry = table.get(id(p))
    return None if entry is None else entry[0]()


def all_owners():
    """The owners of all updates that are due."""
    return {reference() for reference, _ in list(due.values())} - {None}


def drain(quietly=False, timeout=None):
    """Make all updates that are due.  quietly: give up those that fail, without a word; with a timeout, in seconds for all, they
    stay due, and whoever reads their parameters hears why they fail."""
    end = None if timeout is None else time.monotonic() + timeout
    for owner in all_owners():
        try:
            owner.finish(timeout=None if end is None else max(0, end - time.monotonic()))
        except Exception as error:
            if not quietly or _where.is_handlers(error):
                raise


def living(numbers):
    """Those of the parameters with these ids that somebody else than their optimizer may have."""
    return _guarded.keys() & numbers


def is_collecting():
    """Whether this thread collects garbage, so that it may wait for nothing."""
    return getattr(_calling, "collecting", False)


def _note_collection(phase, _):
    _calling.collecting = phase == "start"


@contextmanager
def through():
    """Within it this thread passes all gates without an update."""
    _calling.through = getattr(_calling, "through", 0) + 1
    try:
        yield
    finally:
        _calling.through -= 1


# --- what stands in a module ---------------------------------------------------------------------------------


class _Items(ItemsView):
    def __iter__(self):
        for name in list(self._mapping):
            yield name, self._mapping[name]


class _Values(ValuesView):
    def __iter__(self):
        for _, p in _Items(self._mapping):
            yield p


class Parameters(dict):
    """A module's `_parameters`.  Copies and pickles of it are plain dictionaries."""

    __slots__ = ()

    def __getitem__(self, name):
        p = dict.__getitem__(self, name)  # spelt as torch.compile understands it
        if not _is_compiling():
            number = id(p)
            if number in due:
                settle((p,))
            if number in observed:
                _tell((p,))
            if number in flying:
                land(p)
        return p

    def __iter__(self):  # one of our own keeps dict(self) and {**self} from going past __getitem__
        return dict.__iter__(self)

    def get(self, name, default=None):
        return self[name] if name in self else default

    def items(self):
        return _Items(self)

    def values(self):
        return _Values(self)

    def pop(self, name, *default):
        if name in self:
            self[name]
        return dict.pop(self, name, *default)

    def popitem(self):
        settle(dict.values(self))
        return dict.popitem(self)

    def copy(self):
        return dict(self)

    def __reduce_ex__(self, protocol):
        return dict, (dict(self),)


class FlatWeights:
    """The attribute `_flat_weights` of torch's recurrent modules.  C++ reads that list past each method of a list."""

    def __get__(self, module, kind=None):
        if module is None:
            return self
        try:
            weights = module.__dict__["_flat_weights"]
        except KeyError:
            raise AttributeError("%r object has no attribute '_flat_weights'" % type(module).__name__) from None
        if not _is_compiling() and (due or observed):
            _pass([p for p in weights if p is not None])
        if flying:
            for p in weights:
                land(p)
        return weights

    def __set__(self, module, weights):
        module.__dict__["_flat_weights"] = weights

    def __delete__(self, module):
        del module.__dict__["_flat_weights"]


class Gate:
    """A module's forward pre-hook.

    covered: the module lies inside of what was compiled, behind the gate of that.
    whole: the module is a compiled wrapper, and the gate is that of all inside."""

    __slots__ = ("covered", "whole")

    def __init__(self, whole=False):
        self.covered, self.whole = False, whole

    def __call__(self, module, arguments):
        if _is_compiling():
            if not self.covered and not getattr(torch.compiler, "_is_exporting_flag", False):
                _meet_uncovered(module)
            return
        if self.whole:
            if not self.covered:
                self.covered = True
                _cover(module)
            if due or observed:
                _pass(_all_of(module))
            return
        inside = _compiled_children(module) if module._modules else ()
        if due or observed:
            _pass(_own(module))
            for child in inside:
                _pass(_all_of(child))

    def __reduce__(self):
        return getattr, ({}, "get")  # a pickled or copied module has a hook that does nothing, known without Tally


def _pass(parameters):
    if due:
        settle(parameters)
    if observed:
        _tell(parameters)


@patches.never_compiled
def _meet_uncovered(module):
    """Compiled code calls a module with a gate, and has none in front: pass it here, between two graphs."""
    _change()
    _pass(_all_of(module))


def _change():
    global changes
    changes += 1


def _is_wrapper(module):
    return type(module).__name__ == "OptimizedModule"


def _all_of(module):
    """The parameters of a module and of those inside, past the gates."""
    return [p for one in module.modules() for p in _own(one)]


def _own(module):
    parameters = module.__dict__.get("_parameters")
    return dict.values(parameters) if isinstance(parameters, dict) else ()


def _gate(module):
    for hook in module._forward_pre_hooks.values():
        if type(hook) is Gate:
            return hook
    return None


def _cover(module):
    """Modules inside `module` need no gates of their own while compiled."""
    for one in module.modules():
        if one in _bare:
            _hook(one)
        gate = _gate(one)
        if gate is not None:
            gate.covered = True


def _compiled_children(module):
    """Children that module.compile() has compiled; a compiled wrapper among them gets a gate of its own."""
    found = ()
    for child in module._modules.values():
        if _is_wrapper(child):
            if _gate(child) is None:
                _attach(child)
        elif getattr(child, "_compiled_call_impl", None) is not None:
            found += (child,)
            gate = _gate(child)
            if gate is None or not gate.covered:
                _attach(child)
                _cover(child)  # gives it a Gate, if it is bare
    return found


def _attach(module):
    """Give a module its gates.  Whether its parameters have gates then."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if isinstance(module, torch.nn.RNNBase):
        patches.flat_weights(FlatWeights())
    parameters = module.__dict__.get("_parameters")
    if type(parameters) in (dict, collections.OrderedDict):
        module.__dict__["_parameters"] = Parameters(parameters)
    is_gated = type(module.__dict__.get("_parameters")) is Parameters
    if is_gated and _reads_by_name(module) and patches.begin_to_compile(_compile_begins):
        _bare.add(module)
    else:
        _hook(module)
    return is_gated


def _hook(module):
    _bare.discard(module)
    if _gate(module) is None:
        module.register_forward_pre_hook(Gate(_is_wrapper(module)), prepend=True)


def _reads_by_name(module):
    return (not module._modules and not isinstance(module, torch.nn.RNNBase) and "forward" not in module.__dict__
            and type(module).__module__.startswith("torch.nn.modules."))


def _compile_begins(*_):  # without an argument before PyTorch 2.8
    for module in list(_bare):
        _hook(module)


# --- which modules -------------------------------------------------------------------------------------------


def _modules():
    """All modules that there are; type() does not ask proxies."""
    return [one for one in gc.get_objects() if issubclass(type(one), _Module) and "_modules" in one.__dict__]


def guard(parameters):
    """Gate the parameters wherever a module holds them, now and later.

    Returns (those that have no gate: no module holds them, or one that cannot be gated; whether a compiled module that
    no other calls, or one with all of them inside, is in front of any)."""
    wanted = {id(p) for p in parameters}
    _prepare()
    for p in parameters:
        _guarded[id(p)] = weakref.ref(p, functools.partial(_lose, id(p)))
        if p.is_cpu and p.is_shared():
            _exposed.setdefault(id(p), _SHARED)
    modules, parents, gated, bare = _modules(), collections.defaultdict(list), set(), set()
    for module in modules:
        for child in module._modules.values():
            parents[id(child)].append(module)
    around = []
    for module in modules:
        own = {id(p) for p in _parameters_of(module)} & wanted
        if own:
            (gated if _attach(module) else bare).update(own)
            if isinstance(module, torch.jit.ScriptModule):
                _exposed.update(dict.fromkeys(own, _SCRIPTED))
            around.append(module)
    seen = {id(module) for module in around}
    for module in around:  # grows
        for parent in parents[id(module)]:
            if id(parent) not in seen:
                seen.add(id(parent))
                _attach(parent)
                around.append(parent)
    compiled = _cover_compiled(around, parents, wanted)
    return [p for p in parameters if id(p) in bare or id(p) not in gated or id(p) in _exposed], compiled


def why_ungated(p):
    """Where a parameter that guard() has returned lies, in a sentence, and what the user can do."""
    where, advice = _exposed.get(id(p), (None, None))
    if where is None:
        return "no module, so step() waits for their updates: Tally cannot see when they are read"
    return "%s reads them past Tally, so step() waits for their updates. %s" % (where, advice)


def _expose(parameters, where):
    """Something reads these past all gates from now on.  where: they lie."""
    own = dict.fromkeys({id(p) for p in parameters} & _guarded.keys() - _exposed.keys(), where)
    if own:
        _exposed.update(own)
        _change()


def _is_gate(hook):
    """Also what a copied Gate is."""
    return type(hook) is Gate or getattr(hook, "__self__", None) == {}


@contextmanager
def _without_gates(module):
    """Within it the module and those inside have no Gates: torch.jit.script would compile them."""
    taken = []
    for one in module.modules():
        hooks = one._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if _is_gate(hook)]:
            taken.append((hooks, key, hooks.pop(key)))
    try:
        yield
    finally:
        for hooks, key, hook in reversed(taken):
            hooks[key] = hook
            hooks.move_to_end(key, last=False)


def _exposing(create):
    """TorchScript's function that makes modules; it tells whose parameters C++ code reads, and leaves out the Gates."""
    def create_script_module(nn_module, *arguments, **named):
        with _without_gates(nn_module):
            result = create(nn_module, *arguments, **named)
        _expose(nn_module.parameters(), _SCRIPTED)
        return result

    return create_script_module


def _updated(state):
    """The state_dict of an exported program whose parameters are updated."""
    def state_dict(self):
        values = state(self)
        read([p for p in values.values() if isinstance(p, torch.Tensor)])
        return values

    return state_dict


def _telling(function):
    """A function that has parameters get into memory which other processes read, and tells of them."""
    def share(p):
        read((p,))
        result = function(p)
        _expose((p,), _SHARED)
        return result

    return share


def _parameters_of(module):
    if isinstance(module, torch.jit.ScriptModule):
        return module.parameters(recurse=False)
    return [p for p in _own(module) if p is not None]


def _cover_compiled(around, parents, wanted):
    """Cover what is compiled; whether one of those has all parameters inside, or has nobody in front."""
    whole = False
    for module in around:
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if not compiled and not _is_wrapper(module):
            continue
        _cover(module)
        if isinstance(module._modules.get("_orig_mod"), torch.fx.GraphModule):
            continue  # a strict torch.export leaves that of its graph, which nobody calls; a Gate of its own serves all others
        inside = {id(p) for p in _all_of(module)} & wanted
        eager = [one for one in parents[id(module)] if not _is_wrapper(one)]
        whole = whole or (bool(inside) and (inside == wanted or compiled and not eager))
    return whole


def _lose(number, reference):
    if _guarded.get(number) is reference:
        del _guarded[number]
        observed.pop(number, None)
        due.pop(number, None)
        _exposed.pop(number, None)


@functools.lru_cache(None)
def _prepare():
    """Once: hear of parameters that get into other modules, and of the end."""
    def registered(module, name, p):
        reference = _guarded.get(id(p))
        if reference is not None and reference() is p:
            _attach(module)

    torch.nn.modules.module.register_module_parameter_registration_hook(registered)
    patches.zero_grad(_zeroing)
    patches.script_module(_exposing)
    patches.program_state(_updated)
    patches.share_parameters(_telling)
    gc.callbacks.append(_note_collection)
    _job.before_shutdown(lambda: drain(quietly=True, timeout=10))


def _zeroing(zero_grad):
    """Module.zero_grad(); a gradient on its way is zeroed behind its update."""
    def zero(self, set_to_none=True):
        if not due and not observed:
            return zero_grad(self, set_to_none)
        with through():
            if set_to_none:
                return zero_grad(self, set_to_none)
            for p in self.parameters():
                owner = owner_of(due, p)
                if owner is not None and owner.zero_later(p):
                    continue
                owner = owner_of(flying, p)
                if owner is not None:
                    owner._tally_land()
                if p.grad is not None:
                    p.grad.detach_() if p.grad.grad_fn is not None else p.grad.requires_grad_(False)
                    p.grad.zero_()

    return zero
