"""Plain fixed-point iteration."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ._gmres import GMRES
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, all_finite, on_flat, status_where
from ._newton import noise_excused

_LARGEST_RATE = 1 - 1e-6


class _State(NamedTuple):
    u: Inexact[Array, " N"]
    F: Inexact[Array, " N"]
    rate: Float[Array, ""]
    iterations: Int[Array, ""]


class Picard(AbstractRootMethod):
    """Plain fixed-point iteration u ← u + ω (g(u) - u): for strong contractions, and as the measure of others.

    It converges if all eigenvalues of (1 - ω) I + ω g_u lie inside the unit circle, by their largest modulus at each
    step. Converged means that the estimated error, θ/(1 - θ) |ω (g(u) - u)| with the rate θ observed, is below
    `atol` + `rtol` |u|, in each entry.

    Parameters
    ----------
    rtol, atol
        Tolerances on the error, by default 1e-10 and 1e-12 (1e-5 and 1e-6 in float32).
    max_iters
        Limit on the number of evaluations.
    damping
        ω (dimensionless), 1 for none.
    linear
        The method of the derivative's solves with I - g_u.

    Notes
    -----
    Source: Hairer and Wanner, *Solving Ordinary Differential Equations II*, 2nd ed., eq. (IV.8.10),
    doi:10.1007/978-3-642-05221-7, for the estimate of the error.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> u = solvers.fixed_point(lambda u, p: jnp.cos(p * u), 1.0, 0.5, solvers.Picard(rtol=1e-4)).value
    >>> round(float(u), 3)
    0.9
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=1000, static=True)
    damping: float = 1.0
    linear: AbstractLinearMethod = GMRES()

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Iterate from `guess`, where f(u) = g(u) - u."""
        del params
        u, unravel = ravel_pytree(guess)
        F = on_flat(f, unravel, u.dtype)

        def body(s: _State) -> _State:
            u = s.u + self.damping * s.F
            value = F(u)
            rate = jnp.linalg.norm(value) / jnp.linalg.norm(s.F)
            return _State(u, value, rate, s.iterations + 1)

        start = _State(u, F(u), jnp.full((), _LARGEST_RATE, u.real.dtype), jnp.zeros((), jnp.int32))
        return iterated(self, F, body, start, unravel)


def iterated(method: Any, F: Any, body: Any, start: Any, unravel: Any) -> Outcome:
    """Run a fixed-point iteration (`Picard`, `Anderson`) until its estimated error is below the tolerance."""
    method = method.resolve(start.u.dtype)

    def error(s: Any) -> jax.Array:
        return method.weighted(method.damping * s.F, s.u) * _error_factor(s.rate)

    def idle(s: Any) -> jax.Array:
        # The residual no longer falls, being below the tolerance: no rate tells what is still to come.
        return (s.rate >= 1) & (method.weighted(s.F, s.u) <= 1)

    def continues(s: Any) -> jax.Array:
        return (error(s) > 1) & ~idle(s) & all_finite(s.F) & (s.iterations < method.max_iters)

    end = while_loop(continues, body, start)
    status = status_where(
        [(~all_finite(end.F), Status.nonfinite), (error(end) <= 1, Status.converged), (idle(end), Status.stalled)],
        Status.max_iterations,
    )
    norm = jnp.linalg.norm(end.F)
    stats = {"iterations": end.iterations, "residual": norm, "correction": error(end)}
    return Outcome(unravel(end.u), noise_excused(F, end.u, norm, status), stats)


def _error_factor(rate: jax.Array) -> jax.Array:
    """θ/(1 - θ): what is still to come, in units of the last correction; at least 1 before a rate is trusted."""
    rate = jnp.clip(rate, 0, _LARGEST_RATE)
    return jnp.maximum(rate / (1 - rate), 1)
