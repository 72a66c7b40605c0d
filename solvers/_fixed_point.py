"""`fixed_point`: u = g(u, params) as a node."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._anderson import Anderson
from ._method import AbstractLinearMethod, AbstractRootMethod
from ._root_find import root_find
from ._solution import Solution


def fixed_point(
    function: Callable[[Any, Any], Any],
    guess: Any,
    params: Any = None,
    method: AbstractRootMethod = Anderson(),  # noqa: B008 (immutable)
    *,
    adjoint: AbstractLinearMethod | None = None,
    has_aux: bool = False,
    throw: bool = True,
) -> Solution:
    """Find u = `function(u, params)` as one node, differentiated by the implicit function theorem.

    Choose it where the equations come as an iteration: self-consistent fields, coupled solvers, one period of a limit
    cycle. `Anderson()` converges in far fewer evaluations than `Picard()`, and often where that diverges; any root
    method may be taken too.

    The equations:  u = g(u, p),  (I - g_u) du = g_p dp  (tangent),  (I - g_u)ᵀ w = ū, p̄ = g_pᵀ w  (cotangent).
    The derivative's system is solved matrix-free by GMRES, to the tolerance of the iteration.

    Parameters
    ----------
    function
        `function(u, params)`, of the structure and shapes of `u`. Arrays that it closes over get their gradient.
    guess, params, adjoint, has_aux, throw
        As for `root_find`.
    method
        `Anderson(...)` or `Picard(...)`.

    Returns
    -------
    Solution
        `.value` (like `guess`), `.status`, `.stats` (`iterations`, `residual` ‖g(u) - u‖, `correction`), `.aux`.

    Raises
    ------
    adjoint.SolveError, ValueError
        As for `root_find`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def anomaly(e):  # Kepler's equation E = M + e sin E
    ...     return solvers.fixed_point(lambda E, e: 0.8 + e * jnp.sin(E), 0.8, e).value
    >>> f"{float(anomaly(0.3)):.3f}, {float(jax.grad(anomaly)(0.3)):.3f}"
    '1.062, 1.023'

    References
    ----------
    Christianson, "Reverse accumulation and attractive fixed points", Optim. Methods Softw. 3 (1994),
    doi:10.1080/10556789408805572.
    """
    if not callable(function):
        message = f"`function` must be a function function(u, params), got {function!r}."
        raise TypeError(message)

    def residual(u: Any, params: Any) -> Any:
        if not has_aux:
            return jax.tree.map(jnp.subtract, function(u, params), u)
        value, aux = function(u, params)
        return jax.tree.map(jnp.subtract, value, u), aux

    return root_find(residual, guess, params, method, adjoint=adjoint, has_aux=has_aux, throw=throw)
