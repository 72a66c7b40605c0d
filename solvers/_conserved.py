"""Conserved totals: equations of a singular Jacobian, completed by the laws that its solutions keep.

If g_u F = 0 whatever u is, the roots of  R(u) = F(u) + α g_uᵀ g(u)  are those of F with g = 0: from
g_u R = α g_u g_uᵀ g = 0 follows g = 0, and so F = 0. R is regular where F is but for its laws.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from ._dense import generic_signs

Function = Callable[[Any, Any], Any]


def with_conserved(residual: Function, laws: Function, guess: Any, numbers: Any) -> Function:
    """R(u, p), with α of the size that makes both parts alike."""

    def corrections(u: Any, numbers: Any) -> Any:
        flat, unravel = ravel_pytree(u)
        g, transpose = jax.vjp(lambda v: _flat(laws(unravel(v), numbers)), flat)
        return transpose(g)[0]

    flat, unravel = ravel_pytree(guess)
    p = unravel(generic_signs(flat.size, flat.dtype))

    def moved(f: Function) -> jax.Array:
        return jnp.linalg.norm(_flat(jax.jvp(lambda u: f(u, numbers), (guess,), (p,))[1]))

    ratio = moved(residual) / moved(corrections)
    alpha = lax.stop_gradient(jnp.where(jnp.isfinite(ratio) & (ratio > 0), ratio, 1))

    def completed(u: Any, numbers: Any) -> Any:
        F = residual(u, numbers)
        added = ravel_pytree(u)[1](alpha * corrections(u, numbers))
        return jax.tree.map(jnp.add, F, added)

    return completed


def is_kept(laws: Function, u: Any, numbers: Any, method: Any) -> jax.Array:
    """Whether the laws are fulfilled at the root, to what the tolerances leave open."""
    flat, unravel = ravel_pytree(lax.stop_gradient(u))
    numbers = lax.stop_gradient(numbers)
    g = _flat(laws(unravel(flat), numbers))
    g_u = jax.jacrev(lambda v: _flat(laws(unravel(v), numbers)))(flat)
    open_to = jnp.abs(g_u) @ method.weight(flat)
    rounding = 64 * jnp.finfo(flat.dtype).eps * (jnp.abs(g_u) @ jnp.abs(flat))
    return jnp.all(jnp.abs(g) <= 10 * open_to + rounding)


def _flat(tree: Any) -> jax.Array:
    return ravel_pytree(tree)[0]
