"""One JAX process of collectives.py: `rank.py tally|gloo WORK`, WORK a JSON object; rank 0 prints one JSON object.

Both ways run this script; they differ in the call that initialises JAX.  SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import statistics
import sys
import time


def begin(way):
    if way == "tally":
        import tally.jax
        tally.jax.initialize()
    else:
        import jax
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize("%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
                                   int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    import jax
    return jax


def mapped(jax, mesh, body):
    P = jax.sharding.PartitionSpec
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def bodies(jax, n):
    """{name: (function of this rank's float32 vector, its result on rank r of inputs i % 251 + rank)}"""
    import numpy as np
    lax = jax.lax

    def base(count):
        return np.arange(count, dtype=np.float32) % 251

    total = n * (n - 1) / 2
    return {
        "all_reduce": (lambda a: lax.psum(a, "x"), lambda count, r: n * base(count) + total),
        "reduce_scatter": (lambda a: lax.psum_scatter(a, "x", tiled=True),
                           lambda count, r: (n * base(count) + total).reshape(n, -1)[r]),
        # `count` numbers in all: each rank gives count / n.
        "all_gather": (lambda a: lax.all_gather(a[:a.shape[0] // n], "x", tiled=True),
                       lambda count, r: np.concatenate([base(count)[:count // n] + i for i in range(n)])),
    }


def timed(jax, call, seconds, least):
    """Seconds of each call, which ends when its result is there.  All ranks make as many."""
    times = []
    begin_s = time.perf_counter()
    while True:
        before = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - before)
        if len(times) >= least and len(times) % least == 0:
            # Rank 0's clock decides for all: by the number of calls, which it tells through JAX's own service.
            if not together(jax, time.perf_counter() - begin_s < seconds):
                return times


rounds = iter(range(1 << 30))


def together(jax, goes_on):
    from jax._src.distributed import global_state
    key = "bench/%d" % next(rounds)
    if jax.process_index() == 0:
        global_state.client.key_value_set(key, str(int(goes_on)))
    return global_state.client.blocking_key_value_get(key, 600_000) == "1"


def collectives(jax, mesh, work):
    import numpy as np
    n, rank, rows = jax.process_count(), jax.process_index(), []
    for name, (body, result) in bodies(jax, n).items():
        if name not in work["operations"]:
            continue
        for size in work["sizes"]:
            count = size // 4 // n * n
            own = np.arange(count, dtype=np.float32) % 251 + rank
            x = jax.make_array_from_process_local_data(
                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")), own)
            run = mapped(jax, mesh, body)
            got = np.asarray(run(x).addressable_shards[0].data)
            wrong = int((got != result(count, rank)).sum())
            times = timed(jax, lambda: run(x), work["seconds"], work["least"])[work["least"] // 2:]
            rows.append({"operation": name, "bytes": 4 * count, "time_us": 1e6 * statistics.median(times),
                         "least_us": 1e6 * min(times), "calls": len(times), "wrong": wrong})
    return rows


def training(jax, mesh, work):
    """A step of data-parallel training: a network of three layers, 4 `width`^2 parameters in all, float32."""
    import numpy as np
    jnp, P = jax.numpy, jax.sharding.PartitionSpec
    rank, width = jax.process_index(), work["width"]
    random = np.random.default_rng(0)
    weights = [random.standard_normal((width, 2 * width), np.float32) / width,
               random.standard_normal((2 * width, width), np.float32) / width]

    def loss(weights, x):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)

    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        value, gradient = jax.lax.pmean((value, gradient), "x")
        return [w - 0.1 * g for w, g in zip(weights, gradient)], value

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P()), check_vma=False))
    state = jax.device_put(weights, jax.sharding.NamedSharding(mesh, P()))
    own = np.random.default_rng(rank).standard_normal((work["batch"], width), np.float32)
    x = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, P("x")), own)
    losses = []

    def once():
        nonlocal state
        state, value = run(state, x)
        losses.append(value)
        return value

    times = timed(jax, once, work["seconds"], work["least"])[work["least"] // 2:]
    bytes_ = 4 * sum(w.size for w in weights)
    return [{"operation": "train_step", "bytes": bytes_, "time_us": 1e6 * statistics.median(times),
             "least_us": 1e6 * min(times), "calls": len(times), "wrong": int(not losses[-1] < losses[0]),
             "losses": [float(one) for one in losses[:4]]}]


def main():
    way, work = sys.argv[1], json.loads(sys.argv[2])
    jax = begin(way)
    import numpy as np
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = collectives(jax, mesh, work)
    if "train_step" in work["operations"]:
        rows += training(jax, mesh, work)
    if jax.process_index() == 0:
        print("ROWS " + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
