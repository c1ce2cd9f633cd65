"""Data-parallel JAX without PyTorch: gradients go to Tally as they are, through DLPack.

    tally run -n 2 -- python examples/frameworks/jax_arrays.py

SPDX-License-Identifier: Apache-2.0
"""

import jax
import jax.numpy as jnp

import tally


def loss(weights, x, y):
    return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2)


def main():
    tally.init()
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {"in": jax.random.normal(keys[0], (8, 16)) / 3, "out": jax.random.normal(keys[1], (16, 2)) / 4}
    x = jax.random.normal(keys[2], (256, 8))
    y = x[:, :2] * 2 + x[:, 2:4]
    share = 256 // tally.size()
    mine = slice(tally.rank() * share, (tally.rank() + 1) * share)
    gradient = jax.jit(jax.grad(loss))
    before = loss(weights, x, y)
    for _ in range(20):
        # All are on their way before the first is waited for.
        handles = {name: tally.push_pull_async(array, name=name)
                   for name, array in gradient(weights, x[mine], y[mine]).items()}
        weights = {name: weights[name] - 0.1 * handle.wait() for name, handle in handles.items()}
    after = loss(weights, x, y)
    assert after < before
    digest = "%.9g" % float(sum(jnp.sum(w) for w in weights.values()))
    print("rank %d: loss %.4f, parameters %s" % (tally.rank(), after, digest), flush=True)


if __name__ == "__main__":
    main()
