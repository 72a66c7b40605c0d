"""What minimisers share: an objective beside its gradient, and the Newton steps that end every minimisation.

A minimum is a root of the gradient with a positive definite Hessian H. Methods come near it in their own way; then
Newton steps on the full Hessian take over, and only they say "converged": the correction H⁻¹ g is the error, whatever
the rate of the method. At a point with negative curvature the iteration goes on along it.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ..adjoint import Status, failed
from ..adjoint._loops import vary_together, while_loop
from ..adjoint._trace import define_by_run
from ._cg import CG
from ._method import AbstractRootMethod, Outcome, all_finite, on_flat, status_where
from ._preconditioner import as_preconditioner
from ._truncated_cg import truncated_cg

Flat = Callable[[Any], Any]

NEAR = 1e-2  # a step relative to the unknowns from which Newton's steps are tried
_ACCEPTED, _CONTRACTION = 0.5, 0.2  # of the gradient, for a Newton step to be taken, and to be the last
_FORCING = 1e-3  # of the conjugate gradients in a Newton step
_PROBED = 1e-3
_NOISE = 30
_SETTLED = 0.1  # a correction, in units of the tolerance, after which Newton steps end one way or the other
_RETREAT = 1e-2
_LAST = 1.1e-3  # a step of a method that gains nothing, in units of the tolerance
_HALVINGS = 60


class Problem(NamedTuple):
    """The functions of flat unknowns: the objective (or its residual vector) and the gradient."""

    value: Flat
    gradient: Flat
    residual: Flat
    unravel: Callable[[Any], Any]
    preconditioner: Callable[[Flat], Flat | None]
    limit: int


class Move(NamedTuple):
    """One step of a method: where it led, how large it was in units of the tolerance, whether it can go no further."""

    u: Float[Array, " N"]
    memory: Any
    size: Float[Array, ""]
    stuck: Bool[Array, ""]
    status: Status
    linear_iterations: Any = 0


class _Model(NamedTuple):
    """Newton's step for a Hessian; what is wrong with that; and a norm of gradients."""

    step: Float[Array, " N"]
    status: Status
    direction: Float[Array, " N"]
    measure: Flat
    iterations: Any = 0
    floor: Any = 0.0


class _State(NamedTuple):
    u: Float[Array, " N"]
    memory: Any
    newton: Bool[Array, ""]
    near: Float[Array, ""]
    size: Float[Array, ""]
    correction: Float[Array, ""]
    iterations: Int[Array, ""]
    linear_iterations: Int[Array, ""]
    status: Status


