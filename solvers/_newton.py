"""Newton's method with a line search."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status, failed
from ..adjoint._loops import while_loop
from ..adjoint._tolerance import resolve_tolerance
from ._lu import LU
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, all_finite, status_where

_SMALLEST_STEP = 1e-4
_SUFFICIENT_DECREASE = 1e-4
_CONTRACTION = 0.2


class _State(NamedTuple):
    u: Inexact[Array, " N"]
    F: Inexact[Array, " N"]
    correction: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Status
    running: Array


class Newton(AbstractRootMethod):
    """Newton's method with a backtracking line search: the first choice for F(u) = 0.

    Each iteration solves F_u d = -F and moves u ← u + λ d, with λ halved from 1 until ‖F‖₂ decreases
    sufficiently. Converged means that the correction is below the weights,
    max |dᵢ| / (`atol` + `rtol` |uᵢ|) ≤ 1, and that the residual fell with it by a factor of five or is at its rounding
    noise. So a stationary point, a pole, a jump or a double root (where no derivative exists) is never a success.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction: relative (dimensionless) and absolute (in the units of u). By default 1e-10
        and 1e-12, in float32 1e-5 and 1e-6. The last correction is applied, so that the error of the value
        returned is of the order of its square.
    max_iters
        Limit on the number of iterations.
    linear
        How to solve for the correction. The derivative's solves use the same method.

    References
    ----------
    Kelley, *Solving Nonlinear Equations with Newton's Method*, SIAM 2003, Section 1.6,
    doi:10.1137/1.9780898718898. Deuflhard, *Newton Methods for Nonlinear Problems*, Springer 2011, Section 2.1,
    doi:10.1007/978-3-642-23899-4, for convergence in the correction.
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=50, static=True)
    linear: AbstractLinearMethod = LU()

    def resolve(self, dtype: jnp.dtype) -> "Newton":
        """Fill in the default tolerances, or refuse ones out of the dtype's reach."""
        rtol = resolve_tolerance("rtol", self.rtol, 1e-10, dtype)
        atol = resolve_tolerance("atol", self.atol, 1e-12, dtype, reachable=False)
        return Newton(rtol=rtol, atol=atol, max_iters=self.max_iters, linear=self.linear.resolve(dtype))

    def solve(self, f: Callable[[Any], Any], guess: Any) -> Outcome:
        """Iterate from `guess`."""
        u, unravel = ravel_pytree(guess)

        def F(u: jax.Array) -> jax.Array:
            return ravel_pytree(f(unravel(u)))[0].astype(u.dtype)

        method = self.resolve(u.dtype)
        zero = jnp.zeros((), jnp.int32)
        infinite = jnp.asarray(jnp.inf, u.real.dtype)
        start = _State(u, F(u), infinite, zero, Status.max_iterations, jnp.array(True))
        end = while_loop(
            lambda s: s.running & (s.iterations < self.max_iters), lambda s: _iteration(method, F, s), start
        )
        norm = jnp.linalg.norm(end.F)
        stats = {"iterations": end.iterations, "residual": norm, "correction": end.correction}
        return Outcome(unravel(end.u), end.status, stats)


def _iteration(method: Newton, F: Callable[[jax.Array], jax.Array], s: _State) -> _State:
    jacobian = jax.linearize(F, s.u)[1]
    outcome = method.linear.solve(jacobian, -s.F, s.F)
    d = outcome.value
    assert method.atol is not None and method.rtol is not None  # noqa: PT018 (`resolve` has set them)
    weighted = jnp.abs(d) / (method.atol + method.rtol * jnp.abs(s.u))
    # 0 / 0 where both tolerance and correction vanish: no correction means converged.
    correction = jnp.max(jnp.where(d == 0, 0, weighted), initial=0.0)
    close = correction <= 1
    u, F_new, descended = _line_search(F, s, d, close)
    finite = all_finite(F_new) & all_finite(u)
    stopped = status_where(
        [
            (~all_finite(s.F), Status.nonfinite),
            (failed(outcome.status), outcome.status),
            (~finite, Status.nonfinite),
            (close & _contracted(F, s.F, u, F_new), Status.converged),
            (~close & ~descended, Status.stalled),
        ],
        Status.max_iterations,
    )
    running = stopped == Status.max_iterations
    keep = failed(stopped) & ~running  # a failure leaves the last good point
    u, F_new = jnp.where(keep, s.u, u), jnp.where(keep, s.F, F_new)
    return _State(u, F_new, correction, s.iterations + 1, stopped, running)


def _contracted(F: Callable[..., Any], F_old: jax.Array, u: jax.Array, F_new: jax.Array) -> jax.Array:
    """Whether the last step acted as Newton's does near a simple root, or F is at its rounding noise.

    A small correction alone is no proof: at a pole or a jump it is small as well, and at a double root, where no
    derivative exists, the residual falls by a quarter only.
    """
    new = jnp.linalg.norm(F_new)
    nudge = u * (1 + 4 * jnp.finfo(u.dtype).eps)
    noise = jnp.linalg.norm(F(nudge) - F_new)
    return (new <= _CONTRACTION * jnp.linalg.norm(F_old)) | (new <= 10 * noise)


def _line_search(F: Callable[..., Any], s: _State, d: jax.Array, close: jax.Array) -> tuple[Any, Any, Any]:
    """Halve λ until ‖F(u + λ d)‖ ≤ (1 - c λ) ‖F(u)‖ (Kelley's eq. 1.21); take the full step near the root."""
    norm = jnp.linalg.norm(s.F)

    def descends(step: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.linalg.norm(value) <= (1 - _SUFFICIENT_DECREASE * step) * norm

    def continues(c: tuple[Any, Any, Any]) -> jax.Array:
        step, _, value = c
        return ~(close | descends(step, value)) & (step > _SMALLEST_STEP)

    def halve(c: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        step = c[0] / 2
        u = s.u + step * d
        return step, u, F(u)

    u = s.u + d
    one = jnp.ones((), s.u.real.dtype)
    step, u, value = while_loop(continues, halve, (one, u, F(u)))
    return u, value, close | descends(step, value)
