"""Incomplete factorisation as a preconditioner, on SciPy's SuperLU."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from ._factors import FactorMaker, on_kept_factor
from ._preconditioner import AbstractPreconditioner
from ._structured import Structured

_SHIFTS = (0.0, 1e-4, 1e-2, 1.0)


class ILU(Structured, AbstractPreconditioner):
    """What `ilu` returns: an incomplete factorisation, made for each operator."""

    drop_tol: float = eqx.field(default=1e-3, static=True, kw_only=True)
    fill_factor: float = eqx.field(default=10.0, static=True, kw_only=True)

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Factorise once for the solve."""
        pattern, values = self.nonzeros_of(matvec, like)
        kind = "ilu", self.drop_tol, self.fill_factor

        def make(matrix: Any) -> "Incomplete":
            return Incomplete(matrix, pattern.symmetric, self.drop_tol, self.fill_factor)

        return on_kept_factor(FactorMaker(kind, pattern, make), values, flipped=self.flipped)


class Incomplete:
    """Incomplete factors of a matrix, of a shifted one where its own do not exist."""

    def __init__(self, matrix: Any, symmetric: bool, drop_tol: float, fill_factor: float):
        size = float(np.max(np.abs(matrix.data), initial=0.0)) or 1.0
        for shift in _SHIFTS:
            shifted = matrix + scipy.sparse.diags_array(np.full(matrix.shape[0], shift * size, matrix.dtype))
            try:
                self._ilu = scipy.sparse.linalg.spilu(
                    shifted.tocsc(),
                    drop_tol=drop_tol,
                    fill_factor=fill_factor,
                    permc_spec="MMD_AT_PLUS_A" if symmetric else "COLAMD",
                )
                break
            except RuntimeError as error:
                if "singular" not in str(error) or shift == _SHIFTS[-1]:
                    raise
        self.nbytes = self._ilu.nnz * (matrix.dtype.itemsize + 4)

    def solve(self, r: np.ndarray, *, flipped: bool) -> np.ndarray:
        """M r, or Mᵀ r if `flipped`."""
        return self._ilu.solve(r, trans="T" if flipped else "N")


def ilu(*, drop_tol: float = 1e-3, fill_factor: float = 10.0, pattern: Any = None) -> ILU:
    """An incomplete LU factorisation with dropping by size, M = (L U)⁻¹ ≈ A⁻¹, on the host.

    Choose it for `GMRES` and `BiCGStab` on sparse operators of any kind (convection, reactions, three dimensions, no
    symmetry) whose full factors, those of `SparseLU`, outgrow memory. For elliptic problems `amg()` scales better.

    Parameters
    ----------
    drop_tol
        Entries of the factors smaller than this part of their column's size are dropped (dimensionless). Smaller means
        fewer iterations and larger factors.
    fill_factor
        Bound on the size of the factors in units of that of the matrix.
    pattern
        A matrix with the structure of the operator (`BCOO`, SciPy sparse, NumPy), where it cannot be found from its
        equations.

    Raises
    ------
    ValueError
        A setting is out of range, or the structure cannot be found.

    Notes
    -----
    The factors are not symmetric, not even those of a symmetric matrix: with `CG` convergence may stall for large
    `drop_tol`. They are kept by content, as those of `SparseLU` are; the adjoint solve uses their transposes. A matrix
    on which the factorisation breaks down is factorised with a small multiple of the identity added.

    Source: Li and Shao, "A supernodal approach to incomplete LU factorization with partial pivoting", ACM Trans. Math.
    Softw. 37, 2011, doi:10.1145/1916461.1916467; `scipy.sparse.linalg.spilu`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def A(u):
    ...     w = jnp.pad(u, 1)
    ...     return 4 * u - w[2:, 1:-1] - w[:-2, 1:-1] - 0.5 * w[1:-1, 2:] - 1.5 * w[1:-1, :-2]
    >>> method = solvers.GMRES(rtol=1e-5, preconditioner=solvers.ilu())
    >>> solution = solvers.linear_solve(A, jnp.ones((20, 30)), method)
    >>> int(solution.stats["iterations"]) < 10
    True
    """
    if not drop_tol >= 0:
        message = f"`drop_tol` must be at least 0, got {drop_tol!r}."
        raise ValueError(message)
    if not fill_factor >= 1:
        message = f"`fill_factor` must be at least 1, got {fill_factor!r}."
        raise ValueError(message)
    return ILU(pattern, drop_tol=float(drop_tol), fill_factor=float(fill_factor))
