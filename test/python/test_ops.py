"""Operations of tally.torch over real ranks and services."""

import functools
import re
import time

import numpy as np
import pytest

import reference

SIZES = (0, 1, 3, 63, 1024, 4097, 300_001)


def hvd():
    import tally.torch
    return tally.torch


def to_torch(array, dtype):
    import torch
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor):
    import torch
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def fails(kind, call, *words):
    """call() raises `kind` with the words in its sentence."""
    try:
        call()
    except kind as error:
        for word in words:
            assert word in str(error), "%r lacks %r" % (str(error), word)
        return str(error)
    raise AssertionError("%s was not raised" % kind.__name__)


# --- who is who ----------------------------------------------------------------------------------------------


def facts():
    t = hvd()
    return (t.is_initialized(), t.rank(), t.size(), t.local_rank(), t.local_size(), t.cross_rank(), t.cross_size())


def test_facts(four):
    assert four(facts) == [(True, rank, 4, 0, 1, rank, 4) for rank in range(4)]


# --- the same bits as the tree's -----------------------------------------------------------------------------


def reduce_all(dtype, flush):
    """Sums, averages, minima ... of every size; the number of elements that are not the reference's."""
    import torch
    t = hvd()
    own = {count: reference.make(dtype, count, t.rank(), 7, special=True) for count in SIZES}
    torch.set_flush_denormal(flush)
    try:
        handles = []
        for count in SIZES:
            for op in ("Sum", "Average", "Min", "Max", "Product"):
                if dtype == "bool" and op == "Average":
                    continue
                handles.append((count, op, t.allreduce_async(to_torch(own[count], dtype), op=getattr(t, op),
                                                             name="%s.%s.%d" % (dtype, op, count))))
        results = [(count, op, to_numpy(t.synchronize(handle))) for count, op, handle in handles]
    finally:
        torch.set_flush_denormal(False)
    wrong = {}
    for count, op, result in results:
        inputs = [reference.make(dtype, count, rank, 7, special=True) for rank in range(t.size())]
        if n := reference.same(result, reference.reduce(dtype, op, inputs)):
            wrong[count, op] = n
    return wrong


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_bits(four, dtype):
    assert four(reduce_all, dtype, False) == [{}] * 4


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_bits_of_a_tree_that_is_not_full(three, dtype):
    assert three(reduce_all, dtype, False) == [{}] * 3


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_bits_do_not_depend_on_flush_denormal(four, dtype):
    assert four(reduce_all, dtype, True) == [{}] * 4


def scaled():
    t = hvd()
    wrong = 0
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        inputs = [reference.make(dtype, 1000, rank, 3) for rank in range(t.size())]
        result = t.allreduce(to_torch(inputs[t.rank()], dtype), op=t.Sum, prescale_factor=0.3, postscale_factor=1.7)
        wrong += reference.same(to_numpy(result), reference.reduce(dtype, "Sum", inputs, 0.3, 1.7))
    return wrong


def test_scaled(four):
    assert four(scaled) == [0] * 4


# --- forms of allreduce --------------------------------------------------------------------------------------


