"""`root_find`: F(u, params) = 0 as a node."""

from collections.abc import Callable
from typing import Any

import equinox as eqx

from ..adjoint import implicit_root
from ..adjoint._compile import call_compiled
from ..adjoint._guard import guard_tangents
from ..adjoint._status import raise_if_failed
from ..adjoint._trace import as_parameters, as_unknowns, partition, state_dtype
from ._method import AbstractRootMethod, linear_solver, root_solver
from ._newton import Newton
from ._solution import Solution


def root_find(
    residual: Callable[[Any, Any], Any],
    guess: Any,
    params: Any = None,
    method: AbstractRootMethod = Newton(),  # noqa: B008 (immutable)
    *,
    throw: bool = True,
) -> Solution:
    """Find u with `residual(u, params)` = 0 as one node, differentiated by the implicit function theorem.

    Choose it for stationary states, implicit equations and constraints. The gradient costs one linear solve,
    however many iterations the root took.

    The equations:  F(u, p) = 0,  F_u du = -F_p dp  (tangent),  F_uᵀ w = ū, p̄ = -F_pᵀ w  (cotangent).

    Parameters
    ----------
    residual
        `residual(u, params)`, of the structure and shapes of `u`. Arrays that it closes over get their gradient.
    guess
        Start of the iteration: a pytree of numbers (integers become the default float). Its derivative is zero.
    params
        Any pytree. Floating-point leaves get gradients; integers, `None`, strings and functions are carried.
    method
        `Newton(rtol=..., atol=...)`.
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Solution
        `.value` (like `guess`), `.status`, `.stats` (`iterations`, `residual`, `correction`).

    Raises
    ------
    adjoint.SolveError
        The solve failed and `throw` is true, or its derivative was asked for though it failed.
    ValueError
        The residual has other shapes than the guess, or a tolerance is out of reach of the dtype.

    Examples
    --------
    >>> import jax
    >>> from tapeless import solvers
    >>> def side(area):
    ...     return solvers.root_find(lambda u, a: u**2 - a, 1.0, area).value
    >>> round(float(jax.grad(side)(4.0)), 4)
    0.25
    """
    if not callable(residual):
        message = f"`residual` must be a function residual(u, params), got {residual!r}."
        raise TypeError(message)
    if not isinstance(method, AbstractRootMethod):
        message = f"`method` must be an instance such as solvers.Newton(), got {method!r}."
        raise TypeError(message)
    guess = as_unknowns(guess)
    dtype = state_dtype(guess)
    params = as_parameters(params, dtype)
    method = method.resolve(dtype)
    value, status, stats = call_compiled(_root_find, (residual, guess, params), method=method)
    if throw:
        value = raise_if_failed(value, status, "root_find")
    return Solution(guard_tangents(value, status, "root_find"), status, stats)


def _root_find(residual: Callable[[Any, Any], Any], guess: Any, params: Any, *, method: AbstractRootMethod) -> Any:
    numbers, static = partition(params)

    def of_numbers(u: Any, numbers: Any) -> Any:
        return residual(u, eqx.combine(numbers, static))

    node = implicit_root(of_numbers, root_solver(method), linear_solver(method.linear))
    u, (_, (status, stats)) = node(guess, numbers)
    return u, status, stats
