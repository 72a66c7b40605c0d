"""The stabilised bi-conjugate gradient method."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint._loops import while_loop
from ._krylov import AbstractKrylov, Cycle, Flat, dot, norm, safe_quotient


class _State(NamedTuple):
    x: Inexact[Array, " N"]
    r: Inexact[Array, " N"]
    p: Inexact[Array, " N"]
    rho: Inexact[Array, ""]
    residual: Float[Array, ""]
    iterations: Int[Array, ""]
    broken: Array


class BiCGStab(AbstractKrylov):
    """Stabilised bi-conjugate gradients: for large unsymmetric operators where `GMRES` needs too many vectors.

    Nine vectors of memory, two products with A an iteration. The residual may jump up and down, and the method may
    break down; it is then restarted from the best point so far. Converged has the meaning it has for `CG`.

    Parameters
    ----------
    rtol, atol
        Tolerances, dimensionless and in the units of b. `rtol` is 1e-8 by default (1e-4 in float32).
    max_iters
        Limit on the number of iterations; ten times the number of unknowns by default.
    preconditioner
        M ≈ A⁻¹, any linear function; it stands on the right.

    Notes
    -----
    Source: van der Vorst, SIAM J. Sci. Stat. Comput. 13 (1992), doi:10.1137/0913035, the preconditioned algorithm of
    Section 4.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = jnp.array([[3.0, 2.0], [0.0, 1.0]])
    >>> x = solvers.linear_solve(A, jnp.array([5.0, 1.0]), solvers.BiCGStab()).value
    >>> [f"{float(each):.3f}" for each in x]
    ['1.000', '1.000']
    """

    progress: ClassVar[float] = 0.9

    def cycle(self, A: Flat, M: Flat | None, r: Any, target: Any, limit: Any) -> Cycle:
        """Iterate until converged or broken down."""
        shadow = r
        eps = jnp.finfo(r.dtype).eps

        def continues(s: _State) -> jax.Array:
            return (s.residual > target) & (s.iterations < limit) & ~s.broken

        def step(s: _State) -> _State:
            p_hat = s.p if M is None else M(s.p)
            v = A(p_hat)
            alpha = safe_quotient(s.rho, jnp.vdot(shadow, v))
            half = s.r - alpha * v
            h_hat = half if M is None else M(half)
            t = A(h_hat)
            omega = safe_quotient(jnp.vdot(t, half), dot(t, t).astype(t.dtype))
            x = s.x + alpha * p_hat + omega * h_hat
            r = half - omega * t
            rho = jnp.vdot(shadow, r)
            beta = safe_quotient(rho, s.rho) * safe_quotient(alpha, omega)
            p = r + beta * (s.p - omega * v)
            residual = norm(r)
            broken = (jnp.abs(rho) <= eps * norm(shadow) * residual) | (omega == 0) | (alpha == 0)
            return _State(x, r, p, rho, residual, s.iterations + 1, broken)

        size = norm(r)
        start = _State(jnp.zeros_like(r), r, r, jnp.vdot(r, r), size, jnp.zeros((), jnp.int32), jnp.array(False))
        end = while_loop(continues, step, start)
        return Cycle(end.x, end.iterations, jnp.array(False))
