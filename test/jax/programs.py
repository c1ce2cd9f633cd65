"""What a process of a JAX job does in the tests: `programs.py NAME [ARGUMENT...]`, started by `tally run`.

Each program compares what JAX's collectives over Tally give with NumPy, bit by bit, and prints one line when it has ended
well.  The sums' order is Tally's tree over ranks.
"""

import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np

if __name__ == "__main__":
    # Not under pytest, which asks for the names alone.
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
    from reference import tree

TYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
         "complex64", "complex128")
HALVES = ("float16", "bfloat16")


def begin(**more):
    """JAX over Tally, with 64-bit types; (jax, rank, number of processes)."""
    import tally.jax
    tally.jax.initialize(**more)
    import jax
    jax.config.update("jax_enable_x64", True)
    return jax, jax.process_index(), jax.process_count()


def mesh_of(jax, *shape):
    names = "xyz"[:len(shape)]
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), tuple(names))


def spread(jax, mesh, own, count):
    """A global array whose piece of this process is `own`, one piece a process along the first axis."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    return jax.make_array_from_process_local_data(sharding, own, (count * own.shape[0], *own.shape[1:]))


def own_piece(array):
    """This process's piece, as NumPy has it."""
    piece, = array.addressable_shards
    return np.asarray(piece.data)


def make(dtype, rank, shape, seed=0):
    """Rank `rank`'s input: the same on whichever rank it is made."""
    random = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    kind = np.dtype(dtype).kind if dtype != "bfloat16" else "f"
    if kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    if kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(dtype)
    if dtype == "bfloat16":
        import ml_dtypes
        dtype = ml_dtypes.bfloat16
    return random.standard_normal(shape).astype(dtype)


def add(a, b):
    return a + b


def same(what, got, expected):
    expected = np.ascontiguousarray(expected)
    assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got.dtype, got.shape, expected.dtype,
                                                                         expected.shape)
    differ = np.ascontiguousarray(got).tobytes() != expected.tobytes()
    assert not differ, "%s: %s, not %s" % (what, got.ravel()[:8], expected.ravel()[:8])


# --- collectives -----------------------------------------------------------------------------------------------------


def check_type(jax, mesh, rank, n, dtype):
    """All collectives of a type in one program, as XLA takes most of the time to compile one."""
    lax, P = jax.lax, jax.sharding.PartitionSpec
    inputs = [make(dtype, r, (n, 35)) for r in range(n)]
    x = spread(jax, mesh, inputs[rank], n)
    whole = np.stack(inputs)  # [from rank, row, column]
    kind = np.dtype(dtype).kind
    wanted = {
        "all_gather": (lambda a: lax.all_gather(a, "x"), whole),
        "all_to_all": (lambda a: lax.all_to_all(a, "x", 0, 0), whole[:, rank]),
        "ppermute": (lambda a: lax.ppermute(a, "x", [(i, (i + 1) % n) for i in range(n)]), inputs[rank - 1]),
        "ppermute to some": (lambda a: lax.ppermute(a, "x", [(0, n - 1)]),
                             inputs[0] if rank == n - 1 else np.zeros_like(inputs[0])),
    }
    if dtype != "bool":
        sums = tree(inputs, add)
        wanted |= {
            "psum": (lambda a: lax.psum(a, "x"), sums),
            "psum_scatter": (lambda a: lax.psum_scatter(a, "x"), sums[rank]),
            "psum_scatter of rows": (lambda a: lax.psum_scatter(a, "x", tiled=True), sums[rank:rank + 1]),
        }
    if kind in "fc":
        wanted["pmean"] = (lambda a: lax.pmean(a, "x"), sums / n)
    if kind in "iuf":
        wanted |= {"pmax": (lambda a: lax.pmax(a, "x"), np.max(inputs, axis=0)),
                   "pmin": (lambda a: lax.pmin(a, "x"), np.min(inputs, axis=0))}

    # An input for each, else XLA would make one operation of equal ones.
    bodies = [body for body, _ in wanted.values()]
    program = jax.shard_map(lambda *given: [body(a) for body, a in zip(bodies, given)], mesh=mesh, in_specs=P("x"),
                            out_specs=P("x"), check_vma=False)
    for (name, (_, expected)), got in zip(wanted.items(), jax.jit(program)(*[x] * len(bodies))):
        if name == "pmean":
            np.testing.assert_allclose(own_piece(got), expected, rtol=1e-6)  # XLA multiplies by 1/n or divides
        else:
            same((name, dtype), own_piece(got), expected)


