"""The limited-memory method of Broyden, Fletcher, Goldfarb and Shanno."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ._cg import CG
from ._krylov import safe_quotient
from ._method import AbstractLinearMethod, all_finite
from ._newton_cg import AbstractScalarMethod
from ._objective import Move, Problem

_DECREASE, _SLOPE = 0.1, 0.9  # Hager and Zhang's δ and σ
_EXPANSION = 5.0
_TRIALS = 50
_FIRST = 1e-2  # the first step, relative to the unknowns
_HANDOVER = 1e3  # in tolerances: where Newton's correction takes over from the estimate


class _Memory(NamedTuple):
    g: Float[Array, " N"]
    value: Float[Array, ""]
    d: Float[Array, " N"]  # the next direction, -H g
    steps: Float[Array, "m N"]  # newest last
    changes: Float[Array, "m N"]  # of the gradient
    inverses: Float[Array, " m"]  # 1 / ⟨s, y⟩, zero where nothing is stored yet


class _Trial(NamedTuple):
    t: Float[Array, ""]
    value: Float[Array, ""]
    g: Float[Array, " N"]
    low: Float[Array, ""]  # the bracket, with the slopes at its ends
    slope_low: Float[Array, ""]
    high: Float[Array, ""]
    slope_high: Float[Array, ""]
    trials: Int[Array, ""]
    accepted: Bool[Array, ""]


class LBFGS(AbstractScalarMethod):
    """Limited-memory BFGS: for minima with many unknowns where a product with the Hessian is dear.

    Each iteration goes along -H_k g, with the inverse Hessian estimated from the last `history` steps and changes of
    the gradient, until Wolfe's conditions hold, or the approximate ones of Hager and Zhang, which compare slopes where
    the difference of two values would be rounding: the search does not stall at the square root of the rounding unit.

    The estimate H_k may be too small in directions that were not explored, and ‖H_k g‖ is then no error estimate. So
    convergence is judged as by `NewtonCG`: once the estimated correction is below a thousand tolerances, Newton
    corrections by conjugate gradients on the Hessian take over (one or two, as a rule), and only one of them below the
    weights, at a positive definite Hessian, is convergence. If it is larger than the estimate was, the iteration goes
    on.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction: relative (dimensionless) and absolute (in the units of u). By default 1e-10
        and 1e-12, in float32 1e-5 and 1e-6.
    max_iters
        Limit on the number of iterations.
    history
        The number of steps that are remembered, 5 to 20.
    linear
        `CG(...)` with its preconditioner, for the last corrections and the derivative's solves. The preconditioner is
        the first estimate of the inverse Hessian as well: where one is known, it saves most of the iterations.

    Notes
    -----
    Memory is 2 `history` vectors and a dozen. Where products with the Hessian are cheap, `NewtonCG` needs fewer
    evaluations.

    References
    ----------
    Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", Math. Program. 45 (1989),
    doi:10.1007/BF01589116. Hager and Zhang, "A new conjugate gradient method with guaranteed descent and an efficient
    line search", SIAM J. Optim. 16 (2005), eq. (4.1) and Section 4, doi:10.1137/030601880.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def rosenbrock(u, p):
    ...     return p * (u[1] - u[0] ** 2) ** 2 + (1 - u[0]) ** 2
    >>> u = solvers.minimize(rosenbrock, jnp.array([-1.2, 1.0]), 100.0, solvers.LBFGS(rtol=1e-4)).value
    >>> [f"{float(each):.3f}" for each in u]
    ['1.000', '1.000']
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=1000, static=True)
    history: int = eqx.field(default=10, static=True)
    linear: AbstractLinearMethod = CG()
    objective: Callable[[Any, Any], Any] | None = eqx.field(default=None, kw_only=True, repr=False)

    def __check_init__(self) -> None:
        """Refuse a memory of nothing."""
        if self.history < 1:
            message = f"`history` must be at least 1, the number of steps that are remembered, got {self.history}."
            raise ValueError(message)

    def near(self) -> Any:
        """A thousand tolerances."""
        return jnp.minimum(_HANDOVER, super().near())

    def start(self, problem: Problem, u: jax.Array) -> _Memory:
        """No history."""
        value, g = problem.value(u), problem.gradient(u)
        nothing = jnp.zeros((self.history, u.size), u.dtype)
        return _directed(problem, u, _Memory(g, value, g, nothing, nothing, nothing[:, 0]))

    def advance(self, problem: Problem, u: jax.Array, memory: _Memory) -> Move:
        """One line search, and the next direction."""
        end = _line_search(problem, u, memory)
        moved = jnp.where(end.accepted, u + end.t * memory.d, u)
        new = _directed(problem, moved, _remembered(memory, moved - u, end))
        stuck = ~end.accepted | ~new.g.any()
        status = Status.where(all_finite(memory.g), Status.max_iterations, Status.nonfinite)
        return Move(moved, new, self.weighted(new.d, moved), stuck, status)

    def refreshed(self, problem: Problem, u: jax.Array, memory: _Memory) -> _Memory:
        """The history stays; the gradient and the direction are those at `u`."""
        g = problem.gradient(u)
        return _directed(problem, u, memory._replace(g=g, value=problem.value(u)))


