"""process_allgather() and broadcast_one_to_all() of JAX's multihost_utils, for types that jaxlib's MPI route refuses.

jaxlib sends float16 and the smaller floating-point types to no MPI.  These two functions only move such data, so they
can go as unsigned integers: replace() puts wrappers around them that do so.  Every bit arrives as it was.

SPDX-License-Identifier: Apache-2.0
"""

import functools

import numpy as np


def _carrier(dtype):
    """The type as which data of `dtype` move; None: as they are."""
    if dtype == np.float16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint8) if dtype.name.startswith(("float8_", "float6_", "float4_")) else None


def _as_integers(function):
    import jax

    def pack(leaf):
        """(the leaf as it moves, its own type or None)"""
        spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        whole = leaf if spread else np.asarray(leaf)
        carrier = _carrier(whole.dtype)
        if carrier is None:
            return leaf, None
        if spread:
            # XLA packs two of float4 in a byte; numpy has each in one of its own.
            bits = jax.numpy.uint4 if whole.dtype.name.startswith("float4_") else carrier
            return jax.jit(lambda array: jax.lax.bitcast_convert_type(array, bits).astype(carrier))(leaf), whole.dtype
        return whole.view(carrier), whole.dtype

    @functools.wraps(function)
    def moved(in_tree, *arguments, **more):
        leaves, tree = jax.tree.flatten(in_tree)
        packed = [pack(leaf) for leaf in leaves]
        out = function(jax.tree.unflatten(tree, [leaf for leaf, _ in packed]), *arguments, **more)
        return jax.tree.unflatten(tree, [leaf if dtype is None else np.asarray(leaf).view(dtype) for leaf, (_, dtype)
                                         in zip(jax.tree.leaves(out), packed)])

    moved.__tally__ = True
    return moved


def replace():
    """Put the wrappers into multihost_utils, once."""
    from jax.experimental import multihost_utils

    for name in ("process_allgather", "broadcast_one_to_all"):
        function = getattr(multihost_utils, name)
        if not hasattr(function, "__tally__"):
            setattr(multihost_utils, name, _as_integers(function))
