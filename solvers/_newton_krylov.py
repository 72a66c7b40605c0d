"""Newton's method with a Krylov solver inside, no more exact than it must be."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status, failed
from ..adjoint._loops import while_loop
from ._gmres import GMRES
from ._krylov import AbstractKrylov, safe_quotient
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, on_flat, solve_flat, status_where
from ._newton import line_search, noise_excused

_GAMMA = 0.9
_LARGEST_FORCING = 0.9
_TRUSTED_FORCING = 0.1  # a correction from a looser solve says nothing about convergence
_CONTRACTION = 0.3


class _State(NamedTuple):
    u: Inexact[Array, " N"]
    norm: Float[Array, ""]
    forcing: Float[Array, ""]
    correction: Float[Array, ""]
    iterations: Int[Array, ""]
    linear_iterations: Int[Array, ""]
    status: Status


class NewtonKrylov(AbstractRootMethod):
    """Newton's method with inexact, matrix-free corrections: the choice for large systems.

    Each iteration solves F_u d = -F by a Krylov method, to ‖F + F_u d‖ ≤ η ‖F‖. The forcing term η is that of
    Eisenstat and Walker, 0.9 (‖F_k‖/‖F_k-1‖)², with their safeguard: loose far from the root, tight near it, and never
    tighter than the tolerance asks for. A backtracking line search follows. Nothing of N² numbers is ever built, in the
    derivative neither.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction, as for `Newton`.
    max_iters
        Limit on the number of Newton iterations.
    linear
        The Krylov method with its preconditioner: `CG(...)` where F_u is symmetric positive definite, else `GMRES(...)`
        or `BiCGStab(...)`. Its `rtol` is that of the derivative's solves, which are at least as tight as the root.
    forcing
        The first η.

    References
    ----------
    Eisenstat and Walker, "Choosing the forcing terms in an inexact Newton method", SIAM J. Sci. Comput. 17 (1996),
    Choice 2, doi:10.1137/0917003.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def bratu(u, strength):
    ...     v = jnp.pad(u, 1)
    ...     return 2 * u - v[2:] - v[:-2] - strength * jnp.exp(u) / 51**2
    >>> method = solvers.NewtonKrylov(rtol=1e-3, linear=solvers.CG())
    >>> u = solvers.root_find(bratu, jnp.zeros(50), 1.0, method).value
    >>> round(float(jnp.max(u)), 2)
    0.14
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=50, static=True)
    linear: AbstractLinearMethod = GMRES()
    forcing: float = 0.3

    def __check_init__(self) -> None:
        """Refuse a method that knows no tolerance."""
        if not isinstance(self.linear, AbstractKrylov):
            message = (
                f"`linear` must be a Krylov method such as solvers.GMRES() or solvers.CG(), got {self.linear!r}. For "
                "direct methods use solvers.Newton(linear=...)."
            )
            raise TypeError(message)

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Iterate from `guess`."""
        del params
        u, unravel = ravel_pytree(guess)
        F = on_flat(f, unravel, u.dtype)
        method = self.resolve(u.dtype)
        one, zero = jnp.ones((), u.real.dtype), jnp.zeros((), jnp.int32)
        start = _State(u, jnp.linalg.norm(F(u)), self.forcing * one, jnp.inf * one, zero, zero, Status.max_iterations)
        end = while_loop(
            lambda s: (s.status == Status.max_iterations) & (s.iterations < self.max_iters),
            lambda s: _iteration(method, F, s, unravel),
            start,
        )
        status = noise_excused(F, end.u, end.norm, end.status, end.correction <= 1)
        stats = {
            "iterations": end.iterations,
            "residual": end.norm,
            "correction": end.correction,
            "linear_iterations": end.linear_iterations,
        }
        return Outcome(unravel(end.u), status, stats)


def _iteration(method: NewtonKrylov, F: Callable[[Any], Any], s: _State, unravel: Callable[[Any], Any]) -> _State:
    value, jacobian = jax.linearize(F, s.u)
    linear = dataclasses.replace(method.linear, rtol=s.forcing, atol=0.0)
    outcome = solve_flat(linear, jacobian, -value, unravel)
    d = outcome.value
    reached = safe_quotient(outcome.stats["residual"], s.norm)
    useful = ~failed(outcome.status) | (reached < _LARGEST_FORCING)
    correction = method.weighted(d, s.u)
    close = (correction <= 1) & (reached <= _TRUSTED_FORCING)
    u, _, norm, descended = line_search(F, s.u, s.norm, d, close)
    done = close & (norm <= _CONTRACTION * s.norm)
    status = status_where(
        [
            (~jnp.isfinite(s.norm), Status.nonfinite),
            (~useful, outcome.status),
            (done, Status.converged),
            (~descended & ~jnp.isfinite(norm), Status.nonfinite),
            (~descended, Status.stalled),
        ],
        Status.max_iterations,
    )
    moved = useful & (descended | done)
    return _State(
        u=jnp.where(moved, u, s.u),
        norm=jnp.where(moved, norm, s.norm),
        forcing=_next_forcing(s, norm, correction),
        correction=correction,
        iterations=s.iterations + 1,
        linear_iterations=s.linear_iterations + outcome.stats["iterations"],
        status=status,
    )


def _next_forcing(s: _State, norm: jax.Array, correction: jax.Array) -> jax.Array:
    """Choice 2 of Eisenstat and Walker with their safeguard, no tighter than the tolerance asks at the next step."""
    ratio = safe_quotient(norm, s.norm)
    forcing = _GAMMA * ratio**2
    kept = _GAMMA * s.forcing**2
    forcing = jnp.where(kept > 0.1, jnp.maximum(forcing, kept), forcing)
    enough = 0.5 / jnp.maximum(correction * ratio, 1)
    forcing = jnp.maximum(forcing, jnp.minimum(enough, _TRUSTED_FORCING))
    return jnp.where(correction <= 1, _TRUSTED_FORCING, jnp.minimum(forcing, _LARGEST_FORCING))
