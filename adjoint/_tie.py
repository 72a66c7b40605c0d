"""Outputs that carry the batch axis of every input.

Under `vmap`, JAX lets an output that happens not to depend on a batched input go without the axis. A function with its
own JVP rule must not do so: its tangents depend on more inputs than its values, the axes of the two are merged, and a
staged call would then have other shapes than its rule. `tie` is the identity, batched wherever any input is.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import batching, mlir

tie_p = jex.Primitive("tie")
tie_p.multiple_results = True


def tie(values: Any, *inputs: Any) -> Any:
    """`values`, batched if any leaf of `inputs` is."""
    leaves, tree = jax.tree.flatten(values)
    return jax.tree.unflatten(tree, tie_p.bind(*leaves, *jax.tree.leaves(inputs), count=len(leaves)))


def _identity(*args: Any, count: int) -> list[Any]:
    return list(args[:count])


def _batch(args: Sequence[Any], dims: Sequence[Any], *, count: int) -> tuple[list[Any], list[int]]:
    (size, *_) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    values = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args[:count], dims[:count], strict=True)
    ]
    return values, [0] * count


tie_p.def_impl(_identity)
tie_p.def_abstract_eval(_identity)
mlir.register_lowering(tie_p, mlir.lower_fun(_identity, multiple_results=True))
batching.primitive_batchers[tie_p] = _batch
