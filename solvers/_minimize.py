"""`minimize`: a minimum of f(u, params) as a node."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._gauss_newton import AbstractLeastSquaresMethod
from ._least_squares import check_objective, minimum, stationary
from ._method import AbstractLinearMethod
from ._newton_cg import AbstractScalarMethod, NewtonCG
from ._root_find import value_without_aux
from ._solution import Solution


def minimize(
    function: Callable[[Any, Any], Any],
    guess: Any,
    params: Any = None,
    method: AbstractScalarMethod = NewtonCG(),  # noqa: B008 (immutable)
    *,
    adjoint: AbstractLinearMethod | None = None,
    has_aux: bool = False,
    throw: bool = True,
) -> Solution:
    """Minimise a scalar `function(u, params)` over u as one node, differentiated by the implicit function theorem.

    Choose it for equilibria given by an energy: elasticity, membranes, chains, reaction-diffusion. It knows a minimum
    from a saddle point, which `root_find` on the gradient does not. `NewtonCG()` is the first choice, `LBFGS()` for
    functions whose second derivatives are dear. For sums of squares use `least_squares`.

    The equations:  F(u, p) = ∇_u f = 0,  H du = -F_p dp  (tangent),  H w = ū, p̄ = -F_pᵀ w  (cotangent), with the
    Hessian H = ∇²_u f by its products: nothing of N² numbers is built, in the derivative neither.

    Parameters
    ----------
    function
        `function(u, params)`: one real number, twice differentiable by JAX. Arrays that it closes over get their
        gradient.
    guess
        Start of the iteration: a pytree of real numbers. Its derivative is zero.
    params
        Any pytree. Floating-point leaves get gradients; integers, `None`, strings and functions are carried.
    method
        `NewtonCG(rtol=..., atol=..., linear=CG(preconditioner=...))` or `LBFGS(...)`.
    adjoint
        The linear method of the adjoint solve with H (symmetric); by default the method's `linear`.
    has_aux
        Whether `function` returns `(f, aux)`: `.aux` is what it returned at the minimum, and has derivatives.
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Solution
        `.value` (like `guess`), `.status`, `.stats` (`iterations`, `cost` f, `residual` ‖∇f‖₂, `correction` in units of
        the tolerance, `linear_iterations`), `.aux`. Nothing in `.stats` carries a derivative.

    Raises
    ------
    adjoint.SolveError
        The solve failed and `throw` is true, or its derivative was asked for though it failed; or the adjoint solve
        failed and `throw` is true. Inside jit and under vmap, derivatives are then NaN.
    ValueError
        Unknowns are complex, the function returns no real number, or a tolerance is out of reach of the dtype.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def energy(u, load):  # a pendulum on a spring
    ...     return u**2 / 2 - load * jnp.cos(u - 1.0)
    >>> def angle(load):
    ...     return solvers.minimize(energy, 0.0, load).value
    >>> round(float(angle(2.0)), 4), round(float(jax.grad(angle)(2.0)), 4)
    (0.6624, 0.1147)

    References
    ----------
    Griewank and Walther, *Evaluating Derivatives*, SIAM 2008, Section 15.3, doi:10.1137/1.9780898717761.
    """
    if isinstance(method, AbstractLeastSquaresMethod):
        message = f"{type(method).__name__}() minimises sums of squares: use solvers.least_squares, or NewtonCG() here."
        raise TypeError(message)
    check_objective("function", function, method, AbstractScalarMethod, "NewtonCG")
    return minimum(_minimize, function, guess, params, (method, adjoint), has_aux=has_aux, throw=throw)


def _minimize(function: Any, inputs: Any, arrays: Any, *, methods: Any, has_aux: bool) -> Any:
    def objective(u: Any, params: Any) -> jax.Array:
        value = value_without_aux("function", function(u, params), has_aux=has_aux)
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            message = (
                f"`function` must return one real number. Expected shape () of a floating-point dtype, got "
                f"{jax.tree.map(jnp.shape, value)} of {jnp.result_type(*jax.tree.leaves(value))}. Sum what it returns; "
                "a vector whose squares are to be summed goes to least_squares."
            )
            raise ValueError(message)
        return jnp.asarray(value)

    return stationary(objective, function, inputs, eqx.combine(arrays, methods), has_aux=has_aux)
