"""`least_squares`: the minimum of ½‖r(u, params)‖² as a node."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..adjoint._trace import as_unknowns, partition, state_dtype
from ._gauss_newton import AbstractLeastSquaresMethod
from ._levenberg_marquardt import LevenbergMarquardt
from ._method import AbstractLinearMethod
from ._objective import AbstractMinimizer
from ._root_find import run_root, solve_root, value_without_aux
from ._solution import Solution


def least_squares(
    residual: Callable[[Any, Any], Any],
    guess: Any,
    params: Any = None,
    method: AbstractLeastSquaresMethod = LevenbergMarquardt(),  # noqa: B008 (immutable)
    *,
    adjoint: AbstractLinearMethod | None = None,
    has_aux: bool = False,
    throw: bool = True,
) -> Solution:
    """Minimise ½‖`residual(u, params)`‖² over u as one node, differentiable in params and in the data.

    Choose it to fit models whose fitted values are differentiated in turn: sensitivity of an estimate to each
    measurement, calibration inside an optimisation. `LevenbergMarquardt()` serves small problems,
    `LevenbergMarquardt(linear=CG())` large ones, matrix-free; `GaussNewton()` good guesses.

    The equations:  F(u, p) = Jᵀ r = 0,  H du = -F_p dp  (tangent),  H w = ū, p̄ = -F_pᵀ w  (cotangent), with the full
    Hessian H = JᵀJ + Σ rᵢ ∇²rᵢ: the second-order term is not neglected.

    Parameters
    ----------
    residual
        `residual(u, params)`: r, any pytree of real numbers; their sum of squares is what is minimised (divide by
        standard deviations for weights). Arrays that it closes over, data among them, get their gradient.
    guess
        Start of the iteration: a pytree of real numbers. Its derivative is zero.
    params
        Any pytree. Floating-point leaves get gradients; integers, `None`, strings and functions are carried.
    method
        `LevenbergMarquardt(rtol=..., atol=...)` or `GaussNewton(...)`.
    adjoint
        The linear method of the adjoint solve with H (symmetric); by default the method's `linear`.
    has_aux
        Whether `residual` returns `(r, aux)`: `.aux` is what it returned at the minimum, and has derivatives.
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Solution
        `.value` (like `guess`), `.status`, `.stats` (`iterations`, `cost` ½‖r‖², `residual` ‖Jᵀr‖, `correction` in
        units of the tolerance), `.aux`. Nothing in `.stats` carries a derivative.

    Raises
    ------
    adjoint.SolveError
        The solve failed and `throw` is true, or its derivative was asked for though it failed; or the adjoint solve
        failed and `throw` is true. Inside jit and under vmap, derivatives are then NaN.
    ValueError
        Unknowns or residuals are complex, or a tolerance is out of reach of the dtype.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def mean(y):  # the mean is the least-squares fit of a constant
    ...     return solvers.least_squares(lambda u, y: u - y, 0.0, y).value
    >>> [f"{float(each):.2f}" for each in jax.grad(mean)(jnp.array([1.0, 2.0, 6.0, 3.0]))]
    ['0.25', '0.25', '0.25', '0.25']

    References
    ----------
    Griewank and Walther, *Evaluating Derivatives*, SIAM 2008, Section 15.3, doi:10.1137/1.9780898717761.
    """
    check_objective("residual", residual, method, AbstractLeastSquaresMethod, "LevenbergMarquardt")
    return minimum(_least_squares, residual, guess, params, (method, adjoint), has_aux=has_aux, throw=throw)


def minimum(
    implementation: Callable[..., Any], function: Any, guess: Any, params: Any, methods: Any, **options: Any
) -> Solution:
    """Run for real unknowns."""
    guess = as_unknowns(guess)
    dtype = state_dtype(guess)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        message = (
            f"unknowns must be real: a minimum is looked for. Expected a real guess, got {dtype}. Take real and "
            "imaginary parts as unknowns of their own."
        )
        raise ValueError(message)
    return run_root(implementation, function, guess, params, methods, **options)


def check_objective(name: str, function: Any, method: Any, family: type, example: str) -> None:
    """`TypeError` for what is no function or no method of the family."""
    if not callable(function):
        message = f"`{name}` must be a function {name}(u, params), got {function!r}."
        raise TypeError(message)
    if not isinstance(method, family):
        message = f"`method` must be an instance such as solvers.{example}(), got {method!r}."
        raise TypeError(message)


def _least_squares(residual: Any, inputs: Any, arrays: Any, *, methods: Any, has_aux: bool) -> Any:
    def objective(u: Any, params: Any) -> jax.Array:
        r = ravel_pytree(value_without_aux("residual", residual(u, params), has_aux=has_aux))[0]
        if jnp.iscomplexobj(r):
            message = (
                "`residual` must return real numbers, whose sum of squares is minimised, got "
                f"{r.dtype}. Return real and imaginary parts."
            )
            raise ValueError(message)
        return r

    return stationary(objective, residual, inputs, eqx.combine(arrays, methods), has_aux=has_aux)


def stationary(objective: Any, function: Any, inputs: Any, methods: Any, *, has_aux: bool) -> Any:
    """The node: a root of the gradient, found by a method that is told the objective."""
    (params, guess), (method, adjoint) = inputs, methods
    numbers, static = partition(params)
    method: AbstractMinimizer = method.bound(objective, guess, params)

    def gradient(u: Any, numbers: Any) -> Any:
        params = eqx.combine(numbers, static)
        assert method.objective is not None
        return jax.grad(lambda u: method.value_of(method.objective(u, params)))(u)  # pyright: ignore

    u, status, stats = solve_root(gradient, guess, numbers, method, adjoint, static)
    aux = function(u, params)[1] if has_aux else None
    return (u, aux), status, stats
