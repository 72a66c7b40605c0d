"""Roots as nodes: u with F(u, p) = 0, differentiated by the implicit function theorem."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

from ._linear_system import LinearSystem
from ._node import linear_node
from ._status import poison
from ._tie import tie
from ._trace import define_by_run, differentiable, replaced, trace_unknown, zero_tangent

Residual = Callable[[Any, Any], Any]
Solve = Callable[..., tuple[Any, Any]]
LinearSolve = Callable[..., tuple[Any, jax.Array]]
_NO_DATA = jax.tree.structure(None)


class implicit_root:  # noqa: N801 (a transformation of functions, named like `jax.custom_jvp`)
    """Turn a root solver into a node `(guess, params) -> (u, aux)` whose derivative never looks inside it.

    Choose it to give your own iteration (a fixed point, a nonlinear solver from elsewhere) exact derivatives;
    `solvers.root_find` is this with Newton's method inside.

    The equations:  F(u, p) = 0,  F_u du = -F_p dp  (tangent),  F_uᵀ w = ū,  p̄ = -F_pᵀ w  (cotangent).

    Parameters
    ----------
    residual
        `residual(u, params)`, of the structure and shapes of `u`. What it closes over gets its gradient too.
        It is traced once.
    solve
        `solve(f, guess) -> (u, (converged, aux))`, where `f(u)` is the residual; `converged` is a truth value
        that says whether `u` meets the tolerance, and `aux` is any pytree of by-products (counts, a status).
        Neither carries derivatives.
    linear_solve
        `linear_solve(matvec, b) -> (x, converged)` for F_u x = b, both with the structure of `u`.
    adjoint_solve
        The same for F_uᵀ; `linear_solve` where it is not given.
    tolerance
        The largest ‖F‖₂ (in the units of F) at a root. Where it is given, the node evaluates the residual at the point
        that it linearises, and does not take `converged` on trust.

    Notes
    -----
    The node is called as `node(guess, params) -> (u, (converged, aux))`. The derivative with respect to `guess` is
    zero. Arrays that the solvers read and that change nothing but their course (a preconditioner's) are passed as
    `node(guess, params, data)`, and come to each of them as a last argument.

    Where `converged` is false, or a linear solve of the derivative misses its tolerance, tangents and cotangents are
    NaN: the theorem holds at a root only.

    References
    ----------
    Griewank and Walther, *Evaluating Derivatives*, SIAM 2008, Section 15.3, doi:10.1137/1.9780898717761.

    Examples
    --------
    >>> from tapeless import adjoint
    >>> import jax, jax.numpy as jnp
    >>> def newton(f, u):
    ...     for _ in range(20):
    ...         u = u - f(u) / jax.grad(f)(u)
    ...     return u, (jnp.abs(f(u)) < 1e-4, None)
    >>> def divide(matvec, b):
    ...     return b / matvec(jnp.ones_like(b)), jnp.array(True)
    >>> root = adjoint.implicit_root(lambda u, p: u * u - p, newton, divide)
    >>> round(float(jax.grad(lambda p: root(1.0, p)[0])(4.0)), 6)
    0.25
    """

    def __init__(
        self,
        residual: Residual,
        solve: Solve,
        linear_solve: LinearSolve,
        adjoint_solve: LinearSolve | None = None,
        *,
        tolerance: float | None = None,
    ):
        self._residual, self._tolerance = residual, tolerance
        self._solve = solve if tolerance is None else self._checked(solve)
        self._linear_solve, self._adjoint_solve = linear_solve, adjoint_solve or linear_solve

    def _checked(self, solve: Solve) -> Solve:
        def and_look(f: Callable[[Any], Any], guess: Any, *data: Any) -> tuple[Any, Any]:
            u, (converged, aux) = solve(f, guess, *data)
            size = jnp.linalg.norm(ravel_pytree(f(u))[0])
            return u, (converged & (size <= self._tolerance), aux)

        return and_look

    def __call__(self, guess: Any, params: Any, data: Any = None) -> tuple[Any, Any]:
        """Solve, and return the root with `(converged, aux)`."""
        guess, params, data = jax.tree.map(jnp.asarray, (guess, params, data))
        if define_by_run():
            solve = self._solve if data is None else lambda f, u: self._solve(f, u, data)
            return _define_by_run(self._residual, solve, guess, params)
        problem = self._problem(guess, params, jax.tree.structure(data))
        u, converged, aux = problem.root(
            jax.tree.leaves(problem.guess), problem.theta(params), jax.tree.leaves(lax.stop_gradient(data))
        )
        return jax.tree.unflatten(problem.structure, u), (converged, aux)

    def pullback(self, u: Any, params: Any, cotangent: Any) -> Any:
        """Return p̄ = -F_pᵀ F_u⁻ᵀ ū at a root `u` that is known already: nothing is solved again but F_uᵀ.

        For the residual's captured arrays no cotangent is returned: pass what is to be differentiated in `params`.
        Leaves of `params` without derivatives get None.
        """
        problem = self._problem(u, params)
        theta = problem.theta(params)
        first = problem.num_consts
        active = [i for i in range(first, len(theta)) if differentiable(theta[i])]
        linearisation = _Linearisation(problem, (len(jax.tree.leaves(u)), len(theta)), active)
        residuals = [jnp.array(True), *jax.tree.leaves(u), *theta]
        bars = dict(zip(active, linearisation.cotangent(residuals, jax.tree.leaves(cotangent)), strict=True))
        leaves = [bars.get(i) for i in range(first, len(theta))]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def _problem(self, guess: Any, params: Any, data: Any = _NO_DATA) -> "_Problem":
        solvers = self._solve, self._linear_solve, self._adjoint_solve
        return _Problem(guess, params, self._residual, solvers, data)


class _Problem:
    """One root problem, flat: `u`, `theta` (captured constants, then parameters) and `data` are lists of arrays."""

    def __init__(
        self, guess: Any, params: Any, residual: Residual, solvers: tuple[Solve, LinearSolve, LinearSolve], data: Any
    ):
        self.structure, self.data = jax.tree.structure(guess), data
        self.traced, self.guess = trace_unknown(residual, guess, params)
        self.num_consts = len(self.traced.consts)
        self._check(guess)
        self.solve, self.linear_solve, self.adjoint_solve = solvers
        self.root = jax.custom_jvp(self._root)
        self.root.defjvp(self._tangent, symbolic_zeros=True)

    def _check(self, guess: Any) -> None:
        got = jax.tree.unflatten(self.traced.out_tree, self.traced.out_avals)
        expected = jax.tree.map(jax.typeof, guess)
        same = self.traced.out_tree == self.structure and all(
            a.shape == b.shape for a, b in zip(jax.tree.leaves(expected), self.traced.out_avals, strict=True)
        )
        if same and any(
            jnp.iscomplexobj(a) and not jnp.iscomplexobj(x)
            for a, x in zip(self.traced.out_avals, jax.tree.leaves(guess), strict=True)
        ):
            message = (
                f"`residual` must return real values for real unknowns. Expected {expected}, got {got}. Start from a "
                "complex guess (a complex right-hand side for a linear solve), or take real parts."
            )
            raise ValueError(message)
        if not same:
            message = (
                f"`residual` must return one value for each unknown. Expected {expected} (as `guess`), got {got}. "
                "Check the shapes that `residual(u, params)` returns."
            )
            raise ValueError(message)

    def theta(self, params: Any) -> list[Any]:
        """Captured constants, then parameters."""
        return [*self.traced.consts, *jax.tree.leaves(params)]

    def flat_residual(self, u: Sequence[Any], theta: Sequence[Any]) -> list[Any]:
        consts, params = theta[: self.num_consts], theta[self.num_consts :]
        out = self.traced.evaluate(consts, [*u, *params])
        return [lax.convert_element_type(f, x.dtype) for f, x in zip(out, u, strict=True)]

    def with_data(self, data: Sequence[Any]) -> tuple[Any, ...]:
        """The last argument of the solvers, if they take one."""
        return () if self.data == _NO_DATA else (jax.tree.unflatten(self.data, list(data)),)

    def _root(self, guess: list[Any], theta: list[Any], data: list[Any]) -> tuple[list[Any], jax.Array, Any]:
        def f(u: Any) -> Any:
            return jax.tree.unflatten(self.structure, self.flat_residual(jax.tree.leaves(u), theta))

        u, (converged, aux) = self.solve(f, jax.tree.unflatten(self.structure, guess), *self.with_data(data))
        return tie((jax.tree.leaves(u), converged, aux), guess, theta, data)

    def _tangent(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        u, converged, aux = self.root(*primals)
        theta, dots = primals[1], tangents[1]
        active = [i for i, t in enumerate(dots) if not isinstance(t, SymbolicZero)]
        residuals = [converged, *u, *theta, *primals[2]]
        linearisation = _Linearisation(self, (len(u), len(theta)), active)
        u_dot = linear_node(
            linearisation.tangent, linearisation.cotangent, residuals, [dots[i] for i in active], "root"
        )
        return (u, converged, aux), (u_dot, *jax.tree.map(zero_tangent, (converged, aux)))


class _Linearisation:
    """The implicit function theorem at a root, for the active entries of theta."""

    def __init__(self, problem: _Problem, sizes: tuple[int, int], active: list[int]):
        self.problem, self.active = problem, active
        self.ends = sizes[0], sum(sizes)

    def _split(self, residuals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return list(residuals[: self.ends[0]]), list(residuals[self.ends[0] : self.ends[1]])

    def _of_theta(self, u: list[Any], theta: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
        def f(*values: Any) -> list[Any]:
            return self.problem.flat_residual(u, replaced(theta, self.active, values))

        return f, [theta[i] for i in self.active]

    def _system(self) -> LinearSystem:
        """F_u at the root; its residuals are (u, theta, data)."""
        problem = self.problem

        def jacobian(r: Sequence[Any], v: list[Any]) -> list[Any]:
            u, theta = self._split(r)
            return jax.jvp(lambda u: problem.flat_residual(u, theta), [u], [v])[1]

        def adjoint(r: Sequence[Any], v: list[Any]) -> list[Any]:
            u, theta = self._split(r)
            return jax.vjp(lambda u: problem.flat_residual(u, theta), u)[1](v)[0]

        return LinearSystem(
            jacobian, adjoint, self._on_lists(problem.linear_solve), self._on_lists(problem.adjoint_solve)
        )

    def _on_lists(self, method: LinearSolve) -> Callable[..., Any]:
        problem, structure = self.problem, self.problem.structure

        def solve(r: Sequence[Any], matvec: Callable[[Any], Any], b: Any) -> tuple[Any, Any]:
            def matvec_tree(v: Any) -> Any:
                return jax.tree.unflatten(structure, matvec(jax.tree.leaves(v)))

            x, ok = method(matvec_tree, jax.tree.unflatten(structure, b), *problem.with_data(r[self.ends[1] :]))
            return jax.tree.leaves(x), ok

        return solve

    def tangent(self, residuals: Sequence[Any], theta_dot: Sequence[Any]) -> list[Any]:
        converged, *rest = residuals
        f, at = self._of_theta(*self._split(rest))
        f_dot = jax.jvp(f, at, list(theta_dot))[1]
        u_dot = self._system().solve(rest, [-x for x in f_dot])
        return poison(u_dot, jnp.logical_not(converged))

    def cotangent(self, residuals: Sequence[Any], u_bar: Sequence[Any]) -> list[Any]:
        converged, *rest = residuals
        w = self._system().transposed().solve(rest, u_bar)
        f, at = self._of_theta(*self._split(rest))
        theta_bar = jax.vjp(f, *at)[1]([-x for x in w])
        return poison(list(theta_bar), jnp.logical_not(converged))


def _define_by_run(residual: Residual, solve: Solve, guess: Any, params: Any) -> tuple[Any, Any]:
    """Under `jax.disable_jit()` the residual sees numbers and nothing is traced.

    Two Newton steps at the root, with live parameters, carry the derivatives: each step doubles the order to
    which they are exact, so values are unchanged and derivatives are right up to third order.
    """
    stopped = jax.tree.map(lax.stop_gradient, (guess, params))
    u, by_products = solve(lambda u: residual(u, stopped[1]), stopped[0])
    u, unravel = ravel_pytree(jax.tree.map(lax.stop_gradient, u))

    def f(u: jax.Array) -> jax.Array:
        return ravel_pytree(residual(unravel(u), params))[0]

    for _ in range(2):
        columns = [jax.jvp(f, (u,), (e,))[1] for e in jnp.eye(u.size, dtype=u.dtype)]
        if columns:
            u = u - jnp.linalg.solve(jnp.stack(columns, axis=1), f(u))
    return unravel(u), by_products
