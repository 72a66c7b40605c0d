"""Algebraic multigrid as a preconditioner, on pyamg."""

import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
import scipy.sparse

from ._factors import FactorMaker, on_kept_factor
from ._preconditioner import AbstractPreconditioner
from ._structured import Structured

_KINDS = ("smoothed_aggregation", "ruge_stuben")
_CYCLES = ("V", "W", "F")
_SYMMETRIC = 1e-10


class AMG(Structured, AbstractPreconditioner):
    """What `amg` returns: a hierarchy made for each operator."""

    kind: str = eqx.field(default=_KINDS[0], static=True, kw_only=True)
    cycle: str = eqx.field(default="V", static=True, kw_only=True)

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Make the hierarchy once for the solve."""
        pattern, values = self.nonzeros_of(matvec, like)
        kind = "amg", self.kind, self.cycle
        maker = FactorMaker(kind, pattern, lambda matrix: Hierarchies(matrix, self.kind, self.cycle))
        return on_kept_factor(maker, values, flipped=self.flipped)


class Hierarchies:
    """Grids of a matrix, and of its transpose where that is another one."""

    def __init__(self, matrix: Any, kind: str, cycle: str):
        self._kind, self._cycle, self._lock = kind, cycle, threading.Lock()
        self._transpose = None if _differ(matrix, matrix.T) <= _SYMMETRIC else matrix.T
        self._grids = {False: _hierarchy(matrix, kind)}
        size = sum(_size(level.A) + _size(getattr(level, "P", None)) for level in self._grids[False].levels)
        self.nbytes = size if self._transpose is None else 2 * size

    def solve(self, r: np.ndarray, *, flipped: bool) -> np.ndarray:
        """One cycle from zero."""
        flipped = flipped and self._transpose is not None
        with self._lock:
            if flipped not in self._grids:
                self._grids[flipped] = _hierarchy(self._transpose, self._kind)
            return self._grids[flipped].aspreconditioner(cycle=self._cycle).matvec(r)


def amg(*, kind: str = "smoothed_aggregation", cycle: str = "V", pattern: Any = None) -> AMG:
    """One cycle of algebraic multigrid, on the host: for elliptic operators on any mesh.

    Choose it for diffusion and pressure problems of many unknowns, where the iterations of `CG(preconditioner=amg())`
    hardly grow with their number; on a regular grid `multigrid(...)` is faster still. It needs the package pyamg:
    `pip install tapeless[amg]`.

    Parameters
    ----------
    kind
        "smoothed_aggregation" (the first choice), or "ruge_stuben" for scalar M-matrices.
    cycle
        "V", "W" or "F".
    pattern
        A matrix with the structure of the operator (`BCOO`, SciPy sparse, NumPy), where it cannot be found from its
        equations.

    Raises
    ------
    ImportError
        pyamg is not installed.
    ValueError
        A setting is not among the choices, or the structure cannot be found.

    Notes
    -----
    The cycle of a symmetric matrix is symmetric. The adjoint solve uses it too, and for an unsymmetric matrix a
    hierarchy of the transposed one. Hierarchies are kept by content, as the factors of `SparseLU` are. For systems such
    as elasticity, whose rigid motions pyamg would have to know, convergence is slower.

    Source: Vaněk, Mandel and Brezina, "Algebraic multigrid by smoothed aggregation for second and fourth order
    elliptic problems", Computing 56, 1996, doi:10.1007/BF02238511; Bell, Olson and Schroder, "PyAMG: algebraic
    multigrid solvers in Python", J. Open Source Softw. 7, 2022, doi:10.21105/joss.04142.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def A(u):
    ...     w = jnp.pad(u, 1)
    ...     return 4 * u - w[2:, 1:-1] - w[:-2, 1:-1] - w[1:-1, 2:] - w[1:-1, :-2]
    >>> solution = solvers.linear_solve(A, jnp.ones((40, 40)), solvers.CG(rtol=1e-4, preconditioner=solvers.amg()))
    >>> int(solution.stats["iterations"]) < 15
    True
    """
    _pyamg()
    for name, value, choices in (("kind", kind, _KINDS), ("cycle", cycle, _CYCLES)):
        if value not in choices:
            message = f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}."
            raise ValueError(message)
    return AMG(pattern, kind=kind, cycle=cycle)


def _pyamg() -> Any:
    """The optional package, loaded when it is needed first."""
    try:
        import pyamg
    except ImportError as error:
        message = "amg() needs the package pyamg, which is not installed: pip install tapeless[amg]"
        raise ImportError(message) from error
    return pyamg


def _hierarchy(matrix: Any, kind: str) -> Any:
    A = scipy.sparse.csr_matrix(matrix)
    # pyamg draws from NumPy's global generator: seeded, so that equal matrices have equal grids, and put back.
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    try:
        if kind == "ruge_stuben":
            return _pyamg().ruge_stuben_solver(A)
        return _pyamg().smoothed_aggregation_solver(A, symmetry=_symmetry(A))
    finally:
        np.random.set_state(state)  # noqa: NPY002


def _symmetry(A: Any) -> str:
    if _differ(A, A.conj().T) <= _SYMMETRIC:
        return "hermitian"
    return "symmetric" if _differ(A, A.T) <= _SYMMETRIC else "nonsymmetric"


def _differ(A: Any, B: Any) -> float:
    """The largest difference of two sparse matrices, relative to the largest entry."""
    return abs(A - B).max() / (abs(A).max() or 1.0)


def _size(matrix: Any) -> int:
    return 0 if matrix is None else matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes
