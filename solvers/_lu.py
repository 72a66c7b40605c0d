"""Dense LU decomposition."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..adjoint import Status
from ._dense import as_real, backward_stable, generic_signs, real_matrix
from ._method import AbstractLinearMethod, Outcome, all_finite, status_where


class LU(AbstractLinearMethod):
    """LU decomposition with partial pivoting: the choice for systems of up to a few thousand unknowns.

    Solves A x = b for any nonsingular square A. An operator given as a function is evaluated once per unknown to
    build its matrix, N² numbers of memory and 2N³/3 operations. Rows and columns are scaled first, so
    that badly scaled equations are not mistaken for singular ones. One step of iterative refinement follows. A pivot
    at rounding level, or an inverse larger than the dtype has digits for, is `Status.singular`; a residual above the
    backward error of a stable solve is `Status.stalled`. Complex systems are solved as real ones of twice the size, so
    that operators which conjugate are right too.

    Source: Golub and Van Loan, *Matrix Computations*, 4th ed., Algorithm 3.4.1 and Section 3.5.2.
    """

    def resolve(self, dtype: jnp.dtype) -> "LU":
        """LU has no tolerance."""
        del dtype
        return self

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Build the matrix, decompose it, solve, refine once, and check."""
        del reference
        flat, unravel = as_real(b)
        if flat.size == 0:
            return Outcome(b, Status.converged, {})
        x, status = _solve_dense(real_matrix(matvec, flat, unravel), flat)
        return Outcome(unravel(x), status, {})


def _solve_dense(A: Float[Array, "N N"], b: Float[Array, " N"]) -> tuple[Float[Array, " N"], Status]:
    row = _scale(A, 1)
    col = _scale(A * row[:, None], 0)
    scaled = A * row[:, None] * col[None, :]
    factor = jax.scipy.linalg.lu_factor(scaled)
    rhs = row * b
    # A generic second right-hand side probes the size of the inverse.
    probe = generic_signs(b.size, b.dtype)
    y, inverse = jax.scipy.linalg.lu_solve(factor, jnp.stack([rhs, probe], axis=1)).T
    y = y + jax.scipy.linalg.lu_solve(factor, rhs - scaled @ y)
    eps = b.size * jnp.finfo(b.dtype).eps
    norm = jnp.max(jnp.sum(jnp.abs(scaled), axis=1))
    backward = backward_stable(rhs - scaled @ y, norm, y, rhs)
    regular = jnp.min(jnp.abs(jnp.diagonal(factor[0]))) > eps
    regular &= norm * jnp.max(jnp.abs(inverse)) * jnp.finfo(b.dtype).eps < 1
    x = col * y
    status = status_where(
        [
            (~(all_finite(A.ravel()) & all_finite(b)), Status.nonfinite),
            (~regular, Status.singular),
            (~all_finite(x), Status.nonfinite),
            (~backward, Status.stalled),
        ],
        Status.converged,
    )
    return x, status


def _scale(A: Float[Array, "N N"], axis: int) -> Float[Array, " N"]:
    """Factors that bring the largest entry of each row (axis 1) or column (axis 0) to 1; a row of zeros keeps them."""
    largest = jnp.max(jnp.abs(A), axis=axis)
    return 1 / jnp.where(largest > 0, largest, 1)
