"""Calls of the host from a compiled program."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def on_host(function: Callable[..., Any], like: Any, *args: Any, **options: Any) -> Any:
    """`function(*args, **options)` on NumPy arrays; its results have the shapes and dtypes of `like`.

    Under `vmap` it is called once for all lanes, lane by lane. It must be pure: the compiler may call it more than
    once, or not at all.
    """
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), like)
    ranks = [len(jnp.shape(x)) for x in args]

    def of_lanes(*arrays: Any) -> Any:
        arrays = tuple(map(np.asarray, arrays))
        lanes = next((a.shape[: a.ndim - r] for a, r in zip(arrays, ranks, strict=True)), ())
        count = math.prod(lanes)
        flat = [a.reshape(count, *a.shape[len(lanes) :]) for a in arrays]
        found = [function(*(a[i] for a in flat), **options) for i in range(count)]
        return jax.tree.map(
            lambda aval, *each: np.asarray(each, aval.dtype).reshape((*lanes, *aval.shape)), avals, *found
        )

    return jax.pure_callback(of_lanes, avals, *args, vmap_method="broadcast_all")
