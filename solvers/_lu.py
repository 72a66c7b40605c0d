"""Dense LU decomposition."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact

from ..adjoint import Status
from ..adjoint._loops import vary_together
from ._method import AbstractLinearMethod, Outcome, all_finite, status_where


class LU(AbstractLinearMethod):
    """LU decomposition with partial pivoting: the choice for systems of up to a few thousand unknowns.

    Solves A x = b for any nonsingular square A. An operator given as a function is evaluated once per unknown to
    build its matrix, N² numbers of memory and 2N³/3 operations. Rows and columns are scaled first, so
    that badly scaled equations are not mistaken for singular ones; a pivot below N times the rounding unit of the
    scaled matrix is reported as `Status.singular`.

    Source: Golub and Van Loan, *Matrix Computations*, 4th ed., Algorithm 3.4.1 and Section 3.5.2.
    """

    def resolve(self, dtype: jnp.dtype) -> "LU":
        """LU has no tolerance."""
        del dtype
        return self

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Build the matrix, decompose it, solve."""
        del reference
        flat, unravel = ravel_pytree(b)
        if flat.size == 0:
            return Outcome(b, Status.converged, {})
        basis, _ = vary_together((jnp.eye(flat.size, dtype=flat.dtype), flat))
        columns = jax.vmap(lambda e: ravel_pytree(matvec(unravel(e)))[0])(basis)
        A = columns.T
        row = _scale(A, 1)
        col = _scale(A * row[:, None], 0)
        lu, pivots = jax.scipy.linalg.lu_factor(A * row[:, None] * col[None, :])
        x = col * jax.scipy.linalg.lu_solve((lu, pivots), row * flat)
        smallest = jnp.min(jnp.abs(jnp.diagonal(lu)))
        regular = smallest > flat.size * jnp.finfo(flat.dtype).eps
        status = status_where(
            [(~(all_finite(A.ravel()) & all_finite(flat)), Status.nonfinite), (~regular, Status.singular)],
            Status.converged,
        )
        return Outcome(unravel(x), status, {})


def _scale(A: Inexact[Array, "N N"], axis: int) -> Float[Array, " N"]:
    """Factors that bring the largest entry of each row (axis 1) or column (axis 0) to 1; a row of zeros keeps them."""
    largest = jnp.max(jnp.abs(A), axis=axis)
    return 1 / jnp.where(largest > 0, largest, 1)