def forms():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    mean, total = (n - 1) / 2, n * (n - 1) / 2
    x = torch.full((3, 5), float(r))

    assert torch.equal(t.allreduce(x), torch.full((3, 5), mean)), "average is the default"
    assert torch.equal(x, torch.full((3, 5), float(r))), "the input is not changed"
    assert torch.equal(t.allreduce(x, op=t.Sum), torch.full((3, 5), total))
    assert torch.equal(t.allreduce(x, average=False), torch.full((3, 5), total))
    assert torch.equal(t.allreduce(x, average=True), torch.full((3, 5), mean))
    assert torch.equal(t.allreduce(x, op=t.Max), torch.full((3, 5), n - 1.0))
    assert torch.equal(t.allreduce(x, op=t.Min), torch.zeros(3, 5))

    y = x.clone()
    assert t.allreduce_(y, op=t.Sum) is y and torch.equal(y, torch.full((3, 5), total))
    y = x.clone()
    handle = t.allreduce_async_(y, name="y")
    assert t.synchronize(handle) is y and t.poll(handle) and torch.equal(y, torch.full((3, 5), mean))
    assert t.synchronize(handle) is y, "a handle may be synchronized again"

    many = [torch.full((i,), float(r)) for i in range(5)]
    for got in (t.grouped_allreduce(many, op=t.Sum, name="many"), t.grouped_allreduce(many, op=t.Sum),
                t.synchronize(t.grouped_allreduce_async(many, op=t.Sum)),
                t.grouped_allreduce(many, op=t.Sum, compression=t.Compression.fp16)):
        assert [torch.equal(g, torch.full((i,), total)) for i, g in enumerate(got)] == [True] * 5
    assert t.grouped_allreduce_(many, op=t.Sum)[3] is many[3] and torch.equal(many[4], torch.full((4,), total))

    assert torch.equal(t.push_pull(x, name="bps"), torch.full((3, 5), mean))
    assert torch.equal(t.push_pull(x, average=False, name="bps"), torch.full((3, 5), total))
    y = x.clone()
    assert t.push_pull_inplace(y, name="bps") is y and torch.equal(y, torch.full((3, 5), mean))
    y = x.clone()
    assert t.synchronize(t.push_pull_async_inplace(y, False, "bps", 0, 3)) is y
    assert torch.equal(y, torch.full((3, 5), total))
    assert torch.equal(t.synchronize(t.push_pull_async(x, name="bps")), torch.full((3, 5), mean))

    for compression, dtype in ((t.Compression.fp16, torch.float16), (t.Compression.bf16, torch.bfloat16)):
        z = torch.linspace(-3, 3, 100) * (r + 1)
        got = t.allreduce(z, compression=compression, op=t.Sum)
        want = sum((torch.linspace(-3, 3, 100) * (i + 1)).to(dtype).float() for i in range(n)).to(dtype).float()
        assert got.dtype == torch.float32 and torch.equal(got, want)
        counts = torch.arange(4)
        assert torch.equal(t.allreduce(counts, compression=compression, op=t.Sum), counts * n), "integers stay"


def test_forms(four):
    four(forms)


def shapes():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    scalar = t.allreduce(torch.tensor(float(r)), op=t.Sum)
    assert scalar.shape == () and scalar.item() == n * (n - 1) / 2
    empty = t.allreduce(torch.empty(0, 4), op=t.Sum)
    assert empty.shape == (0, 4)
    assert t.allreduce_(torch.empty(3, 0)).shape == (3, 0)
    # Strides differ over the ranks; places in the tensor count, not places in memory.
    base = torch.arange(12.0).reshape(3, 4)
    x = base.t().contiguous().t() if r % 2 else base.clone()
    assert x.is_contiguous() != bool(r % 2)
    assert torch.equal(t.allreduce(x, op=t.Sum), base * n)
    assert torch.equal(t.allreduce_(x, op=t.Sum), base * n) and torch.equal(x, base * n)
    images = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert torch.equal(t.allreduce(images), images)
    wide = torch.zeros(4, 10)
    wide[:, 2:5] = r
    t.allreduce_(wide[:, 2:5], op=t.Sum)
    assert wide[:, 2:5].eq(n * (n - 1) / 2).all() and wide.sum().item() == 12 * n * (n - 1) / 2
    wide = torch.ones(2, 3)[:, :1].expand(2, 3)
    assert torch.equal(t.allreduce(wide, op=t.Sum), torch.full((2, 3), float(n)))


def test_shapes(four):
    four(shapes)


def huge():
    import torch
    t = hvd()
    x = torch.arange(10_000_000, dtype=torch.float32)
    return torch.equal(t.allreduce(x), x)


def test_huge(four):
    assert four(huge) == [True] * 4


def gradients():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    x = torch.ones(3, requires_grad=True)
    (t.allreduce(x, op=t.Sum, name="g") * (r + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), n * (n + 1) / 2))
    x = torch.ones(3, requires_grad=True)
    (t.allreduce(x) * (r + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), (n + 1) / 2))
    x = torch.ones(3, requires_grad=True)
    (t.broadcast(x, 1) * (r + 1)).sum().backward()
    # Horovod's gradients of broadcast and allgather are averages over the ranks.
    assert torch.equal(x.grad, torch.full((3,), (n + 1) / 2 if r == 1 else 0.0))
    x = torch.ones(r + 1, 2, requires_grad=True)
    weights = torch.arange(n * (n + 1), dtype=torch.float32).reshape(-1, 2)
    (t.allgather(x) * weights).sum().backward()
    offset = r * (r + 1) // 2
    assert torch.equal(x.grad, weights[offset:offset + r + 1])
    assert t.allreduce(x.sum(), op=t.Max).item() == 2 * n


