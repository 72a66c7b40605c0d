"""What the dense direct methods share: building the matrix of an operator, and checking what came out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ..adjoint import Status
from ..adjoint._loops import vary_together
from ._method import Outcome
from ._user_matrix import KnownMatrix


def as_real(tree: Any) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """A pytree as one real vector and back: an operator on complex numbers need not be linear over them."""
    flat, unravel = ravel_pytree(tree)
    if not jnp.iscomplexobj(flat):
        return flat, unravel
    half = flat.size
    return jnp.concatenate([flat.real, flat.imag]), lambda v: unravel(v[:half] + 1j * v[half:])


def real_matrix(
    matvec: Callable[[Any], Any], flat: Float[Array, " N"], unravel: Callable[[jax.Array], Any]
) -> Float[Array, "N N"]:
    """The matrix of an operator on real vectors like `flat`, column by column, unless it is known."""
    if isinstance(matvec, KnownMatrix) and matvec.matrix.shape == (flat.size, flat.size):
        return matvec.dense().astype(flat.dtype)
    basis, _ = vary_together((jnp.eye(flat.size, dtype=flat.dtype), flat))
    return jax.vmap(lambda e: as_real(matvec(unravel(e)))[0].astype(flat.dtype))(basis).T


def solve_as_matrix(matvec: Callable[[Any], Any], b: Any, solve: Callable[[Any, Any], Any]) -> Outcome:
    """Solve A x = b by `solve(matrix, vector) -> (x, status)`."""
    flat, unravel = as_real(b)
    if flat.size == 0:
        return Outcome(b, Status.converged, {})
    x, status = solve(real_matrix(matvec, flat, unravel), flat)
    return Outcome(unravel(x), status, {})


def backward_stable(r: Any, norm: Any, x: Any, b: Any) -> jax.Array:
    """Whether the residual r = b - A x is that of a stable solve, for the maximum-row-sum norm of A."""
    eps = b.size * jnp.finfo(b.dtype).eps
    return largest(r) <= 8 * eps * (norm * largest(x) + largest(b))


def largest(v: Any) -> jax.Array:
    """The largest magnitude of any entry."""
    return jnp.max(jnp.abs(v), initial=0.0)


def resolves(norm: Any, inverse: Any) -> jax.Array:
    """Whether A is regular to the digits of the dtype: `inverse` is A⁻¹ applied to generic signs, `norm` that of A."""
    return norm * largest(inverse) * jnp.finfo(inverse.dtype).eps < 1


def equaliser(A: Any, axis: int) -> Any:
    """Factors that bring the largest entry along an axis to 1; a row or column of zeros keeps them."""
    size = jnp.max(jnp.abs(A), axis=axis)
    return 1 / jnp.where(size > 0, size, 1)


def generic_signs(size: int, dtype: Any) -> jax.Array:
    """A vector of ones and minus ones that no structure of an operator favours."""
    return jnp.where(jnp.arange(size) * 7 % 5 < 2, -1.0, 1.0).astype(dtype)