def _remembered(memory: _Memory, s: Any, end: _Trial) -> _Memory:
    """Store a step and the change of the gradient, if their curvature is positive beyond rounding."""
    y = end.g - memory.g
    sy = jnp.vdot(s, y)
    stored = end.accepted & (sy > jnp.finfo(s.dtype).eps * jnp.vdot(y, y) ** 0.5 * jnp.vdot(s, s) ** 0.5)

    def pushed(history: Any, x: Any) -> jax.Array:
        return jnp.where(stored, jnp.roll(history, -1, axis=0).at[-1].set(x), history)

    return _Memory(
        g=jnp.where(end.accepted, end.g, memory.g),
        value=jnp.where(end.accepted, end.value, memory.value),
        d=memory.d,
        steps=pushed(memory.steps, s),
        changes=pushed(memory.changes, y),
        inverses=pushed(memory.inverses, 1 / jnp.where(stored, sy, 1)),
    )


def _directed(problem: Problem, u: Any, memory: _Memory) -> _Memory:
    """The next direction -H g, by the two-loop recursion (Nocedal and Wright, Algorithm 7.4).

    The recursion starts from a multiple of the preconditioner, by default the identity. Without a history the step is
    along the (preconditioned) gradient, of about a hundredth of the unknowns.
    """
    M = problem.preconditioner(jax.linearize(problem.gradient, u)[1]) or (lambda v: v)
    history = memory.steps, memory.changes, memory.inverses

    def back(q: Any, pair: Any) -> tuple[Any, Any]:
        s, y, rho = pair
        alpha = rho * jnp.vdot(s, q)
        return q - alpha * y, alpha

    def forth(r: Any, pair: Any) -> tuple[Any, None]:
        (s, y, rho), alpha = pair
        return r + (alpha - rho * jnp.vdot(y, r)) * s, None

    q, alphas = lax.scan(back, memory.g, history, reverse=True)
    s, y, rho = (x[-1] for x in history)
    size, steepest = (jnp.max(jnp.abs(x), initial=0.0) for x in (u, M(memory.g)))
    first = _FIRST * safe_quotient(jnp.where(size > 0, size, 1), steepest)
    scale = jnp.where(rho == 0, first, safe_quotient(jnp.vdot(s, y), jnp.vdot(y, M(y))))
    r, _ = lax.scan(forth, scale * M(q), (history, alphas))
    return memory._replace(d=-r)


def _line_search(problem: Problem, u: Any, memory: _Memory) -> _Trial:
    """Find t for Wolfe's conditions, exact or approximate, by brackets on the slope of f(u + t d)."""
    d, value = memory.d, memory.value
    slope = jnp.vdot(memory.g, d)
    allowed = value + jnp.finfo(u.dtype).eps ** 0.4 * jnp.abs(value)
    one, zero, infinite = jnp.ones_like(value), jnp.zeros_like(value), jnp.full_like(value, jnp.inf)

    def trial(t: Any, s: _Trial) -> _Trial:
        g, new = problem.gradient(u + t * d), problem.value(u + t * d)
        here = jnp.vdot(g, d)
        exact = (new <= value + _DECREASE * t * slope) & (here >= _SLOPE * slope)
        approximate = (new <= allowed) & (_SLOPE * slope <= here) & (here <= (2 * _DECREASE - 1) * slope)
        beyond = ~((here < 0) & (new <= allowed))
        uphill = jnp.where((here > 0) & jnp.isfinite(new), here, jnp.inf)  # no slope to interpolate otherwise
        return _Trial(
            t=t,
            value=new,
            g=g,
            low=jnp.where(beyond, s.low, t),
            slope_low=jnp.where(beyond, s.slope_low, here),
            high=jnp.where(beyond, t, s.high),
            slope_high=jnp.where(beyond, uphill, s.slope_high),
            trials=s.trials + 1,
            accepted=(exact | approximate) & jnp.isfinite(new) & (slope < 0),
        )

    def continues(s: _Trial) -> jax.Array:
        return ~s.accepted & (s.trials < _TRIALS) & (slope < 0)

    start = _Trial(zero, value, memory.g, zero, slope, infinite, infinite, jnp.zeros((), jnp.int32), jnp.array(False))
    return while_loop(continues, lambda s: trial(_next(s, one), s), start)


def _next(s: _Trial, first: Any) -> jax.Array:
    """The next t: the secant's root in a bracket, its middle where that is too close to an end, or further out."""
    width = s.high - s.low
    secant = s.low - s.slope_low * width / (s.slope_high - s.slope_low)
    middle = s.low + width / 2
    usable = (secant > s.low + 0.1 * width) & (secant < s.high - 0.1 * width)
    inside = jnp.where(usable, secant, middle)
    outside = jnp.where(s.trials == 0, first, _EXPANSION * s.t)
    return jnp.where(jnp.isfinite(s.high), inside, outside)