class AbstractMinimizer(AbstractRootMethod):
    """A way to find a minimum, as a root of the gradient: it is told the objective as well."""

    max_iters: eqx.AbstractVar[int]
    objective: eqx.AbstractVar[Callable[[Any, Any], Any] | None]

    @abc.abstractmethod
    def start(self, problem: Problem, u: jax.Array) -> Any:
        """The method's memory at the guess."""

    @abc.abstractmethod
    def advance(self, problem: Problem, u: jax.Array, memory: Any) -> Move:
        """One step of the method."""

    def refreshed(self, problem: Problem, u: jax.Array, memory: Any) -> Any:
        """The memory after a step that was not the method's own led to `u`."""
        del problem, u
        return memory

    def near(self) -> Any:
        """The size of a step, in units of the tolerance, from which Newton's steps are tried."""
        return self.near_enough(NEAR)

    def near_enough(self, part: float) -> Any:
        """A part of the unknowns, in units of the tolerance."""
        assert self.rtol is not None
        return jnp.maximum(part / jnp.maximum(self.rtol, 1e-16), 1.0)

    def value_of(self, out: jax.Array) -> jax.Array:
        """The number to be minimised, from what the objective returns."""
        return out

    def bound(self, objective: Callable[[Any, Any], Any], guess: Any, params: Any) -> Self:
        """The method for an objective `(u, params) -> number` (or residuals), with what that closes over as leaves."""
        if not define_by_run():
            objective = eqx.filter_closure_convert(objective, guess, params)
        return dataclasses.replace(self, objective=objective)

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Iterate from `guess`; `f` is the gradient."""
        objective = self.objective
        if objective is None:
            message = (
                f"{type(self).__name__} needs an objective and cannot solve equations: use solvers.minimize or "
                "solvers.least_squares, or give root_find an instance such as solvers.Newton()."
            )
            raise TypeError(message)
        u, unravel = ravel_pytree(guess)

        def residual(u: jax.Array) -> jax.Array:
            return objective(unravel(u), params).astype(u.dtype)

        gradient = on_flat(f, unravel, u.dtype)
        method = self.resolve(u.dtype)
        problem = Problem(
            lambda u: self.value_of(residual(u)),
            gradient,
            residual,
            unravel,
            lambda H: _flat_preconditioner(method, H, u, unravel),
            _limit(method, u.size),
        )
        end = _minimised(method, problem, u)
        stats = {
            "iterations": end.iterations,
            "residual": jnp.linalg.norm(gradient(end.u)),
            "correction": end.correction,
            "cost": problem.value(end.u),
        }
        if is_matrix_free(self):
            stats["linear_iterations"] = end.linear_iterations
        return Outcome(unravel(end.u), end.status, stats)


def is_matrix_free(method: AbstractRootMethod) -> bool:
    """Whether the method builds no matrix."""
    return isinstance(method.linear, CG)


def _limit(method: AbstractRootMethod, size: int) -> int:
    given = getattr(method.linear, "max_iters", None)
    return 10 * size if given is None else given


def _flat_preconditioner(method: AbstractRootMethod, H: Flat, u: Any, unravel: Callable[[Any], Any]) -> Flat | None:
    given = as_preconditioner(getattr(method.linear, "preconditioner", None))
    if given is None:
        return None
    M = given.prepare(lambda v: unravel(H(ravel_pytree(v)[0])), unravel(u))
    return on_flat(M, unravel, u.dtype)


def _minimised(method: AbstractMinimizer, problem: Problem, u: jax.Array) -> _State:
    one, zero = jnp.ones((), u.dtype), jnp.zeros((), jnp.int32)
    start = _State(
        u=u,
        memory=method.start(problem, u),
        newton=jnp.array(False),
        near=method.near() * one,
        size=jnp.inf * one,
        correction=jnp.inf * one,
        iterations=zero,
        linear_iterations=zero,
        status=Status.where(jnp.isfinite(problem.value(u)), Status.max_iterations, Status.nonfinite),
    )

    def body(s: _State) -> _State:
        s = vary_together(s)
        return lax.cond(
            s.newton,
            lambda: vary_together(_finish(method, problem, s)),
            lambda: vary_together(_own(method, problem, s)),
        )

    return while_loop(
        lambda s: (s.status == Status.max_iterations) & (s.iterations < method.max_iters),
        body,
        start,
    )


def _own(method: AbstractMinimizer, problem: Problem, s: _State) -> _State:
    move = method.advance(problem, s.u, s.memory)
    return s._replace(
        u=move.u,
        memory=move.memory,
        newton=move.stuck | (move.size <= s.near),
        # Where the method can go no further, this is the last attempt.
        near=jnp.where(move.stuck, 0, s.near),
        size=jnp.where(move.stuck, 0, move.size),
        iterations=s.iterations + 1,
        linear_iterations=s.linear_iterations + move.linear_iterations,
        status=move.status,
    )


def _finish(method: AbstractMinimizer, problem: Problem, s: _State) -> _State:
    """A Newton step on the full Hessian: the last one, one on the way, or one that shows that it is too early."""
    g, hessian = jax.linearize(problem.gradient, s.u)
    model = _model(method, problem, hessian, g)
    correction = method.weighted(model.step, s.u)
    u = s.u + model.step
    moved, hessian_there = jax.linearize(problem.gradient, u)
    tilt = 4 * jnp.finfo(u.dtype).eps * s.u
    expected = hessian(tilt)
    rounding = problem.gradient(s.u + tilt) - g - expected
    before, after = model.measure(g), model.measure(moved)
    noise = _NOISE * model.measure(rounding) + model.measure(expected)
    sound = ~failed(model.status) & jnp.isfinite(after)
    arrived = sound & (correction <= 1) & ((after <= _CONTRACTION * before) | (after <= noise))
    fault, direction, probed = _probed(method, problem, hessian_there, model, arrived)
    done = arrived & ~failed(fault)
    near_root = (after <= _ACCEPTED * before) & (correction <= method.near_enough(10 * NEAR))
    proceeds = sound & ~arrived & near_root & (correction > _SETTLED)
    # Too little contraction by then is that of a degenerate minimum: it ends here, for steps would go on to where all
    # is rounding.
    degenerate = sound & (correction <= _SETTLED)
    leaving = (fault == Status.indefinite) & (arrived | (s.size <= 1))
    left, escaped = _along(problem, s.u, g, direction, leaving)
    fails = ~(done | proceeds | escaped)
    fault = Status.where(failed(fault), fault, Status.stalled)
    u = jnp.where(done | proceeds, u, jnp.where(escaped, left, s.u))
    over = fails & (degenerate | (s.near <= _LAST))
    return s._replace(
        u=u,
        memory=method.refreshed(problem, u, s.memory),
        newton=proceeds,
        near=jnp.where(escaped, method.near(), jnp.where(fails, _RETREAT * s.near, s.near)),
        correction=correction,
        iterations=s.iterations + 1,
        linear_iterations=s.linear_iterations + model.iterations + probed,
        status=status_where([(done, Status.converged), (over, fault)], Status.max_iterations),
    )


def _model(method: AbstractMinimizer, problem: Problem, hessian: Flat, g: jax.Array) -> _Model:
    if not is_matrix_free(method):
        return _dense_model(hessian, g)
    end = truncated_cg(hessian, problem.preconditioner(hessian), g, _FORCING, problem.limit)
    status = status_where(
        [
            (~(all_finite(g) & all_finite(end.step)), Status.nonfinite),
            (end.negative, Status.indefinite),
            (end.flat, Status.singular),
            (end.residual > _FORCING, Status.stalled),
        ],
        Status.converged,
    )
    return _Model(end.step, status, end.direction, jnp.linalg.norm, end.iterations)


def _dense_model(hessian: Flat, g: jax.Array) -> _Model:
    """By eigenvalues of the Hessian, scaled to a diagonal of ones: the units of the unknowns do not matter."""
    H = jax.vmap(hessian)(jnp.eye(g.size, dtype=g.dtype))
    diagonal = jnp.abs(jnp.diagonal(H))
    scale = 1 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    finite = all_finite(H.ravel()) & all_finite(g)
    scaled = jnp.where(finite, scale[:, None] * (H + H.T) / 2 * scale, jnp.eye(g.size, dtype=g.dtype))
    values, vectors = jnp.linalg.eigh(scaled)
    floor = 8 * g.size * jnp.finfo(g.dtype).eps * jnp.max(jnp.abs(values))
    inverse = jnp.where(values > floor, 1 / jnp.where(values > floor, values, 1), 0)

    def solve(v: jax.Array) -> jax.Array:
        return scale * (vectors @ (inverse * ((scale * v) @ vectors)))

    def measure(v: jax.Array) -> jax.Array:
        return jnp.linalg.norm(solve(v) / scale)

    status = status_where(
        [
            (~finite, Status.nonfinite),
            (values[0] < -floor, Status.indefinite),
            (values[0] <= floor, Status.singular),
        ],
        Status.converged,
    )
    return _Model(-solve(g), status, scale * vectors[:, 0], measure, floor=floor)


def _probed(method: AbstractMinimizer, problem: Problem, hessian: Flat, model: _Model, asked: Any) -> Any:
    """What is wrong with the curvature where the step led: along the weakest eigenvector, or in a Krylov space.

    That of a generic vector shows what the gradient may be blind to. A Hessian that vanishes at the minimum alone is
    still regular where the step began.
    """
    if not is_matrix_free(method):
        flat = jnp.vdot(model.direction, hessian(model.direction)) <= model.floor
        return Status.where(~failed(model.status) & flat, Status.singular, model.status), model.direction, 0
    # Signs would be blind to curvatures that cancel, as those of x² - y².
    b = jax.random.normal(jax.random.key(7), model.step.shape, model.step.dtype)
    end = truncated_cg(hessian, problem.preconditioner(hessian), b, _PROBED, problem.limit, asked=asked)
    fault = status_where([(end.negative, Status.indefinite), (end.flat, Status.singular)], model.status)
    return fault, jnp.where(end.flat, end.direction, model.direction), end.iterations


def _along(problem: Problem, u: Any, g: Any, direction: Any, asked: Any) -> tuple[jax.Array, jax.Array]:
    """Go along a direction of negative curvature as far as the objective decreases by it, where `asked`."""
    length = jnp.linalg.norm(direction)
    p = jnp.where(jnp.vdot(g, direction) > 0, -direction, direction) / jnp.where(length > 0, length, 1)
    value = problem.value(u)

    def at(t: Any, k: Any) -> tuple[Any, ...]:
        return t, problem.value(u + t * p), k

    first = jnp.maximum(jnp.linalg.norm(u), 1).astype(u.dtype)
    t, new, _ = while_loop(
        lambda c: asked & ~(c[1] < value) & (c[2] < _HALVINGS),
        lambda c: at(c[0] / 2, c[2] + 1),
        at(first, jnp.zeros((), jnp.int32)),
    )
    return u + t * p, asked & (new < value)
