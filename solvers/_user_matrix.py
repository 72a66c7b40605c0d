"""Operators whose matrix is known."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO


class KnownMatrix(eqx.Module):
    """The operator v -> A v of a matrix, dense or `BCOO`: methods that want the matrix need not find it by products."""

    matrix: Any

    def __call__(self, v: Any) -> Any:
        """A v."""
        return self.matrix @ v

    def dense(self) -> jax.Array:
        """A as an array."""
        return self.matrix.todense() if isinstance(self.matrix, BCOO) else self.matrix


def products(jacobian: Callable[..., Any], u: Any, params: Any) -> KnownMatrix:
    """The operator of a user's Jacobian at u."""
    matrix = jacobian(u, params)
    if not isinstance(matrix, BCOO):
        matrix = jnp.asarray(matrix, u.dtype)
    if matrix.shape != (u.size, u.size):
        message = (
            f"`jacobian(u, params)` must return the matrix of derivatives of the flattened residual by the flattened "
            f"unknowns. Expected shape {(u.size, u.size)}, got {matrix.shape}."
        )
        raise ValueError(message)
    return KnownMatrix(matrix)
