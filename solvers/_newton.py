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
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, all_finite, solve_flat, status_where
from ._user_matrix import products

SMALLEST_STEP = 1e-4
SUFFICIENT_DECREASE = 1e-4
_CONTRACTION = 0.2
_NOISE = 10
Flat = Callable[[Any], Any]


class _State(NamedTuple):
    u: Inexact[Array, " N"]  # the last point that was accepted
    norm: Float[Array, ""]  # of the residual there
    d: Inexact[Array, " N"]  # the next point to look at is u + λ d
    step: Float[Array, ""]  # λ
    correction: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Status
    running: Array


class Newton(AbstractRootMethod):
    """Newton's method with a backtracking line search: the first choice for F(u) = 0.

    Each iteration solves F_u d = -F and moves u ← u + λ d, with λ halved from 1 until ‖F‖₂ decreases
    sufficiently. Converged means that the correction is below the weights,
    max |dᵢ| / (`atol` + `rtol` |uᵢ|) ≤ 1, and that the residual, evaluated at the point that is returned, fell with
    it by a factor of five or is at its rounding noise. So a stationary point, a pole, a jump or a double root (where
    no derivative exists) is never a success.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction: relative (dimensionless) and absolute (in the units of u). By default 1e-10
        and 1e-12, in float32 1e-5 and 1e-6. The last correction is applied, so that the error of the value
        returned is of the order of its square.
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
    doi:10.1007/978-3-642-23899-4, for convergence in the correction.

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

        def F(u: jax.Array) -> jax.Array:
            return ravel_pytree(f(unravel(u)))[0].astype(u.dtype)

        method = self.resolve(u.dtype)

        def linearise(u: jax.Array) -> tuple[Any, Any]:
            given = self.jacobian
            return jax.linearize(F, u) if given is None else (F(u), products(given, u, params))

        one, zero = jnp.ones((), u.real.dtype), jnp.zeros((), jnp.int32)
        infinite = jnp.inf * one
        start = _State(u, infinite, jnp.zeros_like(u), one, infinite, zero, Status.max_iterations, jnp.array(True))
        # The pass after the last iteration looks at the point that it reached.
        end = while_loop(lambda s: s.running, lambda s: _pass(method, linearise, s, unravel), start)
        noisy = (end.status == Status.stalled) & (end.correction <= 1) & at_noise(F, end.u, end.norm)
        stats = {"iterations": end.iterations, "residual": end.norm, "correction": end.correction}
        return Outcome(unravel(end.u), Status.where(noisy, Status.converged, end.status), stats)


def _pass(method: Newton, linearise: Callable[[Any], Any], s: _State, unravel: Callable[[Any], Any]) -> _State:
    """Look at u + λ d; go on from there, or halve λ."""
    u = s.u + s.step * s.d
    F, jacobian = linearise(u)
    norm = jnp.linalg.norm(F)
    first, close = jnp.isinf(s.correction), s.correction <= 1
    descends = first | (norm <= (1 - SUFFICIENT_DECREASE * s.step) * s.norm)  # Kelley's eq. 1.21
    done = close & ~first & (norm <= _CONTRACTION * s.norm)
    out_of_iterations = s.iterations >= method.max_iters
    moves = descends & ~done & ~out_of_iterations

    def forward() -> tuple[Any, ...]:
        outcome = solve_flat(method.linear, jacobian, -F, unravel)
        status = status_where([(~all_finite(F), Status.nonfinite)], outcome.status)
        return vary_together((outcome.value, status, s.d, F))[:2]

    def stay() -> tuple[Any, ...]:
        return vary_together((s.d, Status.converged, F))[:2]

    d, solved = lax.cond(moves, forward, stay)
    correction = jnp.where(moves, method.weighted(d, u), s.correction)
    halved = s.step / 2
    stuck = ~descends & (close | (halved < SMALLEST_STEP))
    status = status_where(
        [
            (done, Status.converged),
            (moves & failed(solved), solved),
            (stuck & ~jnp.isfinite(norm), Status.nonfinite),
            (stuck, Status.stalled),
        ],
        Status.max_iterations,
    )
    arrived = descends | done
    running = (status == Status.max_iterations) & ~(arrived & out_of_iterations)
    return _State(
        u=jnp.where(arrived, u, s.u),
        norm=jnp.where(arrived, norm, s.norm),
        d=d,
        step=jnp.where(arrived, 1, halved),
        correction=correction,
        iterations=s.iterations + (moves & ~failed(solved)),
        status=status,
        running=running,
    )


def at_noise(F: Flat, u: Any, norm: Any) -> jax.Array:
    """Whether ‖F(u)‖ is what rounding u would change it by.

    A small correction alone is no proof: at a pole or a jump it is small as well, and at a double root, where no
    derivative exists, the residual falls by a quarter only.
    """
    noise = jnp.linalg.norm(F(u * (1 + 4 * jnp.finfo(u.dtype).eps)) - F(u))
    return norm <= _NOISE * noise
