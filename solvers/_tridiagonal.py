"""Tridiagonal direct solves."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from ._banded import solve_bands
from ._method import AbstractLinearMethod, Outcome


class Tridiagonal(AbstractLinearMethod):
    """Gaussian elimination for three diagonals: one-dimensional diffusion, splines, lines of an ADI step.

    The diagonals are found by three products with the operator, whatever the number of unknowns. It runs in the
    compiled program (`Banded(1, 1)` runs on the host). An operator with other entries is told by the residual
    (`Status.unbanded`).

    Notes
    -----
    Source: Golub and Van Loan, *Matrix Computations*, 4th ed., Section 4.3.6; LAPACK's `gtsv` on the CPU.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = lambda u: 3 * u - jnp.roll(u, 1).at[0].set(0) - jnp.roll(u, -1).at[-1].set(0)
    >>> x = solvers.linear_solve(A, A(jnp.ones(50)), solvers.Tridiagonal()).value
    >>> bool(jnp.allclose(x, 1, atol=1e-3))
    True
    """

    def resolve(self, dtype: jnp.dtype) -> "Tridiagonal":
        """A direct method has no tolerance."""
        del dtype
        return self

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Find the diagonals, solve, and check."""
        del reference

        def eliminate(bands: Any, rhs: Any) -> Any:
            if len(rhs) == 1:
                return rhs / bands[1]
            return lax.linalg.tridiagonal_solve(bands[0], bands[1], bands[2], rhs)

        return solve_bands(matvec, b, (1, 1), eliminate)
