"""Banded direct solves."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Inexact

from ..adjoint import Status
from ._dense import backward_stable, equaliser, generic_signs, resolves
from ._host import on_host
from ._method import AbstractLinearMethod, Outcome, all_finite, on_flat, status_where


class Banded(AbstractLinearMethod):
    """Gaussian elimination with partial pivoting inside a band: for one-dimensional problems of any size.

    The bands are found by `lower` + `upper` + 1 products with the operator, whatever the number of unknowns; LAPACK
    solves on the host, after scaling of rows and columns. An operator with entries outside the band is told by the
    residual (`Status.unbanded`), one that the dtype cannot tell from a singular one by the size of its inverse.

    Parameters
    ----------
    lower, upper
        Number of diagonals below and above the main one, in the order of the flattened unknown.

    Notes
    -----
    Source: Golub and Van Loan, *Matrix Computations*, 4th ed., Section 4.3.5; `scipy.linalg.solve_banded`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = lambda u: 6 * u - 4 * jnp.roll(u, 1).at[0].set(0) - jnp.roll(u, -2).at[-2:].set(0)
    >>> x = solvers.linear_solve(A, A(jnp.ones(50)), solvers.Banded(lower=1, upper=2)).value
    >>> bool(jnp.allclose(x, 1, atol=1e-3))
    True
    """

    lower: int = eqx.field(static=True)
    upper: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuse what is no number of diagonals."""
        for name, value in (("lower", self.lower), ("upper", self.upper)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                message = f"`{name}` must be a number of diagonals (an integer of at least 0), got {value!r}."
                raise ValueError(message)

    def resolve(self, dtype: jnp.dtype) -> "Banded":
        """A direct method has no tolerance."""
        del dtype
        return self

    def transposed(self, like: Any) -> "Banded":
        """The diagonals change sides."""
        del like
        return Banded(lower=self.upper, upper=self.lower)

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Find the bands, solve on the host, and check."""
        del reference

        def by_lapack(bands: Any, rhs: Any) -> Any:
            return on_host(_solve_banded, rhs, bands, rhs, lower=self.lower, upper=self.upper)

        return solve_bands(matvec, b, (self.lower, self.upper), by_lapack)


def solve_bands(matvec: Callable[[Any], Any], b: Any, reach: tuple[int, int], solve: Callable[..., Any]) -> Outcome:
    """Find the bands of an operator, solve by `solve(bands, columns)`, refine once, and check the true residual."""
    flat, unravel = ravel_pytree(b)
    if flat.size == 0:
        return Outcome(b, Status.converged, {})
    A = on_flat(matvec, unravel, flat.dtype)
    # Rows and columns are scaled, so that badly scaled equations are not mistaken for singular ones.
    bands = bands_of(A, flat, *reach)
    row = equaliser(bands, 0)
    col = equaliser(_by_column(row * bands, *reach), 0)
    scaled, rhs = row * bands * _neighbours(col, *reach), row * flat
    # A generic second right-hand side probes the size of the inverse.
    y, inverse = solve(scaled, jnp.stack([rhs, generic_signs(flat.size, flat.dtype)], axis=1)).T
    # Refined on the bands, not on A: entries outside them would otherwise look like a singular matrix.
    y = y + solve(scaled, (rhs - _product(scaled, y, *reach))[:, None])[:, 0]
    x, norm = col * y, jnp.max(jnp.sum(jnp.abs(scaled), axis=0))
    regular = backward_stable(rhs - _product(scaled, y, *reach), norm, y, rhs) & resolves(norm, inverse)
    status = status_where(
        [
            (~(all_finite(bands.ravel()) & all_finite(flat)), Status.nonfinite),
            (~(all_finite(y) & regular), Status.singular),
            (~all_finite(x), Status.nonfinite),
            (~backward_stable(rhs - row * A(x), norm, y, rhs), Status.unbanded),
        ],
        Status.converged,
    )
    return Outcome(unravel(x), status, {})


def bands_of(A: Callable[[Any], Any], like: Any, lower: int, upper: int) -> Inexact[Array, "bands N"]:
    """Rows of entries A[i, i + k], k = -lower, ..., upper, zero outside the matrix.

    Columns that are a band's width apart share no row, so one product finds all of them.
    """
    width, i = lower + upper + 1, jnp.arange(like.size)
    probes = jnp.stack([(i % width == c).astype(like.dtype) for c in range(width)])
    products = lax.map(A, probes)
    offsets = jnp.arange(-lower, upper + 1)[:, None]
    column = i[None, :] + offsets
    entries = jnp.take_along_axis(products, column % width, axis=0)
    return jnp.where((column >= 0) & (column < like.size), entries, 0)


def _neighbours(x: Any, lower: int, upper: int) -> Any:
    """Rows of x[i + k], k = -lower, ..., upper, zero outside."""
    padded = jnp.pad(x, (lower, upper))
    return jnp.stack([padded[k : k + x.size] for k in range(lower + upper + 1)])


def _by_column(bands: Any, lower: int, upper: int) -> Any:
    """The same entries, with A[j - k, j] in column j."""
    shifted = [jnp.pad(band, (upper, lower))[lower + upper - k :] for k, band in enumerate(bands)]
    return jnp.stack([each[: bands.shape[1]] for each in shifted])


def _product(bands: Any, x: Any, lower: int, upper: int) -> Any:
    return jnp.sum(bands * _neighbours(x, lower, upper), axis=0)


def _solve_banded(bands: np.ndarray, b: np.ndarray, *, lower: int, upper: int) -> np.ndarray:
    """LAPACK's solutions for the columns of b; NaN for a singular matrix."""
    n = len(b)
    columns = np.zeros((lower + upper + 1, n), bands.dtype)
    for row, offset in enumerate(range(upper, -lower - 1, -1)):  # LAPACK keeps A[i, j] at [upper + i - j, j]
        band = bands[offset + lower]
        if abs(offset) < n:
            first, last = max(0, -offset), n - max(0, offset)
            columns[row, first + offset : last + offset] = band[first:last]
    try:
        return scipy.linalg.solve_banded((lower, upper), columns, b, check_finite=False).astype(b.dtype)
    except (np.linalg.LinAlgError, ValueError):
        return np.full_like(b, np.nan)
