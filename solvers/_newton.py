"""Newton's method with a line search."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status, failed
from ..adjoint._loops import vary_together, while_loop
from ._lu import LU
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, on_flat, solve_flat, status_where
from ._user_matrix import products

_SMALLEST_STEP = 1e-4
_SUFFICIENT_DECREASE = 1e-4
_CONTRACTION = 0.2
_IDLE = 0.5  # a second small correction that leaves more of the residual has come to its noise
_NOISE = 10
_FORESEEN = 0.1  # the rate of the last two steps from which the error is foreseen
Flat = Callable[[Any], Any]


class _State(NamedTuple):
    u: Inexact[Array, " N"]
    F: Inexact[Array, " N"]
    correction: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Status


class Newton(AbstractRootMethod):
    """Newton's method with a backtracking line search: the first choice for F(u) = 0.

    Each iteration solves F_u d = -F and moves u ← u + λ d, with λ halved from 1 until ‖F‖₂ decreases
    sufficiently. Converged means that the correction, or the error that the rate of the last two foretells, is below
    the weights, max |dᵢ| / (`atol` + `rtol` |uᵢ|) ≤ 1, and that the residual, evaluated at the point that is returned,
    fell with it by a factor of five or is at its rounding noise. So a stationary point, a pole, a jump or a double
    root (where no derivative exists) is never a success.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction: relative (dimensionless) and absolute (in the units of u). By default 1e-10
        and 1e-12, in float32 1e-5 and 1e-6. The last correction is applied, so that the error of the value
        returned is smaller still.
    max_iters
        Limit on the number of iterations.
    linear
        How to solve for the correction: `LU()`, `SparseLU()` for a Jacobian that is sparse (found and coloured by
        itself), `Tridiagonal()`, `Banded(...)`. The derivative's solves use the same method, at least as tight.
    jacobian
        A function `jacobian(u, params)` that returns the matrix F_u, dense (N, N) or `BCOO`, for a flat u of N
        unknowns, where you know it better than JAX does. It steers the iteration alone: a wrong one costs iterations,
        and the derivative is that of the residual all the same.

    Notes
    -----
    For large systems `NewtonKrylov` solves for the correction no more tightly than it must. Where a Jacobian may be
    singular on the way, use `TrustRegion`.

    References
    ----------
    Kelley, *Solving Nonlinear Equations with Newton's Method*, SIAM 2003, Section 1.6,
    doi:10.1137/1.9780898718898. Deuflhard, *Newton Methods for Nonlinear Problems*, Springer 2011, Section 2.1,
    doi:10.1007/978-3-642-23899-4, for convergence in the correction. Hairer and Wanner, *Solving Ordinary Differential
    Equations II*, 2nd ed., eq. (IV.8.10), doi:10.1007/978-3-642-05221-7, for the error that is foretold.

    Examples
    --------
    >>> from tapeless import solvers
    >>> solution = solvers.root_find(lambda u, p: u**3 - p, 1.0, 8.0, solvers.Newton(rtol=1e-5))
    >>> round(float(solution.value), 4)
    2.0
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=50, static=True)
    linear: AbstractLinearMethod = LU()
    jacobian: Callable[..., Any] | None = None

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Iterate from `guess`."""
        u, unravel = ravel_pytree(guess)
        F = on_flat(f, unravel, u.dtype)

        def jacobian(u: jax.Array) -> Callable[[Any], Any]:
            given = self.jacobian
            return jax.linearize(F, u)[1] if given is None else products(given, u, params)

        method, value = self.resolve(u.dtype), F(u)
        infinite, zero = jnp.full((), jnp.inf, u.real.dtype), jnp.zeros((), jnp.int32)
        end = while_loop(
            lambda s: (s.status == Status.max_iterations) & (s.iterations < self.max_iters),
            lambda s: _iteration(method, F, (jacobian, unravel), s),
            _State(u, value, infinite, zero, Status.max_iterations),
        )
        norm = jnp.linalg.norm(end.F)
        status = noise_excused(F, end.u, norm, end.status, end.correction <= 1)
        stats = {"iterations": end.iterations, "residual": norm, "correction": end.correction}
        return Outcome(unravel(end.u), status, stats)


def _iteration(method: Newton, F: Flat, system: tuple[Any, Any], s: _State) -> _State:
    jacobian, unravel = system
    outcome = solve_flat(method.linear.for_iteration(), jacobian(s.u), -s.F, unravel)
    d = outcome.value
    correction = method.weighted(d, s.u)
    close = correction <= 1
    old = jnp.linalg.norm(s.F)
    u, value, norm, descended = line_search(F, s.u, old, d, close)
    # Steps that shrink by θ leave an error of θ/(1 - θ) of the last one, and less where they shrink ever faster.
    theta = correction / s.correction
    foreseen = jnp.isfinite(s.correction) & (theta <= _FORESEEN) & (theta * correction <= 1 - theta)
    done = (close | foreseen) & (norm <= _CONTRACTION * old)
    twice = close & (s.correction <= 1) & (norm > _IDLE * old)
    status = status_where(
        [
            (~jnp.isfinite(old), Status.nonfinite),
            (failed(outcome.status), outcome.status),
            (done, Status.converged),
            (~descended & ~jnp.isfinite(norm), Status.nonfinite),
            (~descended | twice, Status.stalled),
        ],
        Status.max_iterations,
    )
    moved = (status == Status.max_iterations) | (status == Status.converged)  # a failure leaves the last good point
    u, value = jnp.where(moved, u, s.u), jnp.where(moved, value, s.F)
    return _State(u, value, correction, s.iterations + 1, status)


def line_search(F: Flat, u: Any, norm: Any, d: Any, close: Any) -> tuple[Any, Any, Any, Any]:
    """Halve λ until ‖F(u + λ d)‖ ≤ (1 - c λ) ‖F(u)‖ (Kelley's eq. 1.21), or take the full step where it is `close`.

    Return the point, its residual and norm, and whether that is less.
    """

    def descends(step: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.linalg.norm(value) <= (1 - _SUFFICIENT_DECREASE * step) * norm

    def continues(c: tuple[Any, ...]) -> jax.Array:
        return ~(close | descends(c[0], c[2])) & (c[0] > _SMALLEST_STEP)

    def at(step: Any) -> tuple[Any, ...]:
        # No norm among what is carried: under vmap the compiler would evaluate F once more for it.
        return step, u + step * d, F(u + step * d)

    step, u, value = while_loop(continues, lambda c: at(c[0] / 2), at(jnp.ones_like(norm)))
    return u, value, jnp.linalg.norm(value), descends(step, value)


def noise_excused(F: Flat, u: Any, norm: Any, status: Status, small: Any = True) -> Status:
    """Converged where an iteration stopped, its correction being `small`, since ‖F‖ is at its rounding noise."""
    doubtful = (status == Status.stalled) & small
    no = vary_together((doubtful, u))[0]
    noisy = lax.cond(doubtful, lambda: vary_together((at_noise(F, u, norm), u))[0], lambda: no)
    return Status.where(doubtful & noisy, Status.converged, status)


def at_noise(F: Flat, u: Any, norm: Any) -> jax.Array:
    """Whether ‖F(u)‖ is what rounding u would change it by.

    A small correction alone is no proof: at a pole or a jump it is small as well, and at a double root, where no
    derivative exists, the residual falls by a quarter only.
    """
    noise = jnp.linalg.norm(F(u * (1 + 4 * jnp.finfo(u.dtype).eps)) - F(u))
    return norm <= _NOISE * noise
