"""Sparse direct solves, on SciPy's SuperLU."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree

from ..adjoint import Status
from ..adjoint._sparse import Pattern
from ._factors import FACTORS, content
from ._host import on_host
from ._method import AbstractLinearMethod, Outcome, all_finite, status_where
from ._structured import Structured

_THRESHOLD = 0.1  # a diagonal entry of at least this part of the largest in its column is a pivot: it keeps the order
_CONTRACTION = 0.25  # a refinement that leaves more of the residual has gained nothing
_NEAR_STEPS = 10  # refinements with a similar matrix's factor cost about half a factorisation
_OWN_STEPS = 3
_EPS = float(np.finfo(np.float64).eps)
_ROUNDING = 32 * _EPS  # the backward error of a solution that rounding alone has spoilt


class SparseLU(Structured, AbstractLinearMethod):
    """Gaussian elimination for sparse matrices, on the host: for some hundred thousand unknowns in two dimensions.

    Choose it for operators whose matrix is sparse, whether or not you have the matrix: where the nonzeros are is found
    from the equations, and their values by a few products with the operator (7 for a five-point stencil, whatever the
    grid). In three dimensions factors outgrow memory from about 10⁵ unknowns on: use `CG` or `GMRES` with `ilu()`,
    `amg()` or `multigrid(...)`.

    The equations:  P R A C Q = L U  with scalings R and C; x is refined until the backward error
    max |b - A x|ᵢ / (‖Aᵢ‖₁ ‖x‖_∞ + |bᵢ|) is at rounding level.

    Factors are kept by the content of the matrix, within `limit_factors(bytes)`. An adjoint or tangent solve at a root
    refines with the kept factor of the most similar matrix until it is as exact as with its own, and factorises anew
    only if that does not contract. `factor_statistics()` counts.

    Parameters
    ----------
    pattern
        A matrix with nonzeros wherever the operator may have them (`BCOO`, SciPy sparse, or NumPy; square, in the order
        of the flattened unknown). By default it is found from the equations, once. An operator with entries
        elsewhere is told by the residual (`Status.incomplete`).

    Raises
    ------
    ValueError
        The structure cannot be found while tracing, or it is dense; or `pattern` is not square or does not fit.
    TypeError
        `pattern` is no matrix.

    Notes
    -----
    All arithmetic is in float64 (complex128), also for float32 unknowns. An operator on complex unknowns must be
    linear over complex numbers. Under `vmap` lanes are solved one after the other.

    References
    ----------
    Demmel, Eisenstat, Gilbert, Li and Liu, "A supernodal approach to sparse partial pivoting", SIAM J. Matrix Anal.
    Appl. 20, 1999, doi:10.1137/S0895479895291765. Colours: Curtis, Powell and Reid, "On the estimation of sparse
    Jacobian matrices", IMA J. Appl. Math. 13, 1974, doi:10.1093/imamat/13.1.117. Refinement: Arioli, Demmel and Duff,
    "Solving sparse linear systems with sparse backward error", SIAM J. Matrix Anal. Appl. 10, 1989,
    doi:10.1137/0610013.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def A(u):
    ...     w = jnp.pad(u, 1)
    ...     return 5 * u - w[2:, 1:-1] - w[:-2, 1:-1] - w[1:-1, 2:] - 0.5 * w[1:-1, :-2]
    >>> x = solvers.linear_solve(A, A(jnp.ones((20, 30))), solvers.SparseLU()).value
    >>> bool(jnp.allclose(x, 1, atol=1e-5))
    True
    """

    near: bool = eqx.field(default=False, static=True, repr=False, kw_only=True)

    def resolve(self, dtype: jnp.dtype) -> Self:
        """A direct method has no tolerance."""
        del dtype
        return self

    def transposed(self, like: Any) -> Self:
        """The method for Aᵀ, which solves with the factors of A."""
        return dataclasses.replace(super().transposed(like), near=True)

    def tightened(self, rtol: Any) -> Self:
        """The method for solves at a root, near which other matrices have been factorised."""
        del rtol
        return dataclasses.replace(self, near=True)

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Find the nonzeros, solve on the host, and check with the operator itself."""
        del reference
        flat, unravel = ravel_pytree(b)
        if flat.size == 0:
            return Outcome(b, Status.converged, {})
        pattern, values = self.nonzeros_of(matvec, b)

        def by_superlu(values: np.ndarray, b: np.ndarray) -> Any:
            return _solve(values, b, pattern, flipped=self.flipped, near=self.near)

        x, report = on_host(by_superlu, (flat, jnp.zeros(2, jnp.int32)), values, flat)
        regular, refinements = report[0] > 0, report[1]
        r = flat - ravel_pytree(matvec(unravel(x)))[0].astype(flat.dtype)
        rows = pattern.cols if self.flipped else pattern.rows
        sums = jnp.zeros(flat.size, flat.real.dtype).at[rows].add(jnp.abs(values))
        noise = 8 * min(flat.size, 1000) * jnp.finfo(flat.dtype).eps
        inside = jnp.all(jnp.abs(r) <= noise * (sums * jnp.max(jnp.abs(x)) + jnp.abs(flat)))
        status = status_where(
            [
                (~(all_finite(values) & all_finite(flat)), Status.nonfinite),
                (~(regular & all_finite(x)), Status.singular),
                (~inside, Status.incomplete),
            ],
            Status.converged,
        )
        return Outcome(unravel(x), status, {"iterations": refinements, "residual": jnp.linalg.norm(r)})