def test_gradients_flow(four):
    four(gradients)


# --- names ---------------------------------------------------------------------------------------------------


def opposite_orders():
    """Matched by name: each rank submits in an order of its own."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    order = np.random.default_rng(r).permutation(60)
    for step in range(3):
        handles = {int(i): t.allreduce_async(torch.full((1000 * int(i) + 1,), float(i + r)), name="w%d" % i, op=t.Sum,
                                             priority=int(i) * (-1) ** r) for i in order}
        for i, handle in handles.items():
            assert t.synchronize(handle).eq(n * i + n * (n - 1) / 2).all(), i


def test_matched_by_name_in_any_order(four):
    four(opposite_orders)


def kinds_apart():
    import torch
    t = hvd()
    a = t.allreduce_async(torch.ones(3), name="same", op=t.Sum)
    b = t.broadcast_async(torch.full((5,), float(t.rank())), 2, name="same")
    c = t.allgather_async(torch.ones(2), name="same")
    assert t.synchronize(a).eq(t.size()).all() and t.synchronize(b).eq(2).all()
    assert t.synchronize(c).shape == (2 * t.size(),)


def test_a_name_may_be_used_by_each_kind(four):
    four(kinds_apart)


def name_in_flight():
    import torch
    t = hvd()
    t.barrier()
    first = None
    if t.rank() == 0:
        first = t.allreduce_async(torch.ones(10), name="twice", op=t.Sum)
        fails(ValueError, lambda: t.allreduce_async(torch.ones(10), name="twice", op=t.Sum), "twice")
    t.barrier()
    if first is None:
        first = t.allreduce_async(torch.ones(10), name="twice", op=t.Sum)
    assert t.synchronize(first).eq(t.size()).all()
    assert t.allreduce(torch.ones(10), name="twice", op=t.Sum).eq(t.size()).all(), "the next round works"
    for bad in ("", "a\0b"):
        fails(ValueError, lambda: t.allreduce(torch.ones(1), name=bad))
    fails(TypeError, lambda: t.allreduce(torch.ones(1), name=3))


def test_name_in_flight(four):
    four(name_in_flight)


# --- ranks that disagree -------------------------------------------------------------------------------------


def disagree(what):
    import torch
    t = hvd()
    odd = t.rank() == 2
    tensor, op, root = torch.ones(1000), t.Sum, 0
    if what == "shape":
        tensor = torch.ones(999 if odd else 1000)
    elif what == "dims":
        tensor = torch.ones(10, 100) if odd else torch.ones(100, 10)
    elif what == "large":
        tensor = torch.ones(3_000_000 if odd else 6_000_000)
    elif what == "dtype":
        tensor = tensor.double() if odd else tensor
    elif what == "op":
        op = t.Max if odd else t.Sum
    name = "disagree." + what
    began = time.monotonic()
    if what == "root":
        root = 1 if odd else 0
        sentence = fails(RuntimeError, lambda: t.broadcast(tensor, root, name=name), name)
    elif what == "rest":
        sentence = fails(RuntimeError, lambda: t.allgather(torch.ones(2, 4 if odd else 5), name=name), name)
    else:
        sentence = fails(RuntimeError, lambda: t.allreduce(tensor, name=name, op=op), name)
    # Usable at once, under the same name and others.
    assert t.allreduce(torch.ones(1000), name=name, op=t.Sum).eq(t.size()).all()
    assert t.allreduce(torch.ones(7), op=t.Sum).eq(t.size()).all()
    return sentence, time.monotonic() - began


@pytest.mark.parametrize("what", ("shape", "dims", "large", "dtype", "op", "root", "rest"))
def test_ranks_that_disagree(four, what):
    sentences = {sentence for sentence, _ in four(disagree, what)}
    assert len(sentences) == 1, sentences
    assert "2" in sentences.pop(), "the odd rank is named"


def named():
    """Errors have the caller's words and line: Horovod's functions, and where this file calls them."""
    import tally
    import torch
    t = hvd()
    n, line = 4 if t.rank() == 2 else 3, r" \(.*test_ops\.py:\d+\)"
    differ = r"float32 \[3\]( \w+)? on ranks 0-1, 3, \[4\] on rank 2" + line
    for call, said in ((lambda: t.allreduce(torch.ones(n)), r"allreduce no\. \d+: the ranks disagree: "),
                       (lambda: t.synchronize(t.allreduce_async_(torch.ones(n), name="w")),
                        r"'w': the ranks disagree: allreduce "),
                       (lambda: t.reducescatter(torch.ones(4 * n), name="w"), r"'w': the ranks disagree: reducescatter "),
                       (lambda: t.alltoall(torch.ones(4 * n, n)), r"alltoall no\. \d+: the ranks disagree: rows of .* on ranks 0-1, 3, rows of .* on rank 2"),
                       (lambda: tally.push_pull(np.ones(n)), r"push_pull no\. \d+: the ranks disagree: "),
                       (lambda: tally.push_pull(np.ones(n), name="w"), r"'w': the ranks disagree: push_pull "),
                       (lambda: t.broadcast(torch.ones(n), 0), r"broadcast no\. \d+: the ranks disagree: ")):
        sentence = fails(RuntimeError, call)
        if "allreduce" not in said:
            assert re.match(said, sentence) and ("alltoall" in said or re.search(line + "$", sentence)), sentence
        else:
            assert re.fullmatch(said + differ, sentence), sentence
    from tally import _errors
    for made_up, said in (("'sparse.noname.0.rows': x", "sparse_allreduce no. 1: x"),
                          ("'alltoall.noname.2.splits' has waited", "alltoall no. 3 has waited"),
                          ("'device.noname.4[1]': x", "call no. 4: x"), ("'a.reducescatter': x", "'a': x"),
                          ("'/frozen' has waited", "the step of DistributedOptimizer has waited"),
                          ("'1:/frozen': x", "the step of DistributedOptimizer 1: x"), ("'a.rows': x", "'a.rows': x")):
        assert _errors.explain(made_up) == said
    refused = torch.ones(2, dtype=torch.complex64) if t.rank() == 1 else torch.ones(2)
    sentence = fails(TypeError if t.rank() == 1 else RuntimeError, lambda: t.allreduce(refused, name="refused"))
    assert t.rank() == 1 or re.search("rank 1.*" + line + line + "$", sentence), sentence


def test_words_of_the_caller(four):
    four(named)


def test_lines_are_of_scripts_alone():
    """Not of Python's library, by whichever way it calls, nor of a package, unless the program is one."""
    import concurrent.futures
    import contextlib
    import operator
    import types
    from tally import _where

    def within(path, call):
        """`call`, called by a file of that path."""
        return eval(compile("lambda: call()", path, "eval"), {"call": call})

    wrapped = within("/lib/site-packages/typing_extensions.py", _where.of_caller)
    packaged = within("/lib/dist-packages/program/train.py", wrapped)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(_where.of_caller).result() == pool.submit(wrapped).result() == ""
        assert pool.submit(packaged).result() == " (/lib/dist-packages/program/train.py:1)"
        assert pool.submit(within("/data/train.py", packaged)).result() == " (/data/train.py:1)"
    said = []
    look = map(operator.methodcaller("of_caller"), [_where])
    thing = types.SimpleNamespace(close=functools.partial(said.extend, look))
    with contextlib.closing(thing):
        pass
    assert re.fullmatch(r" \(.*test_ops\.py:\d+\)", said[0]), said


