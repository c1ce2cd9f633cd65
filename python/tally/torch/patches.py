"""All that this package changes in PyTorch, and all that it takes of PyTorch's private parts.  Other files do neither.

A change: one of PyTorch's functions is replaced.  Each function under "changes" takes make(plain), which returns the
replacement; what that does stands in the file that calls it.

Each entry says why, and for which PyTorch, if not for all from 2.1, the oldest that works, to 2.13, the newest that is tested.
A new PyTorch may lack any of these names.  Where an older one does, the entry says so, or asks by hasattr() or getattr().

Not here are private attributes of PyTorch's objects, which the files use where they need them:

    tensor._version, ._base, ._values()      whether somebody has written to a gradient; a sparse tensor before coalesce()
    module._parameters, ._modules, ._forward_pre_hooks, ._compiled_call_impl, RNNBase._flat_weights
                                             crossing/gates.py stands in front of a module's parameters
    optimizer._opt_called, ._step_count, ._step_supports_amp_scaling, step.hooked, step._with_counter, ._wrapped_by_lr_sched
                                             schedulers and GradScaler see that a step() of ours is a step()
    DistributedDataParallel._has_rebuilt_buckets                         ddp/cross_barrier.py: buckets stay from then on
    module._get_fsdp_state(), its _fsdp_param_group(s), their _is_hsdp   ddp/hsdp.py: over which ranks FSDP2 shards
    torch.compiler._is_exporting_flag        crossing/gates.py, in code that torch.compile traces

SPDX-License-Identifier: Apache-2.0
"""

import functools
import inspect
import sys
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
from torch import _C
from torch._C import _autograd, _distributed_c10d
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as _optimizer
from torch.utils import _python_dispatch, _pytree

# --- changes -----------------------------------------------------------------------------------------------------


def _replace(owner, name, make):
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(make(plain)))


def destroy_process_group(make):
    """A PyTorch that shuts no group down, and only forgets it, has to tell groups of their end: such as 2.1."""
    plain = dist.destroy_process_group
    code = getattr(inspect.unwrap(plain), "__code__", None)
    if code is not None and "shutdown" not in code.co_names:
        _replace(dist.distributed_c10d, "destroy_process_group", make)
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group


def take_works(convert):
    """Functions that take a work from Python and keep it in C++ get convert(work): C++ would keep half of ours
    (group/work.py).  _register_work came with 2.4."""
    def converting(plain):
        def keep(*arguments, **named):
            return plain(*map(convert, arguments), **{name: convert(one) for name, one in named.items()})
        return keep

    for owner, name in ((_distributed_c10d.Reducer, "_set_forward_pass_work_handle"),
                        (_distributed_c10d, "_register_work")):
        if hasattr(owner, name):
            _replace(owner, name, converting)


def make_ddp(make):
    """DistributedDataParallel.__init__(): models are numbered as they are made, which all ranks do in one order."""
    _replace(DistributedDataParallel, "__init__", make)


def register_comm_hook(make):
    """DistributedDataParallel.register_comm_hook() notes the model: a bucket names neither that nor its process group."""
    _replace(DistributedDataParallel, "register_comm_hook", make)


def end_forward(make):
    """DistributedDataParallel._post_forward(), which prepares for backward, is called behind the updates: backward writes
    to buckets in which gradients may still lie."""
    _replace(DistributedDataParallel, "_post_forward", make)


def grad_scaler(make_unscale, make_update):
    """GradScaler.unscale_() changes gradients in place, and no version shows that: it must find them reduced.  update() ends
    what unscale_() has begun.  torch.amp has the class since 2.3."""
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    _replace(scaler, "unscale_", make_unscale)
    _replace(scaler, "update", make_update)


def zero_grad(make):
    """Module.zero_grad(): a gradient that waits for its update is zeroed behind that."""
    _replace(torch.nn.Module, "zero_grad", make)


def flat_weights(descriptor):
    """RNNBase._flat_weights is a descriptor: C++ reads that list of parameters past each method of a list."""
    if "_flat_weights" not in torch.nn.RNNBase.__dict__:
        torch.nn.RNNBase._flat_weights = descriptor


def script_module(make):
    """torch.jit.script() and trace() make modules whose C++ code reads parameters past Python."""
    _replace(torch.jit._recursive, "create_script_module", make)


def program_state(make):
    """ExportedProgram.state_dict, which a program's own methods read, too, finds parameters updated."""
    kind = getattr(torch.export, "ExportedProgram", None)
    plain = getattr(kind, "state_dict", None)
    if isinstance(plain, property):
        kind.state_dict = property(functools.wraps(plain.fget)(make(plain.fget)), plain.fset, doc=plain.__doc__)


def share_parameters(make):
    """Parameters that get into shared memory, by Tensor.share_memory_() or when they are sent to a process, are read by
    other processes."""
    _replace(torch.Tensor, "share_memory_", make)
    ForkingPickler.register(torch.nn.Parameter, functools.wraps(reduce_tensor)(make(reduce_tensor)))


