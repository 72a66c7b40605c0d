"""Conjugate gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ..adjoint._tolerance import resolve_tolerance
from ._method import AbstractLinearMethod, Outcome, all_finite, status_where

# A restart from the true residual gains what rounding allows; a third one gains nothing.
_RESTARTS = 3


class _State(NamedTuple):
    x: Inexact[Array, " N"]
    r: Inexact[Array, " N"]
    p: Inexact[Array, " N"]
    gamma: Float[Array, ""]
    iterations: Int[Array, ""]
    restarts: Int[Array, ""]
    indefinite: Array


class CG(AbstractLinearMethod):
    """Conjugate gradients: the choice for large symmetric (Hermitian) positive definite operators.

    Matrix-free in memory (four vectors) and, through the node, in its derivative: the adjoint solve is conjugate
    gradients on the transposed operator.

    Converged means ‖b - A x‖₂ ≤ `atol` + `rtol` ‖b‖₂ for the *true* residual, computed anew at the end. The
    recursive residual that the iteration carries drifts from it, in float32 by orders of magnitude: where it
    does, the iteration is restarted from the true one, and `Status.stalled` tells when that no longer helps.

    Parameters
    ----------
    rtol, atol
        Tolerances, dimensionless and in the units of b. `rtol` is 1e-8 by default (1e-4 in float32).
    max_iters
        Limit on the number of iterations; ten times the number of unknowns by default.

    Notes
    -----
    An operator that is not symmetric positive definite is caught by non-positive curvature
    (`Status.indefinite`) or by the true residual, not beforehand.

    Source: Saad, *Iterative Methods for Sparse Linear Systems*, 2nd ed., Algorithm 6.18,
    doi:10.1137/1.9780898718003; the numbers in the code are its steps.
    """

    rtol: float | None = None
    atol: float = 0.0
    max_iters: int | None = eqx.field(default=None, static=True)

    def resolve(self, dtype: jnp.dtype) -> "CG":
        """Fill in the default tolerance, or refuse one out of the dtype's reach."""
        atol = resolve_tolerance("atol", self.atol, 0.0, dtype, reachable=False)
        return CG(resolve_tolerance("rtol", self.rtol, 1e-8, dtype), atol, self.max_iters)

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Iterate from zero."""
        flat, unravel = ravel_pytree(b)
        limit = 10 * flat.size if self.max_iters is None else self.max_iters

        def A(v: jax.Array) -> jax.Array:
            return ravel_pytree(matvec(unravel(v)))[0].astype(flat.dtype)

        rtol = resolve_tolerance("rtol", self.rtol, 1e-8, flat.dtype)
        # Squared norms of a right-hand side near the ends of the number range would vanish or overflow.
        size = jnp.max(jnp.abs(flat), initial=0.0)
        size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
        target = (self.atol / size) + rtol * jnp.linalg.norm(ravel_pytree(reference)[0] / size)
        state = _iterate(A, flat / size, target, limit)
        residual = jnp.sqrt(state.gamma)
        status = status_where(
            [
                (~(jnp.isfinite(residual) & all_finite(flat)), Status.nonfinite),
                (residual <= target, Status.converged),
                (state.indefinite, Status.indefinite),
                (state.iterations >= limit, Status.max_iterations),
            ],
            Status.stalled,
        )
        return Outcome(unravel(size * state.x), status, {"iterations": state.iterations, "residual": size * residual})


def _iterate(A: Callable[[Any], Any], b: Any, target: jax.Array, limit: int) -> _State:
    def continues(s: _State) -> jax.Array:
        above = jnp.sqrt(s.gamma) > target
        return above & (s.iterations < limit) & (s.restarts < _RESTARTS) & ~s.indefinite

    def restart(s: _State) -> _State:
        r = b - A(s.x)
        return s._replace(r=r, p=r, gamma=_dot(r, r), restarts=s.restarts + 1)

    def body(s: _State) -> _State:
        s = while_loop(continues, lambda s: _step(A, s), s)
        return restart(s)

    zero = jnp.zeros((), jnp.int32)
    start = _State(jnp.zeros_like(b), b, b, _dot(b, b), zero, zero, jnp.array(False))
    return while_loop(continues, body, start)


def _step(A: Callable[[Any], Any], s: _State) -> _State:
    q = A(s.p)
    curvature = _dot(s.p, q)
    good = curvature > 0
    alpha = jnp.where(good, s.gamma / jnp.where(good, curvature, 1), 0)  # 3
    x = s.x + alpha * s.p  # 4
    r = s.r - alpha * q  # 5
    gamma = _dot(r, r)
    p = r + (gamma / s.gamma) * s.p  # 6, 7
    return _State(x, r, p, gamma, s.iterations + 1, s.restarts, ~good)


def _dot(a: Any, b: Any) -> jax.Array:
    return jnp.vdot(a, b).real
