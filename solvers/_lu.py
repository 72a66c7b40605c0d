"""Dense LU decomposition."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..adjoint import Status
from ..adjoint._loops import vary_together
from ._dense import backward_stable, equaliser, generic_signs, largest, resolves, solve_as_matrix
from ._method import AbstractLinearMethod, Outcome, all_finite, status_where

_EXACT = 8  # rounding errors, for a residual that needs no refinement


class LU(AbstractLinearMethod):
    """LU decomposition with partial pivoting: the choice for systems of up to a few thousand unknowns.

    Solves A x = b for any nonsingular square A. An operator given as a function is evaluated once per unknown to
    build its matrix, N² numbers of memory and 2N³/3 operations. Rows and columns are scaled first, so
    that badly scaled equations are not mistaken for singular ones. A step of iterative refinement follows
    where the residual is not at rounding level. A pivot
    at rounding level, or an inverse larger than the dtype has digits for, is `Status.singular`; a residual above the
    backward error of a stable solve is `Status.stalled`. Complex systems are solved as real ones of twice the size, so
    that operators which conjugate are right too.

    Parameters
    ----------
    thorough
        Whether to refine, and to check the residual and the size of the inverse. Newton's iterations do without, since
        each corrects the one before; the derivative's solves do not.

    Source: Golub and Van Loan, *Matrix Computations*, 4th ed., Algorithm 3.4.1 and Section 3.5.2.
    """

    thorough: bool = eqx.field(default=True, static=True)

    def for_iteration(self) -> "LU":
        """Without refinement and its checks."""
        return LU(thorough=False)

    def tightened(self, rtol: Any) -> "LU":
        """With refinement and its checks."""
        del rtol
        return LU()

    def resolve(self, dtype: jnp.dtype) -> "LU":
        """LU has no tolerance."""
        del dtype
        return self

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Build the matrix, decompose it, solve, refine once, and check."""
        del reference
        solve = _refined if self.thorough else _solved
        return solve_as_matrix(matvec, b, lambda A, b: _divided(A, b) if b.size == 1 else solve(A, b))


def _divided(A: Float[Array, "1 1"], b: Float[Array, " 1"]) -> tuple[Float[Array, " 1"], Status]:
    x = b / A[0]
    # Asking x, not A, keeps the compiler from evaluating A again for the status, which costs under vmap.
    broken = status_where([(all_finite(b), Status.singular)], Status.nonfinite)
    return x, Status.where(all_finite(x), Status.converged, broken)


def _solved(A: Float[Array, "N N"], b: Float[Array, " N"]) -> tuple[Float[Array, " N"], Status]:
    row = equaliser(A, 1)
    U, x = _eliminated(A * row[:, None], (row * b)[:, None])
    x = x[:, 0]
    # A pivot is measured by its column, so that the units of the unknowns do not matter.
    small = b.size * jnp.finfo(b.dtype).eps * jnp.max(jnp.abs(U), axis=0)
    singular = jnp.any(jnp.abs(jnp.diagonal(U)) <= small) | ~all_finite(x)
    finite = all_finite(row) & all_finite(b)
    return x, status_where([(~finite, Status.nonfinite), (singular, Status.singular)], Status.converged)


def _refined(A: Float[Array, "N N"], b: Float[Array, " N"]) -> tuple[Float[Array, " N"], Status]:
    row = equaliser(A, 1)
    col = equaliser(A * row[:, None], 0)
    scaled = A * row[:, None] * col[None, :]
    rhs = row * b
    # The matrix is decomposed by itself: for a batch of right-hand sides, once.
    factor = jax.scipy.linalg.lu_factor(scaled)
    # A generic second right-hand side probes the size of the inverse.
    probe = generic_signs(b.size, b.dtype)
    y, inverse = jax.scipy.linalg.lu_solve(factor, jnp.stack([rhs, probe], axis=1)).T
    norm = jnp.max(jnp.sum(jnp.abs(scaled), axis=1))
    r = rhs - scaled @ y
    exact = largest(r) <= _EXACT * jnp.finfo(b.dtype).eps * (norm * largest(y) + largest(rhs))
    unrefined, _ = vary_together((y, scaled))
    y = lax.cond(exact, lambda: unrefined, lambda: unrefined + jax.scipy.linalg.lu_solve(factor, r))
    backward = backward_stable(rhs - scaled @ y, norm, y, rhs)
    regular = jnp.min(jnp.abs(jnp.diagonal(factor[0]))) > b.size * jnp.finfo(b.dtype).eps
    regular &= resolves(norm, inverse)
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


def _eliminated(A: Float[Array, "N N"], b: Float[Array, "N k"]) -> tuple[Float[Array, "N N"], Float[Array, "N k"]]:
    """U and A⁻¹ b. The right-hand sides are eliminated with the matrix, as further columns.

    So neither L is needed nor the permutation, which JAX finds by a loop over all rows.
    """
    n = len(A)
    lu, _, _ = lax.linalg.lu(jnp.concatenate([A, b], axis=1))
    U = jnp.triu(lu[:, :n])
    return U, lax.linalg.triangular_solve(U, lu[:, n:], left_side=True)