def check_halves(jax, mesh, rank, n, dtype):
    """What JAX's layer lets through must be right: as it is, or summed as JAX widens it.  Else the error is JAX's."""
    P = jax.sharding.PartitionSpec
    lax = jax.lax
    inputs = [make(dtype, r, (n, 35)) for r in range(n)]
    x = spread(jax, mesh, inputs[rank], n)
    sums = tree([one.astype(np.float32) for one in inputs], add)
    for name, body, expected in (
            ("all_gather", lambda a: lax.all_gather(a, "x"), np.stack(inputs)),
            ("all_to_all", lambda a: lax.all_to_all(a, "x", 0, 0), np.stack(inputs)[:, rank]),
            ("ppermute", lambda a: lax.ppermute(a, "x", [(i, (i + 1) % n) for i in range(n)]), inputs[rank - 1]),
            ("psum", lambda a: lax.psum(a, "x"), sums),
            ("psum_scatter", lambda a: lax.psum_scatter(a, "x"), sums[rank])):
        mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
        try:
            got = own_piece(mapped(x))
        except jax.errors.JaxRuntimeError as error:
            assert "Unsupported primitive type" in str(error), error
            print("rank %d: %s of %s: refused by JAX" % (rank, name, dtype), flush=True)
            continue
        same((name, dtype), got, expected.astype(got.dtype))
        print("rank %d: %s of %s: exact" % (rank, name, dtype), flush=True)


def collectives():
    jax, rank, n = begin()
    mesh = mesh_of(jax, n)
    for dtype in TYPES:
        check_type(jax, mesh, rank, n, dtype)
    for dtype in HALVES:
        check_halves(jax, mesh, rank, n, dtype)
    if n == 4:
        groups(jax, rank)
    # Outside shard_map: XLA puts the collectives in.
    x = spread(jax, mesh, make("float64", rank, (5, 7)), n)
    total = jax.jit(lambda a: a.sum(axis=0), out_shardings=jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec()))(x)
    expected = np.concatenate([make("float64", r, (5, 7)) for r in range(n)]).sum(axis=0)
    np.testing.assert_allclose(own_piece(total), expected, rtol=1e-12)