def begin_to_compile(call):
    """Have torch.compile call call() before it compiles.  Returns whether it will, and has compiled nothing yet; False if
    this PyTorch is too old.  torch._dynamo.reset() clears such calls, so clear() puts this one back."""
    dynamo = sys.modules.get("torch._dynamo")  # making an optimizer imports it
    handler, frames = getattr(dynamo, "callback_handler", None), getattr(dynamo, "convert_frame", None)
    if handler is None or getattr(frames, "FRAME_COUNTER", 1) > 0:
        return False
    if call not in handler.start_callbacks:
        clear = handler.clear

        def clear_others():
            try:
                clear()
            finally:
                handler.register_start_callback(call)

        handler.clear = clear_others
        handler.register_start_callback(call)
    return True


def leave_untraced(package):
    """Have torch.compile, if it has been imported, leave a package's functions alone: under it DDP's reducer calls them while
    frames are traced.  Returns whether it does."""
    for name in ("trace_rules", "skipfiles"):  # the second before 2.3
        rules = sys.modules.get("torch._dynamo." + name)
        if hasattr(rules, "add"):
            rules.add(package)
            return True
    return False


def c10d_kernels(kernels):
    """Put in kernels of c10d's operators, {name: function of the operator that returns the kernel}.  Those that are there
    ask a group for a Backend of C++, which Python cannot make.  Returns what keeps them."""
    library = torch.library.Library("c10d", "IMPL")
    for name, make in kernels.items():
        if hasattr(torch.ops.c10d, name):  # an older PyTorch lacks some
            library.impl(name, make(getattr(torch.ops.c10d, name).default), "BackendSelect")
    return library


# --- what is taken: process groups ---------------------------------------------------------------------------------

Future = _C.Future  # torch.futures.Future's base, which costs a call less
Work = _distributed_c10d.Work
work_of = _distributed_c10d._create_work_from_future  # the Work of C++ that ends with a future


def groups():
    """The process's groups: group -> (backend's name, store)."""
    return dist.distributed_c10d._world.pg_map


def make_group(size, rank, ranks, backend, store, name, timeout):
    """A process group of these ranks.  dist.new_group() names a group of some ranks by the number of groups which a rank is
    in.  Ranks that are in different numbers of groups would look for each other under different names for ever."""
    c10d = dist.distributed_c10d
    made, _ = c10d._new_process_group_helper(size, rank, ranks, dist.Backend(backend), store, group_name=name, timeout=timeout)
    c10d._world.pg_group_ranks[made] = {one: place for place, one in enumerate(ranks)}
    return made


def default_store():
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def store_of(group):
    """The store of a process group: a group of torch's own has no method for it."""
    return dist.distributed_c10d._get_process_group_store(group)


def time_out(group):
    """Seconds after which calls of a process group give up waiting; None if it does not say."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
    except (AttributeError, IndexError, RuntimeError):
        return None


# --- what is taken: the dispatcher, and modes ----------------------------------------------------------------------

DispatchKey, KeySet = _C.DispatchKey, _C.DispatchKeySet
modes = _C._len_torch_dispatch_stack  # how many dispatch modes are active
keys_of = _C._dispatch_keys           # of a tensor: a fake one has Python's
BEHIND_OURS = _C._dispatch_keyset_full_after(DispatchKey.BackendSelect)  # those of the kernels behind c10d_kernels()'s
can_leave = hasattr(torch._ops.OpOverload, "redispatch")  # a kernel can leave a call to another: not before 2.5


def has_meta_kernel(operator):
    """Whether an operator, by its name, has a kernel for tensors without memory."""
    return _C._dispatch_has_kernel_for_dispatch_key(operator, "Meta")


def leaves(values):
    """All that lies in nested lists, tuples and dictionaries."""
    return _pytree.tree_flatten(values)[0]


def leave_modes(stack, kinds):
    """Leave, until the stack of contexts ends, all modes of the caller that change what an update computes: autocast, on
    devices of these kinds, functions' modes, torch.func's transforms, and dispatch modes."""
    if _C._is_any_autocast_enabled():
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
    if _C._len_torch_function_stack():
        stack.enter_context(_C.DisableTorchFunction())
    if _C._functorch.peek_interpreter_stack() is not None:  # within torch.func.grad() and the like
        stack.enter_context(torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack())
    if _C._len_torch_dispatch_stack():
        stack.enter_context(_python_dispatch._disable_current_modes())


DispatchMode = _python_dispatch.TorchDispatchMode  # sees operators, which C++ calls, too
without_functions = _C.DisableTorchFunction                  # contexts in which tensors' classes have no say in functions,
without_functions_of_classes = _C.DisableTorchFunctionSubclass  # and in which modes still have
graph_task = _C._current_graph_task_id  # the number of the backward that this thread is in; -1: none
is_compiling = getattr(torch.compiler, "is_dynamo_compiling", None) or torch._dynamo.is_compiling  # the second in 2.1
never_compiled = torch._disable_dynamo  # torch.compiler.disable imports the compiler at once


# --- what is taken: the profiler, optimizers, modules --------------------------------------------------------------

is_profiled = _autograd._profiler_enabled
# record_function() shows no shapes, and ends in the thread that began it.
enter_range, exit_range = _autograd._record_function_with_args_enter, _autograd._record_function_with_args_exit


def copy_together(targets, sources):
    """Copy each tensor of a list to one of another list in one call."""
    torch._foreach_copy_(targets, sources)


def hooks_of_step(optimizer):
    """All hooks of an optimizer's step()."""
    return [*_optimizer._global_optimizer_pre_hooks.values(), *_optimizer._global_optimizer_post_hooks.values(),
            *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # base of batch normalizations of any dimension, which models are searched for