class SuperLU:
    """The factors of a matrix with scaled rows and columns; `RuntimeError` if it is singular."""

    def __init__(self, matrix: Any, *, symmetric: bool):
        scaled, self.row, self.col = _equilibrated(matrix)
        self.symmetric = symmetric
        self.lu = scipy.sparse.linalg.splu(
            scaled,
            permc_spec="MMD_AT_PLUS_A" if symmetric else "COLAMD",
            diag_pivot_thresh=_THRESHOLD if symmetric else 1.0,
            options={"SymmetricMode": symmetric},
        )
        self.nbytes = self.lu.nnz * (matrix.dtype.itemsize + 4) + 2 * self.row.nbytes
        # A generic right-hand side probes the size of the inverse.
        signs = np.where(np.arange(matrix.shape[0]) * 7 % 5 < 2, -1.0, 1.0).astype(matrix.dtype)
        inverse = np.max(np.abs(self.lu.solve(signs)))
        self.regular = bool(np.max(_row_sums(scaled)) * inverse * _EPS < 1)

    def solve(self, b: np.ndarray, *, flipped: bool) -> np.ndarray:
        """A⁻¹ b, or A⁻ᵀ b if `flipped`."""
        FACTORS.count("solves")
        if flipped:
            return self.row * self.lu.solve(self.col * b, trans="T")
        return self.col * self.lu.solve(self.row * b)


class _Answer(NamedTuple):
    x: np.ndarray
    error: float  # backward
    steps: int


def _solve(values: np.ndarray, b: np.ndarray, pattern: Pattern, *, flipped: bool, near: bool) -> Any:
    """`(x, (regular, refinements))` by the matrix's kept factor, that of a similar one if `near`, or a new one."""
    key = content(values)
    values, rhs = (a.astype(np.result_type(a, np.float64)) for a in (values, b))
    place = ("lu", values.dtype.str, pattern.digest), key
    if not (np.all(np.isfinite(values)) and np.all(np.isfinite(rhs))):
        return np.full_like(b, np.nan), (True, 0)
    A = pattern.matrix(values)
    operator = A.T.tocsr() if flipped else A

    def by(factor: SuperLU, limit: int) -> _Answer:
        return _refined(operator, rhs, lambda r: factor.solve(r, flipped=flipped), limit)

    factor = FACTORS.find(place)
    if factor is not None:
        FACTORS.count("hits")
    similar = FACTORS.nearest(place[0], values) if near and factor is None else None
    neighbour = None if similar is None else FACTORS.find(similar)
    if neighbour is not None and neighbour.regular:
        answer = by(neighbour, _NEAR_STEPS)
        if answer.error <= _ROUNDING:
            FACTORS.count("neighbours")
            return answer.x.astype(b.dtype), (True, answer.steps)
    factor = factor or _factorised(A, place, values, symmetric=pattern.symmetric)
    answer = None if factor is None else by(factor, _OWN_STEPS)
    if factor is not None and factor.symmetric and answer is not None and answer.error > _ROUNDING:
        # Pivots near the diagonal keep the factors sparse, and seldom let rounding errors grow.
        factor = _factorised(A, place, values, symmetric=False)
        answer = None if factor is None else by(factor, _OWN_STEPS)
    if factor is None or answer is None:
        return np.full_like(b, np.nan), (False, 0)
    return answer.x.astype(b.dtype), (factor.regular, answer.steps)


def _factorised(A: Any, place: Any, values: np.ndarray, *, symmetric: bool) -> SuperLU | None:
    """A new factor, kept; None for a singular matrix."""
    try:
        factor = SuperLU(A, symmetric=symmetric)
    except RuntimeError as error:
        if "singular" in str(error):
            return None
        raise
    FACTORS.keep(place, values, factor, factor.nbytes)
    return factor


def _refined(A: Any, b: np.ndarray, solve: Callable[[np.ndarray], np.ndarray], limit: int) -> _Answer:
    """Solve A x = b with an approximate inverse: corrections until rounding is all that is left, or nothing is gained.

    The backward error is max |b - A x|ᵢ / (‖Aᵢ‖₁ ‖x‖_∞ + |bᵢ|).
    """
    sums = _row_sums(A)
    best, x = _Answer(np.full_like(b, np.nan), np.inf, 0), solve(b)
    for step in range(limit + 1):
        r = b - A @ x
        size = sums * np.max(np.abs(x)) + np.abs(b)
        error = float(np.max(np.abs(r) / np.where(size > 0, size, 1)))
        if not error < best.error:
            break
        gained = error <= _CONTRACTION * best.error
        best = _Answer(x, error, step)
        if error <= _EPS or not gained or step == limit:
            break
        x = x + solve(r)
    return best


def _row_sums(A: Any) -> np.ndarray:
    return np.asarray(abs(A).sum(axis=1)).ravel()


def _equilibrated(A: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """R A C with powers of two R and C (exact in floating point) that bring rows and columns to a size near one."""
    row = _scale(abs(A).max(axis=1))
    scaled = scipy.sparse.diags_array(row) @ A
    col = _scale(abs(scaled).max(axis=0))
    return (scaled @ scipy.sparse.diags_array(col)).tocsc(), row, col


def _scale(largest: Any) -> np.ndarray:
    largest = np.asarray(largest.toarray()).ravel()
    return np.exp2(-np.round(np.log2(np.where(largest > 0, largest, 1))))
