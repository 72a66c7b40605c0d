"""`linear_solve`: A x = b as a node."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Inexact

from ..adjoint import Status, failed, implicit_root
from ..adjoint._trace import as_unknowns, own, state_dtype
from ..adjoint._watch import watch
from ._entry import run
from ._lu import LU
from ._method import AbstractLinearMethod, linear_solver
from ._null_space import as_null_space, consistent_part, regularised, with_scale
from ._solution import Solution

Operator = Callable[[Any], Any] | Inexact[Array, "N N"] | BCOO


def linear_solve(
    operator: Operator,
    b: Any,
    method: AbstractLinearMethod = LU(),  # noqa: B008 (immutable)
    *,
    x0: Any = None,
    adjoint: AbstractLinearMethod | None = None,
    null_space: Any = None,
    left_null_space: Any = None,
    throw: bool = True,
) -> Solution:
    """Solve A x = b as one node, differentiable in b and in everything that A depends on.

    Choose `CG()` for large symmetric positive definite operators, `MINRES()` for symmetric indefinite, `GMRES()` or
    `BiCGStab()` for large unsymmetric ones, `SparseLU()` for sparse ones that fit memory, `Tridiagonal()` and
    `Banded()` in one dimension, `Cholesky()` and `LU()` for small ones.

    The equations:  A x = b,  A dx = db - dA x  (tangent),  Aᵀ w = x̄, b̄ = w, Ā = -w xᵀ  (cotangent). The
    adjoint solve is matrix-free if the forward one is, as tight, and uses the transposed preconditioner.

    Parameters
    ----------
    operator
        A as a function `v -> A v` on pytrees like `b`, or as a square matrix (N, N), dense or `BCOO`. Arrays that the
        function closes over get their gradients.
    b
        Right-hand side: a pytree of floating-point or complex arrays; a vector (N,) for a matrix.
    method
        The method with its tolerances and preconditioner.
    x0
        Start of the iteration (zero by default). Its derivative is zero.
    adjoint
        The method of the adjoint solve, for Aᵀ; by default `method`, with its preconditioner transposed.
    null_space
        Vectors that A maps to zero: like `b`, with a leading axis if there are several. The solution is orthogonal to
        them. They are taken for those of Aᵀ as well, unless `left_null_space` says otherwise.
    left_null_space
        Vectors that Aᵀ maps to zero: a right-hand side with a part along them has no solution (`Status.inconsistent`).
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Solution
        `.value` (like b), `.status`, `.stats` (for iterative methods: `iterations`, `residual`).

    Raises
    ------
    adjoint.SolveError
        The solve failed and `throw` is true, or its derivative was asked for though it failed; or the adjoint solve
        failed and `throw` is true. Inside jit and under vmap, derivatives are then NaN.
    ValueError
        Shapes do not match, or a tolerance is out of reach of the dtype.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = jnp.array([[4.0, 1.0], [1.0, 3.0]])
    >>> x = solvers.linear_solve(lambda v: A @ v, jnp.array([1.0, 2.0]), solvers.CG()).value
    >>> [f"{float(each):.4f}" for each in x]
    ['0.0909', '0.6364']

    References
    ----------
    Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation", 2008,
    doi:10.1007/978-3-540-68942-3_4, Section 2.3.1.
    """
    b = as_unknowns(b)
    check_method("method", method)
    if adjoint is not None:
        check_method("adjoint", adjoint)
    warm = x0 is not None
    x0 = _start(x0, b) if warm else jax.tree.map(jnp.zeros_like, b)
    if not callable(operator):
        operator = matrix = _matrix(operator, b)
        if jnp.iscomplexobj(matrix.data if isinstance(matrix, BCOO) else matrix):
            b, x0 = jax.tree.map(lambda x: x.astype(jnp.result_type(x, jnp.complex64)), (b, x0))
        method = method.for_matrix(matrix)
        adjoint = None if adjoint is None else adjoint.for_matrix(matrix.T)
    null = as_null_space(null_space, left_null_space, b)
    dtype = state_dtype(b)
    method = method.resolve(dtype)
    adjoint = None if adjoint is None else adjoint.resolve(dtype)
    return run(_linear_solve, operator, (b, x0, null), (method, adjoint), example=(b,), throw=throw, warm=warm)


def check_method(name: str, method: Any) -> None:
    """Refuse what is no linear method."""
    if not isinstance(method, AbstractLinearMethod):
        message = f"`{name}` must be an instance such as solvers.CG() or solvers.LU(), got {method!r}."
        raise TypeError(message)


def _linear_solve(operator: Operator, inputs: Any, arrays: Any, *, methods: Any, warm: bool) -> Any:
    b, x0, null = inputs
    apply: Any = operator if callable(operator) else None
    matrix: Any = None if apply else operator

    method, adjoint = eqx.combine(arrays, methods)
    method = (method if apply is None else method.for_function(apply, b)).hoisted(b)
    adjoint = None if adjoint is None else adjoint.hoisted(b)
    data, rest = eqx.partition((method, adjoint), eqx.is_array)
    whole = b
    if null is not None:
        null, b = with_scale(null, apply or matrix.__matmul__, b), consistent_part(null, b)

    def iterate(f: Any, x0: Any, data: Any) -> tuple[Any, Any]:
        method, _ = eqx.combine(data, rest)
        minus_r, matvec = jax.linearize(f, x0)
        r = jax.tree.map(jnp.negative, minus_r)
        # The tolerance is relative to b, which is the residual at zero.
        reference = f(jax.tree.map(jnp.zeros_like, x0)) if warm else r
        outcome = method.solve(matvec, r, reference)
        watch("forward", method, outcome.status, outcome.stats)
        x = jax.tree.map(jnp.add, x0, outcome.value)
        status = outcome.status
        if apply is not None:
            nonlinear = ~_is_linear(f, minus_r, matvec, x0, outcome.value)
            status = Status.where(~failed(status) & nonlinear, Status.nonlinear, status)
        return x, (~failed(status), (status, outcome.stats))

    def residual(x: Any, params: Any) -> Any:
        A, b, null = params
        Ax = A @ x if apply is None else apply(x)
        if jax.tree.map(jnp.shape, Ax) != jax.tree.map(jnp.shape, b):
            shapes = jax.tree.map(jnp.shape, b), jax.tree.map(jnp.shape, Ax)
            message = (
                f"`operator` must return the structure and shapes of `b`. Expected {shapes[0]}, got {shapes[1]}. Check "
                "that A is square and applied to the unknown."
            )
            raise ValueError(message)
        if null is not None:
            Ax = regularised(null, x, Ax)
        return jax.tree.map(jnp.subtract, Ax, b)

    def tangent(matvec: Any, b: Any, data: Any) -> Any:
        return linear_solver(eqx.combine(data, rest)[0])(matvec, b)

    def transposed(matvec: Any, b: Any, data: Any) -> Any:
        method, adjoint = eqx.combine(data, rest)
        return linear_solver(method if adjoint is None else adjoint, "adjoint", transposed=adjoint is None)(matvec, b)

    node = implicit_root(residual, iterate, tangent, transposed)
    x, (_, (status, stats)) = node(x0, (matrix, b, null), data)
    if null is not None:
        lost = null.is_inconsistent(whole)
        status = Status.where(~failed(status) & lost, Status.inconsistent, status)
    return x, status, stats


def _start(x0: Any, b: Any) -> Any:
    x0 = as_unknowns(x0)
    if jax.tree.map(jnp.shape, x0) != jax.tree.map(jnp.shape, b):
        shapes = jax.tree.map(jnp.shape, b), jax.tree.map(jnp.shape, x0)
        message = f"`x0` must have the structure and shapes of `b`. Expected {shapes[0]}, got {shapes[1]}."
        raise ValueError(message)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), x0, b)


def _matrix(operator: Any, b: Any) -> Any:
    if not isinstance(operator, jax.Array | np.ndarray | BCOO):
        message = (
            f"`operator` must be a function v -> A v or a square array, got {type(operator).__name__}. Wrap nested "
            "lists with jnp.array, and SciPy's sparse matrices with jax.experimental.sparse.BCOO.from_scipy_sparse."
        )
        raise TypeError(message)
    sparse = isinstance(operator, BCOO)
    A: Any = jax.tree.map(own, operator) if sparse else as_unknowns(operator)
    shape = getattr(b, "shape", None)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or shape != A.shape[:1] or (sparse and A.n_batch + A.n_dense > 0):
        message = (
            f"`operator` and `b` must be a square matrix and a vector. Expected shapes (N, N) and (N,), got "
            f"{A.shape} and {shape}. For several right-hand sides use jax.vmap over b."
        )
        raise ValueError(message)
    return A


def _is_linear(f: Any, f0: Any, matvec: Any, x0: Any, x: Any) -> jax.Array:
    """Whether f(x0 + p) - f(x0) is A p for a generic p of the size of the solution."""
    flat, unravel = ravel_pytree(x)
    signs = jnp.where(jnp.arange(flat.size) * 7 % 5 < 2, -0.6, 0.9).astype(flat.dtype)
    p = unravel(signs * jnp.max(jnp.abs(flat), initial=0.0).astype(flat.dtype))
    moved, at, Ap = (ravel_pytree(t)[0] for t in (f(jax.tree.map(jnp.add, x0, p)), f0, matvec(p)))
    scale = jnp.max(jnp.abs(Ap), initial=0.0) + jnp.max(jnp.abs(at), initial=0.0)
    return jnp.max(jnp.abs(moved - at - Ap), initial=0.0) <= jnp.finfo(flat.dtype).eps ** 0.5 * scale
