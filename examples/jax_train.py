"""Data-parallel training with JAX's own collectives, which go through Tally.

    tally run -n 4 -- python examples/jax_train.py

But for the first two lines of main() it is a script for jax.distributed.  SPDX-License-Identifier: Apache-2.0
"""


def main():
    import tally.jax
    tally.jax.initialize()  # before the first import of jax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.process_count(),), ("data",))
    everywhere, in_shares = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def loss(weights, x, y):
        return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2)

    @jax.jit
    def step(weights, x, y):
        # The batch is sharded and the weights are not, so XLA adds the gradients' all-reduce.
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient), value

    random = np.random.default_rng(0)
    weights = {"in": random.standard_normal((8, 32), np.float32) / 3, "out": random.standard_normal((32, 2), np.float32) / 6}
    weights = jax.device_put(weights, everywhere)
    batch = 256 // jax.process_count()
    own = np.random.default_rng(jax.process_index()).standard_normal((batch, 8), np.float32)
    x = jax.make_array_from_process_local_data(in_shares, own)
    y = jax.make_array_from_process_local_data(in_shares, own[:, :2] * 2 + own[:, 2:4])
    first = last = None
    for _ in range(100):
        weights, value = step(weights, x, y)
        last = float(value)
        first = last if first is None else first
    digest = "%.9g" % sum(float(jnp.sum(w)) for w in weights.values())
    print("rank %d: loss %.4f, at first %.4f, parameters %s" % (jax.process_index(), last, first, digest), flush=True)
    assert last < first / 4


if __name__ == "__main__":
    main()
