"""Loops whose state may become varying over the devices of a `shard_map` while they run.

Inside `shard_map` JAX types every value by the mesh axes over which it varies, and a loop's state must have one type
from its first to its last pass. A counter or a zero accumulator starts out the same on all devices; whether it stays
so is known after one pass. These loops find the types first and mark the initial state accordingly. Elsewhere they are
JAX's own.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def in_shard_map() -> bool:
    """Whether a function is being traced for the devices of a `shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(tree: Any) -> frozenset[str]:
    """Mesh axes over which any leaf varies."""
    return frozenset().union(*(_axes_of(jax.typeof(x)) for x in jax.tree.leaves(tree)))


def _axes_of(aval: Any) -> frozenset[str]:
    if hasattr(aval, "vma"):  # JAX before 0.10
        return aval.vma
    return getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())


def vary(x: Any, axes: frozenset[str]) -> Any:
    """Mark a value as varying over `axes` too; its cotangents are then summed over them."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_together(tree: Any) -> Any:
    """Mark every leaf as varying over the axes over which any of them does."""
    axes = varying_axes(tree)
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
    """`jax.lax.while_loop`, for an initial state less varying than what the body returns."""
    return lax.while_loop(cond, body, _settled(body, init))


def fori_loop(start: Any, stop: Any, body: Callable[[Any, Any], Any], init: Any, unroll: int | None = None) -> Any:
    """`jax.lax.fori_loop`, for an initial state less varying than what the body returns."""
    return lax.fori_loop(start, stop, body, _settled(lambda state: body(start, state), init), unroll=unroll)


def _settled(body: Callable[[Any], Any], init: Any) -> Any:
    if not in_shard_map():
        return init
    leaves, tree = jax.tree.flatten(init)
    while True:
        jaxpr = jax.make_jaxpr(lambda *flat: jax.tree.leaves(body(jax.tree.unflatten(tree, flat))))(*leaves)
        settled = [vary(x, _axes_of(aval)) for x, aval in zip(leaves, jaxpr.out_avals, strict=True)]
        if all(a is b for a, b in zip(settled, leaves, strict=True)):
            return jax.tree.unflatten(tree, leaves)
        leaves = settled
