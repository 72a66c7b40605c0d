"""`root_find`: F(u, params) = 0 as a node."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..adjoint import Status, failed, implicit_root
from ..adjoint._trace import as_parameters, as_unknowns, partition, state_dtype
from ._conserved import is_kept, with_conserved
from ._entry import run
from ._linear_solve import check_method
from ._method import AbstractLinearMethod, AbstractRootMethod, linear_solver, root_solver
from ._newton import Newton
from ._solution import Solution


def root_find(
    residual: Callable[[Any, Any], Any],
    guess: Any,
    params: Any = None,
    method: AbstractRootMethod = Newton(),  # noqa: B008 (immutable)
    *,
    adjoint: AbstractLinearMethod | None = None,
    conserved: Callable[[Any, Any], Any] | None = None,
    has_aux: bool = False,
    throw: bool = True,
) -> Solution:
    """Find u with `residual(u, params)` = 0 as one node, differentiated by the implicit function theorem.

    Choose it for stationary states, implicit equations and constraints. The gradient costs one linear solve,
    however many iterations the root took. `Newton()` serves small systems, and sparse ones with
    `Newton(linear=SparseLU())`; `NewtonKrylov()` large ones, matrix-free; `TrustRegion()` bad starts and singular
    Jacobians on the way; `Chandrupatla(lower, upper)` scalars in a bracket.

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
        `Newton(rtol=..., atol=...)`, or another.
    adjoint
        The linear method of the adjoint solve, for F_uᵀ; by default that of `method`, at least as tight as the root,
        with its preconditioner transposed.
    conserved
        `conserved(u, params)`: totals that the equations leave undetermined, as numbers that are to vanish. The steady
        state of a closed reaction network has a singular Jacobian, and is one of many until its totals are given:
        `lambda u, p: jnp.sum(u) - p["total"]`. The law must hold whatever u is, g_u F = 0 (a total of atoms: ℓᵀF = 0).
    has_aux
        Whether `residual` returns `(F, aux)`: `.aux` is what it returned at the root, and has derivatives.
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Solution
        `.value` (like `guess`), `.status`, `.stats` (`iterations`, `residual`, and what the method adds), `.aux`.

    Raises
    ------
    adjoint.SolveError
        The solve failed and `throw` is true, or its derivative was asked for though it failed; or the adjoint solve
        failed and `throw` is true. Inside jit and under vmap, derivatives are then NaN.
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

    References
    ----------
    Griewank and Walther, *Evaluating Derivatives*, SIAM 2008, Section 15.3, doi:10.1137/1.9780898717761.
    """
    if not callable(residual):
        message = f"`residual` must be a function residual(u, params), got {residual!r}."
        raise TypeError(message)
    if not isinstance(method, AbstractRootMethod):
        message = f"`method` must be an instance such as solvers.Newton(), got {method!r}."
        raise TypeError(message)
    functions = residual, conserved
    return run_root(_root_find, functions, as_unknowns(guess), params, (method, adjoint), throw=throw, has_aux=has_aux)


def run_root(
    implementation: Callable[..., Any], functions: Any, guess: Any, params: Any, methods: Any, **options: Any
) -> Solution:
    """Run an implementation whose value is `(u, aux)`, with parameters and methods in the dtype of the guess."""
    (method, adjoint), dtype = methods, state_dtype(guess)
    params = as_parameters(params, dtype)
    if adjoint is not None:
        check_method("adjoint", adjoint)
        adjoint = adjoint.resolve(dtype)
    methods = method.resolve(dtype), adjoint
    solution = run(implementation, functions, (params, guess), methods, example=(guess, params), **options)
    u, aux = solution.value
    return Solution(u, solution.status, solution.stats, aux)


def _root_find(functions: Any, inputs: Any, arrays: Any, *, methods: Any, has_aux: bool) -> Any:
    (residual, conserved), (params, guess) = functions, inputs
    numbers, static = partition(params)

    def of_numbers(u: Any, numbers: Any) -> Any:
        return value_without_aux("residual", residual(u, eqx.combine(numbers, static)), has_aux=has_aux)

    def laws(u: Any, numbers: Any) -> Any:
        return conserved(u, eqx.combine(numbers, static))

    equations = of_numbers if conserved is None else with_conserved(of_numbers, laws, guess, numbers)
    method, adjoint = eqx.combine(arrays, methods)
    method = method.for_function(lambda u: equations(u, numbers), guess)
    u, status, stats = solve_root(equations, guess, numbers, method, adjoint, static)
    if conserved is not None:
        lost = ~is_kept(laws, u, numbers, method)
        status = Status.where(~failed(status) & lost, Status.unconserved, status)
    aux = residual(u, params)[1] if has_aux else None
    return (u, aux), status, stats


def solve_root(
    residual: Callable[[Any, Any], Any],
    guess: Any,
    numbers: Any,
    method: AbstractRootMethod,
    adjoint: AbstractLinearMethod | None,
    static: Any = None,
) -> tuple[Any, Status, Any]:
    """The node of a root, `(u, status, stats)`; what the methods hold is data of the node, without derivatives."""
    prepared = method.hoisted(guess), None if adjoint is None else adjoint.hoisted(guess)
    data, rest = eqx.partition(prepared, eqx.is_array)

    def iterate(f: Any, guess: Any, data: Any) -> tuple[Any, Any]:
        arrays, numbers = data
        method, _ = eqx.combine(arrays, rest)
        return root_solver(method, eqx.combine(numbers, static))(f, guess)

    def tangent(matvec: Any, b: Any, data: Any) -> Any:
        method, _ = eqx.combine(data[0], rest)
        return linear_solver(method.of_derivative())(matvec, b)

    def transposed(matvec: Any, b: Any, data: Any) -> Any:
        method, adjoint = eqx.combine(data[0], rest)
        if adjoint is None:
            return linear_solver(method.of_derivative(), "adjoint", transposed=True)(matvec, b)
        return linear_solver(adjoint, "adjoint")(matvec, b)

    u, (_, (status, stats)) = implicit_root(residual, iterate, tangent, transposed)(guess, numbers, (data, numbers))
    return u, status, stats


def value_without_aux(name: str, out: Any, *, has_aux: bool) -> Any:
    """What the user's function returned, without its by-products."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        message = f"with has_aux=True `{name}` must return a pair (value, aux), got {jax.tree.structure(out)}."
        raise ValueError(message)
    return out[0] if has_aux else out