def test_an_interrupt_leaves_no_future_open():
    from tally.torch.group.outcome import Begun
    begun = Begun()
    ended = begun.then_outcome()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.end(interrupt)
    assert ended.done()


def refuse(what):
    """Rank 1 cannot hand over its tensor: it says why, and the others get that."""
    import torch
    t = hvd()
    odd = t.rank() == 1
    bad, kind, word = {
        "sparse": (torch.eye(3).to_sparse(), TypeError, "sparse"),
        "complex": (torch.zeros(3, dtype=torch.complex64), TypeError, "complex64"),
        "device": (torch.zeros(3, device="meta"), NotImplementedError, "meta"),
        "nested": (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), TypeError, "nested"),
        "object": ([1, 2, 3], TypeError, "list"),
    }[what]
    for call in (lambda x: t.allreduce(x, name="refused", op=t.Sum), lambda x: t.allreduce(x, op=t.Sum),
                 lambda x: t.broadcast(x, 0, name="refused"), lambda x: t.allgather(x, name="refused"),
                 lambda x: t.grouped_allreduce([x, x], op=t.Sum)):
        if odd:
            fails(kind, lambda: call(bad), word)
        else:
            fails(RuntimeError, lambda: call(torch.zeros(3, 3)), word)
    # At once under the same names, also for the rank that is ahead since it has waited for nothing.
    for _ in range(2):
        if odd:
            fails(kind, lambda: t.allreduce(bad, name="refused", op=t.Sum), word)
        else:
            fails(RuntimeError, lambda: t.allreduce(torch.zeros(3, 3), name="refused", op=t.Sum), word)
    assert t.allreduce(torch.ones(3), name="refused", op=t.Sum).eq(t.size()).all()
    assert t.allreduce(torch.ones(3), op=t.Sum).eq(t.size()).all()


