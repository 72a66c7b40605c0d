"""Dense Cholesky decomposition."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..adjoint import Status
from ._dense import backward_stable, generic_signs, largest, resolves, solve_as_matrix
from ._method import AbstractLinearMethod, Outcome, all_finite, status_where


class Cholesky(AbstractLinearMethod):
    """Cholesky decomposition: for symmetric (Hermitian) positive definite systems of up to a few thousand unknowns.

    Half the work of `LU`, and it tells a matrix that is not positive definite (`Status.indefinite`), not symmetric
    (`Status.unsymmetric`), or to the digits of the dtype singular (`Status.singular`). An operator given as a function
    is evaluated once per unknown to build its matrix. Symmetric diagonal scaling comes first; one step of iterative
    refinement follows. Complex systems are solved as real ones of twice the size.

    Source: Golub and Van Loan, *Matrix Computations*, 4th ed., Algorithm 4.2.1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = jnp.array([[4.0, 1.0], [1.0, 3.0]])
    >>> x = solvers.linear_solve(A, jnp.array([5.0, 4.0]), solvers.Cholesky()).value
    >>> [f"{float(each):.3f}" for each in x]
    ['1.000', '1.000']
    """

    def resolve(self, dtype: jnp.dtype) -> "Cholesky":
        """Cholesky has no tolerance."""
        del dtype
        return self

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Build the matrix, decompose it, solve, refine once, and check."""
        del reference
        return solve_as_matrix(matvec, b, _solve_dense)


def _solve_dense(A: Float[Array, "N N"], b: Float[Array, " N"]) -> tuple[Float[Array, " N"], Status]:
    diagonal = jnp.diagonal(A)
    scale = jnp.where(diagonal > 0, 1 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1)), 1)
    scaled = A * scale[:, None] * scale[None, :]
    rhs = scale * b
    factor = jax.scipy.linalg.cho_factor(scaled, lower=True)
    # A generic second right-hand side probes the size of the inverse.
    y, inverse = jax.scipy.linalg.cho_solve(factor, jnp.stack([rhs, generic_signs(b.size, b.dtype)], axis=1)).T
    y = y + jax.scipy.linalg.cho_solve(factor, rhs - scaled @ y)
    x = scale * y
    asymmetry = largest((scaled - scaled.T).ravel())
    definite = all_finite(jnp.diagonal(factor[0])) & jnp.all(diagonal > 0)
    norm = jnp.max(jnp.sum(jnp.abs(scaled), axis=1))
    status = status_where(
        [
            (~(all_finite(A.ravel()) & all_finite(b)), Status.nonfinite),
            (asymmetry > jnp.finfo(b.dtype).eps ** 0.5 * largest(scaled.ravel()), Status.unsymmetric),
            (~definite, Status.indefinite),
            (~(backward_stable(rhs - scaled @ y, norm, y, rhs) & resolves(norm, inverse)), Status.singular),
            (~all_finite(x), Status.nonfinite),
        ],
        Status.converged,
    )
    return x, status
