"""`linear_solve`: A x = b as a node."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Inexact

from ..adjoint import Status, failed, implicit_root
from ..adjoint._compile import call_compiled
from ..adjoint._guard import guard_tangents
from ..adjoint._status import raise_if_failed
from ..adjoint._trace import as_unknowns, state_dtype
from ._lu import LU
from ._method import AbstractLinearMethod, linear_solver
from ._solution import Solution

Operator = Callable[[Any], Any] | Inexact[Array, "N N"]


def linear_solve(
    operator: Operator,
    b: Any,
    method: AbstractLinearMethod = LU(),  # noqa: B008 (immutable)
    *,
    x0: Any = None,
    throw: bool = True,
) -> Solution:
    """Solve A x = b as one node, differentiable in b and in everything that A depends on.

    Choose `CG()` for large symmetric positive definite operators, `LU()` for small or general ones.

    The equations:  A x = b,  A dx = db - dA x  (tangent),  Aᵀ w = x̄, b̄ = w, Ā = -w xᵀ  (cotangent). The
    adjoint solve uses the same method on the transposed operator and is as tight as the forward one.

    Parameters
    ----------
    operator
        A as a function `v -> A v` on pytrees like `b`, or as a square matrix (N, N). Arrays that the function
        closes over get their gradients.
    b
        Right-hand side: a pytree of floating-point or complex arrays; a vector (N,) for a matrix.
    method
        The method with its tolerances.
    x0
        Start of the iteration (zero by default). Its derivative is zero.
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Solution
        `.value` (like b), `.status`, `.stats` (for `CG`: `iterations`, `residual`).

    Raises
    ------
    adjoint.SolveError
        The solve failed and `throw` is true, or its derivative was asked for though it failed.
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
    if not isinstance(method, AbstractLinearMethod):
        message = f"`method` must be an instance such as solvers.CG() or solvers.LU(), got {method!r}."
        raise TypeError(message)
    warm = x0 is not None
    x0 = _start(x0, b) if warm else jax.tree.map(jnp.zeros_like, b)
    if not callable(operator):
        matrix = operator = _matrix(operator, b)
        if jnp.iscomplexobj(matrix) and not jnp.iscomplexobj(b):
            b, x0 = b.astype(matrix.dtype), x0.astype(matrix.dtype)
    method = method.resolve(state_dtype(b))
    value, status, stats = call_compiled(_linear_solve, (operator, b, x0), method=method, warm=warm)
    if throw:
        value = raise_if_failed(value, status, "linear_solve")
    return Solution(guard_tangents(value, status, "linear_solve"), status, stats)


def _linear_solve(operator: Operator, b: Any, x0: Any, *, method: AbstractLinearMethod, warm: bool) -> Any:
    def iterate(f: Any, x0: Any) -> tuple[Any, Any]:
        minus_r, matvec = jax.linearize(f, x0)
        r = jax.tree.map(jnp.negative, minus_r)
        # The tolerance is relative to b, which is the residual at zero.
        reference = f(jax.tree.map(jnp.zeros_like, x0)) if warm else r
        outcome = method.solve(matvec, r, reference)
        x = jax.tree.map(jnp.add, x0, outcome.value)
        status = outcome.status
        if apply is not None:
            status = Status.where(
                ~failed(status) & ~_is_linear(f, minus_r, matvec, x0, outcome.value), Status.nonlinear, status
            )
        return x, (~failed(status), (status, outcome.stats))

    apply: Any = operator if callable(operator) else None
    matrix = None if apply else operator

    def residual(x: Any, params: Any) -> Any:
        A, b = params
        Ax = apply(x) if A is None else A @ x
        if jax.tree.map(jnp.shape, Ax) != jax.tree.map(jnp.shape, b):
            shapes = jax.tree.map(jnp.shape, b), jax.tree.map(jnp.shape, Ax)
            message = (
                f"`operator` must return the structure and shapes of `b`. Expected {shapes[0]}, got {shapes[1]}. Check "
                "that A is square and applied to the unknown."
            )
            raise ValueError(message)
        return jax.tree.map(jnp.subtract, Ax, b)

    x, (_, (status, stats)) = implicit_root(residual, iterate, linear_solver(method))(x0, (matrix, b))
    return x, status, stats


def _start(x0: Any, b: Any) -> Any:
    x0 = as_unknowns(x0)
    if jax.tree.map(jnp.shape, x0) != jax.tree.map(jnp.shape, b):
        shapes = jax.tree.map(jnp.shape, b), jax.tree.map(jnp.shape, x0)
        message = f"`x0` must have the structure and shapes of `b`. Expected {shapes[0]}, got {shapes[1]}."
        raise ValueError(message)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), x0, b)


def _matrix(operator: Any, b: Any) -> jax.Array:
    if not isinstance(operator, jax.Array | np.ndarray):
        message = (
            f"`operator` must be a function v -> A v or a square array, got {type(operator).__name__}. Wrap nested "
            "lists with jnp.array."
        )
        raise TypeError(message)
    A = as_unknowns(operator)
    shape = getattr(b, "shape", None)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or shape != A.shape[:1]:
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