@pytest.mark.parametrize("what", ("sparse", "complex", "device", "nested", "object"))
def test_refused_tensors(four, what):
    four(refuse, what)


def refuse_argument(what):
    """Rank 1 has an argument that makes no sense: it says so, and the others get that instead of waiting."""
    import torch
    t = hvd()
    odd = t.rank() == 1
    x = torch.ones(3)
    call, kind, word = {
        "factor": (lambda name: t.allreduce(x, name=name, prescale_factor=0.0 if odd else 1.0), ValueError,
                   "prescale_factor"),
        "priority": (lambda name: t.allreduce(x, name=name, priority=1.5 if odd else 1), TypeError, "float"),
        "root": (lambda name: t.broadcast(x, "0" if odd else 0, name=name), TypeError, "argument"),
        "no rank": (lambda name: t.broadcast(x, 17 if odd else 0, name=name), ValueError, "17"),
    }[what]
    for name in ("refused argument", None):
        fails(kind if odd else RuntimeError, lambda: call(name), word)
    assert t.allreduce(x, name="refused argument", op=t.Sum).eq(t.size()).all()
    assert t.allreduce(x, op=t.Sum).eq(t.size()).all()


@pytest.mark.parametrize("what", ("factor", "priority", "root", "no rank"))
def test_refused_arguments(four, what):
    four(refuse_argument, what)


def arguments():
    import torch
    t = hvd()
    x = torch.ones(2)
    fails(ValueError, lambda: t.allreduce(x, average=True, op=t.Sum), "op", "average")
    fails(ValueError, lambda: t.allreduce(x, op="Sum"), "op")
    fails(ValueError, lambda: t.allreduce(x, op=t.Sum, prescale_factor=0.0, name="zero"), "prescale_factor")
    fails(ValueError, lambda: t.broadcast(x, 17, name="nobody"))
    fails(ValueError, lambda: t.allreduce(torch.ones(2, dtype=torch.bool), name="truth"))
    fails(ValueError, lambda: t.broadcast_parameters(3, 0))
    fails(TypeError, lambda: t.broadcast_parameters({"a": 3}, 0), "a")
    assert t.allreduce(x, op=t.Sum, name="zero").eq(t.size()).all()


def test_arguments(four):
    four(arguments)


# --- broadcast, allgather, objects ---------------------------------------------------------------------------


def broadcasts():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    for root in range(n):
        x = torch.arange(100.0) * (r + 1)
        assert torch.equal(t.broadcast(x, root), torch.arange(100.0) * (root + 1))
        assert torch.equal(x, torch.arange(100.0) * (r + 1)), "not changed"
        assert t.broadcast_(x, root, name="b") is x and torch.equal(x, torch.arange(100.0) * (root + 1))
        x = torch.full((3, 4), float(r)).t()
        assert t.synchronize(t.broadcast_async_(x, root)) is x and x.eq(root).all()
        assert t.synchronize(t.broadcast_async(torch.tensor(r), root)).item() == root
    for name in reference.DTYPES:
        own = reference.make(name, 5000, r, 11, special=True)
        got = to_numpy(t.broadcast(to_torch(own, name), 1))
        assert reference.same(got, reference.make(name, 5000, 1, 11, special=True)) == 0, name
    assert t.broadcast(torch.empty(0, 3), 0).shape == (0, 3)
    large = torch.full((3_000_000,), float(r))
    assert t.broadcast_(large, 3 % n).eq(3 % n).all()