def moved():
    """multihost_utils on trees with types that jaxlib gives to no MPI, every bit as it was."""
    jax, rank, n = begin()
    import ml_dtypes
    from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
    bits = {"half": np.uint16, "bfloat16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8}
    types = {"half": np.float16, "bfloat16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
             "e5m2": ml_dtypes.float8_e5m2}
    narrow = ("half", "e4m3", "e5m2")  # JAX adds zeros to a bfloat16

    def tree_of(rank):
        made = {name: np.arange(rank, 64 + rank, dtype=kind).reshape(8, 8) * 3 for name, kind in bits.items()}
        for name in narrow:
            made[name][0, 0] = made[name][0, 0] * 0 + (0x8000 if name == "half" else 0x80)  # a zero with a sign
        return {name: array.view(types[name]) for name, array in made.items()} | {
            "one": np.float16(rank + 0.5), "number": 7 * rank, "single": np.full(3, rank, np.float32)}

    trees = [tree_of(r) for r in range(n)]
    for name, got in broadcast_one_to_all(trees[rank]).items():
        same(name, np.atleast_1d(got), np.atleast_1d(trees[0][name]).astype(got.dtype))
    for name, got in broadcast_one_to_all(trees[rank], is_source=rank == n - 1).items():
        same(name, np.atleast_1d(got), np.atleast_1d(trees[n - 1][name]).astype(got.dtype))
    for tiled in (False, True):
        for name, got in process_allgather(trees[rank], tiled=tiled).items():
            pieces = [np.asarray(one[name]).astype(got.dtype) for one in trees]
            whole = np.concatenate(pieces) if tiled and pieces[0].ndim else np.stack(pieces)
            same((name, tiled), got, whole)
    tiny = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    for got in (process_allgather(tiny), process_allgather(jax.numpy.asarray(tiny))):
        same("float4", got, np.stack([tiny] * n))
    spread_tiny = spread(jax, mesh_of(jax, n), tiny, n)
    same("float4", process_allgather(spread_tiny, tiled=True), np.concatenate([tiny] * n))
    # What is spread over the processes, and what jax has.
    mesh = mesh_of(jax, n)
    for name in ("half", "e4m3"):
        array = spread(jax, mesh, trees[rank][name], n)
        same(name, process_allgather(array, tiled=True), np.concatenate([one[name] for one in trees]))
        own = process_allgather(jax.numpy.asarray(trees[rank][name]))
        same(name, own, np.stack([one[name] for one in trees]))


def groups(jax, rank):
    """Sums along each axis of a mesh of 2 by 2, and of a mesh in another order than the ranks'."""
    P = jax.sharding.PartitionSpec
    for devices in (jax.devices(), jax.devices()[::-1]):
        mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
        inputs = [make("float32", r, (1, 1, 1000)) for r in range(4)]
        where = {device.process_index: place for place, device in enumerate(devices)}
        sharding = jax.sharding.NamedSharding(mesh, P("x", "y"))
        x = jax.make_array_from_process_local_data(sharding, inputs[rank], (2, 2, 1000))
        row, column = divmod(where[rank], 2)
        for axis, members in (("x", [devices[column], devices[2 + column]]),
                              ("y", [devices[2 * row], devices[2 * row + 1]]), (("x", "y"), devices)):
            got = own_piece(jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, axis), mesh=mesh, in_specs=P("x", "y"),
                                                  out_specs=P("x", "y"), check_vma=False))(x))
            same(axis, got, tree([inputs[device.process_index] for device in members], add))


def scatter(times, chunk_kib):
    """The shapes of jax#40830: each rank gets a chunk of `chunk_kib` KiB of float64, many times over, from inputs that
    JAX computes anew.  Also in pairs, where there are 4 ranks."""
    jax, rank, n = begin()
    P = jax.sharding.PartitionSpec
    count = int(chunk_kib) * 128
    for size in {n, 2} if n % 2 == 0 else {n}:
        mesh = mesh_of(jax, n // size, size)

        def body(turn):
            place = jax.lax.axis_index(("x", "y")).astype(float)
            values = jax.numpy.arange(size * count, dtype=float) % 1021 * (place + 1) + turn[0]
            return jax.lax.psum_scatter(values, "y", tiled=True)

        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(("x", "y")), check_vma=False))
        first, own = rank // size * size, rank % size
        factor = sum(range(first + 1, first + size + 1))
        expected = np.arange(own * count, (own + 1) * count, dtype=float) % 1021 * factor
        for turn in range(int(times)):
            turns = jax.device_put(np.full(1, turn, float), jax.sharding.NamedSharding(mesh, P()))
            got = own_piece(run(turns))
            wrong = np.flatnonzero(got != expected + turn * size)
            assert not len(wrong), "turn %d: %d of %d wrong, from %d on" % (turn, len(wrong), count, wrong[0])


# --- training --------------------------------------------------------------------------------------------------------


def model(jax):
    jnp = jax.numpy

    def loss(weights, x, y):
        hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
        return jnp.mean((hidden @ weights["out"] - y) ** 2)

    random = np.random.default_rng(1)
    weights = {"in": random.standard_normal((16, 64)) / 4, "bias": np.zeros(64), "out":
               random.standard_normal((64, 4)) / 8}
    data = random.standard_normal((20, 64, 16))
    return loss, weights, data, np.tanh(data[..., :4] * 2)


