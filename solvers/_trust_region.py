"""Powell's dogleg: Newton's method within a trust region."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..adjoint import Status, failed
from ..adjoint._loops import while_loop
from ._dense import as_real
from ._krylov import safe_quotient
from ._lu import LU
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, all_finite, status_where
from ._newton import noise_excused

_ACCEPTED, _POOR, _GOOD = 1e-4, 0.25, 0.75
_CONTRACTION = 0.2  # Newton's near a simple root; near a double or triple one it is 0.25 or 0.3, near a pole 0.5
_CONTRACTION_AT_ANY_ROOT = 0.3
_FIRST_RADIUS = 100.0  # times the norm of the guess, as in MINPACK


class _State(NamedTuple):
    u: Float[Array, " N"]
    norm: Float[Array, ""]
    radius: Float[Array, ""]
    correction: Float[Array, ""]
    contraction: Float[Array, ""]  # by which the residual fell last
    before: Float[Array, ""]  # and in the step before, since the last one may end in rounding noise
    iterations: Int[Array, ""]
    status: Status


class TrustRegion(AbstractRootMethod):
    """Powell's dogleg method: for bad starts, and for Jacobians that are singular on the way.

    Within a radius Δ, the step goes along the path from the steepest descent of ½‖F‖² to Newton's step; Δ grows and
    shrinks as the linear model is trusted. Where F_u is singular, a regularised least-squares step takes the place of
    Newton's: a double root is found, at a linear rate, and is marked as having no derivative. A stationary point of ‖F‖
    that is no root is `Status.stalled`.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction, as for `Newton`.
    max_iters
        Limit on the number of steps tried.
    linear
        How to solve for Newton's step, and in the derivative.

    Notes
    -----
    The region is a ball in the unknowns as they are: bring them to like sizes. Source: Nocedal and Wright, *Numerical
    Optimization*, 2nd ed., Algorithms 11.5 and 11.6, doi:10.1007/978-0-387-40065-5.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def residual(y, p):
    ...     return jnp.stack([(y[0] - 1) * (y[1] + 3), y[1] - p * y[0]])
    >>> y = solvers.root_find(residual, jnp.array([9.0, -3.0]), 2.0, solvers.TrustRegion(rtol=1e-4)).value
    >>> [f"{float(each):.3f}" for each in y]
    ['-1.500', '-3.000']
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=200, static=True)
    linear: AbstractLinearMethod = LU()

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Iterate from `guess`."""
        del params
        u, unravel = as_real(guess)

        def F(u: jax.Array) -> jax.Array:
            return as_real(f(unravel(u)))[0].astype(u.dtype)

        method = self.resolve(u.dtype)
        one, size = jnp.ones((), u.dtype), jnp.linalg.norm(u)
        radius = _FIRST_RADIUS * jnp.where(size > 0, size, 1)
        start = _State(
            u, jnp.linalg.norm(F(u)), radius, jnp.inf * one, 0 * one, 0 * one, jnp.int32(0), Status.max_iterations
        )
        end = while_loop(
            lambda s: (s.status == Status.max_iterations) & (s.iterations < self.max_iters),
            lambda s: _step(method, F, s),
            start,
        )
        status = noise_excused(F, end.u, end.norm, end.status)
        stats = {"iterations": end.iterations, "residual": end.norm, "correction": end.correction}
        regular = jnp.minimum(end.contraction, end.before) <= _CONTRACTION
        return Outcome(unravel(end.u), status, stats, regular)


def _step(method: TrustRegion, F: Callable[[Any], Any], s: _State) -> _State:
    value, jacobian = jax.linearize(F, s.u)
    gradient = jax.linear_transpose(jacobian, s.u)(value)[0]
    newton, solved = _newton_step(method, jacobian, value, gradient)
    p = _dogleg(jacobian, gradient, newton, s.radius)
    u = s.u + p
    norm = jnp.linalg.norm(F(u))
    predicted = s.norm**2 - jnp.linalg.norm(value + jacobian(p)) ** 2
    ratio = jnp.where(predicted > 0, (s.norm**2 - norm**2) / jnp.where(predicted > 0, predicted, 1), -1)
    ratio = jnp.where(jnp.isfinite(norm), ratio, -1)
    length = jnp.linalg.norm(p)
    at_edge = length > 0.99 * s.radius
    radius = jnp.where(ratio < _POOR, length / 4, jnp.where((ratio > _GOOD) & at_edge, 2 * s.radius, s.radius))
    correction = jnp.where(solved, method.weighted(newton, s.u), jnp.inf)
    moves = (ratio > _ACCEPTED) | (norm == 0)
    small = method.weighted(p, s.u) <= 1
    status = status_where(
        [
            (~all_finite(value), Status.nonfinite),
            (moves & (norm == 0), Status.converged),
            (moves & (correction <= 1) & (norm <= _CONTRACTION_AT_ANY_ROOT * s.norm), Status.converged),
            (s.norm == 0, Status.converged),
            (~moves & small, Status.stalled),
        ],
        Status.max_iterations,
    )
    return _State(
        u=jnp.where(moves, u, s.u),
        norm=jnp.where(moves, norm, s.norm),
        radius=radius,
        correction=correction,
        contraction=jnp.where(moves, safe_quotient(norm, s.norm), s.contraction),
        before=jnp.where(moves, s.contraction, s.before),
        iterations=s.iterations + 1,
        status=status,
    )


def _newton_step(method: TrustRegion, jacobian: Any, value: Any, gradient: Any) -> tuple[jax.Array, jax.Array]:
    """Newton's step, or where the Jacobian is singular a regularised one; and whether it is Newton's."""
    outcome = method.linear.solve(jacobian, -value, value)
    solved = ~failed(outcome.status)
    size = jnp.linalg.norm(jacobian(gradient)) / jnp.where(gradient.any(), jnp.linalg.norm(gradient), 1)
    shift = jnp.finfo(value.dtype).eps ** 0.5 * size**2

    def normal(v: jax.Array) -> jax.Array:
        return jax.linear_transpose(jacobian, v)(jacobian(v))[0] + shift * v

    def regularised() -> jax.Array:
        return LU().solve(normal, -gradient, gradient).value

    return jax.lax.cond(solved, lambda: outcome.value, regularised), solved


def _dogleg(jacobian: Any, gradient: Any, newton: Any, radius: Any) -> jax.Array:
    """The path from the origin by the Cauchy point to Newton's step, where it leaves the region (N&W, eq. 4.16)."""
    along = jacobian(gradient)
    curvature = jnp.vdot(along, along)
    cauchy = -safe_quotient(jnp.vdot(gradient, gradient), curvature) * gradient
    far = jnp.linalg.norm(cauchy)
    edge = cauchy * (radius / jnp.where(far > 0, far, 1))
    leg = newton - cauchy
    a, b, c = jnp.vdot(leg, leg), jnp.vdot(cauchy, leg), far**2 - radius**2
    root = jnp.sqrt(jnp.maximum(b**2 - a * c, 0))
    tau = jnp.where(a > 0, safe_quotient(-c, b + root), 0)  # the stable form of (-b + root) / a
    between = cauchy + jnp.clip(tau, 0, 1) * leg
    usable = all_finite(newton)
    steepest = jnp.where(far > radius, edge, cauchy)
    bent = jnp.where(usable & (far < radius), between, steepest)
    return jnp.where(usable & (jnp.linalg.norm(newton) <= radius), newton, bent)