def test_broadcast(four):
    four(broadcasts)


def gathers():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    got = t.allgather(torch.full((r + 1, 3), float(r)), name="g")
    assert torch.equal(got, torch.cat([torch.full((i + 1, 3), float(i)) for i in range(n)]))
    got = t.synchronize(t.allgather_async(torch.full((2, 2, 2), r)))
    assert torch.equal(got, torch.cat([torch.full((2, 2, 2), i) for i in range(n)]))
    assert torch.equal(t.allgather(torch.tensor(r)), torch.arange(n))
    got = t.allgather(torch.full((0 if r == 1 else 2, 3), float(r)))
    assert got.shape == (2 * (n - 1), 3) and got[:, 0].tolist() == [float(i) for i in range(n) if i != 1 for _ in "ab"]
    assert t.allgather(torch.empty(0, 7)).shape == (0, 7)
    sizes = [1, 700_000, 5, 40_000]
    got = t.allgather(torch.full((sizes[r],), r, dtype=torch.int32))
    assert torch.equal(got, torch.cat([torch.full((sizes[i],), i, dtype=torch.int32) for i in range(n)]))
    for name in reference.DTYPES:
        got = to_numpy(t.allgather(to_torch(reference.make(name, 10 + r, r, 5), name)))
        assert reference.same(got, np.concatenate([reference.make(name, 10 + i, i, 5) for i in range(n)])) == 0, name
    rows = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(t.allgather(rows), torch.cat([rows] * n))


def test_allgather(four):
    four(gathers)


def objects():
    t = hvd()
    value = {"rank": t.rank(), "list": [1, 2.5, "three"], "nothing": None}
    assert t.broadcast_object(value, 2)["rank"] == 2
    assert t.broadcast_object(value if t.rank() == 1 else None, root_rank=1, name="o")["list"] == [1, 2.5, "three"]
    assert t.broadcast_object(b"x" * 3_000_000 if t.rank() == 0 else None) == b"x" * 3_000_000
    if t.rank() == 0:
        fails(Exception, lambda: t.broadcast_object(time.sleep.__self__ and (x for x in ()), 0))
    else:
        fails(RuntimeError, lambda: t.broadcast_object(None, 0), "pickle")
    assert t.broadcast_object(t.rank(), 3) == 3


def test_broadcast_object(four):
    four(objects)


def parameters():
    import torch
    t = hvd()
    torch.manual_seed(t.rank())
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(2, 2))
    model.to(memory_format=torch.channels_last)
    model(torch.randn(5, 3, 6, 4).to(memory_format=torch.channels_last))
    t.broadcast_parameters(model.state_dict(), root_rank=1)
    states = [{k: v.tolist() for k, v in model.state_dict().items()}]
    torch.manual_seed(10 + t.rank())
    torch.nn.init.normal_(model[0].weight)
    t.broadcast_parameters(model.named_parameters(), root_rank=2)
    states.append([p.tolist() for p in model.parameters()])
    torch.nn.init.normal_(model[0].weight)
    t.broadcast_parameters(list(model.parameters()), root_rank=0)
    states.append([p.tolist() for p in model.parameters()])
    return states


def test_broadcast_parameters(four):
    results = four(parameters)
    assert all(result == results[0] for result in results)


def barriers():
    t = hvd()
    if t.rank() == 3:
        time.sleep(0.5)
    late = time.monotonic()
    t.barrier()
    return late, time.monotonic()


def test_barrier(four):
    times = four(barriers)  # one clock: one machine
    assert max(entered for entered, _ in times) <= min(left for _, left in times)


def facts_of_services():
    import tally
    return tally.report()


def test_report(four):
    report = four(facts_of_services)[0]
    assert report