def train(optimizer):
    """Data-parallel steps, against the same steps of one process.  Prints the parameters' bits."""
    jax, rank, n = begin()
    P = jax.sharding.PartitionSpec
    loss, weights, data, labels = model(jax)
    if optimizer == "optax":
        import optax
        adam = optax.adam(0.01)
        start, apply = adam.init, lambda g, s, w: (lambda u, s: (optax.apply_updates(w, u), s))(*adam.update(g, s, w))
    else:
        def start(weights):
            return ()

        def apply(gradient, state, weights):
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), state

    def step(weights, state, x, y, average):
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        value, gradient = average((value, gradient))
        weights, state = apply(gradient, state, weights)
        return weights, state, value

    mesh = mesh_of(jax, n)
    together = jax.jit(jax.shard_map(
        lambda w, s, x, y: step(w, s, x, y, lambda both: jax.lax.pmean(both, "x")), mesh=mesh,
        in_specs=(P(), P(), P("x"), P("x")), out_specs=(P(), P(), P()), check_vma=False))
    alone = jax.jit(lambda w, s, x, y: step(w, s, x, y, lambda both: both))
    share = data.shape[1] // n
    mine = slice(rank * share, (rank + 1) * share)
    whole = jax.sharding.NamedSharding(mesh, P())
    ours = jax.device_put((weights, start(weights)), whole)
    theirs = (weights, start(weights))
    losses = []
    for x, y in zip(data, labels):
        *ours, value = together(*ours, spread(jax, mesh, x[mine], n), spread(jax, mesh, y[mine], n))
        *theirs, expected = alone(*theirs, x, y)
        losses.append((float(own_piece(value)), float(expected)))
    for got, expected in losses:
        assert abs(got - expected) <= 1e-12 * abs(expected), losses
    assert losses[-1][0] < losses[0][0] / 2, losses
    for name, w in ours[0].items():
        np.testing.assert_allclose(own_piece(w), np.asarray(theirs[0][name]), rtol=1e-9, atol=1e-12)
    print("rank %d: bits %s" % (rank, b"".join(own_piece(w).tobytes() for w in jax.tree.leaves(ours[0])).hex()[-64:]),
          flush=True)


# --- threads and ends ------------------------------------------------------------------------------------------------


def dispatch():
    """Collectives of new groups from threads that have not initialised anything, while JAX dispatches asynchronously."""
    jax, rank, n = begin()
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    P = jax.sharding.PartitionSpec
    failures = []

    def work():
        try:
            mesh = mesh_of(jax, n)
            deep = jax.jit(jax.shard_map(
                lambda a: jax.lax.fori_loop(0, 20, lambda i, b: jax.lax.psum(b, "x") / n + jax.numpy.sin(b @ b.T) * 0, a),
                mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
            x = spread(jax, mesh, np.full((40, 40), rank + 1.0), n)
            results = [deep(x + i) for i in range(10)]  # all under way before the first is looked at
            for i, result in enumerate(results):
                assert np.allclose(own_piece(result), (n + 1) / 2 + i)
        except BaseException as error:  # noqa: B902 - told by the main thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures


def die(victim):
    """Rank `victim` is killed between two collectives; the others must be told, by name."""
    jax, rank, n = begin()
    mesh = mesh_of(jax, n)
    P = jax.sharding.PartitionSpec
    run = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    x = spread(jax, mesh, np.ones((1, 300000)), n)
    own_piece(run(x))
    for turn in range(100000):
        if rank == int(victim) and turn == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            own_piece(run(x))
        except jax.errors.JaxRuntimeError as error:
            print("rank %d: told %s" % (rank, str(error).replace("\n", " ")), flush=True)
            time.sleep(1)  # the others hear of the victim, and not first of a rank that has left for its sake
            os._exit(0)  # JAX's own service would now wait for the one that is gone
    raise AssertionError("nobody died")


def missing():
    """Rank 1 never makes the communicator that the others make."""
    jax, rank, n = begin()
    if rank == 1:
        jax.devices()
        time.sleep(12)
        os._exit(0)
    mesh = mesh_of(jax, n)
    P = jax.sharding.PartitionSpec
    try:
        own_piece(jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")))(
            spread(jax, mesh, np.ones((1, 10)), n)))
    except jax.errors.JaxRuntimeError as error:
        print("rank %d: told %s" % (rank, str(error).replace("\n", " ")), flush=True)
    os._exit(0)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {f.__name__: f for f in (collectives, moved, scatter, train, dispatch, die, missing)}[name](*arguments)
    print("rank %s: %s ended" % (os.environ["RANK"], name), flush=True)
