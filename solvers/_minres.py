"""The minimal residual method."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ._krylov import AbstractKrylov, Cycle, Flat, dot, norm, safe_quotient


class _State(NamedTuple):
    x: Inexact[Array, " N"]
    v: Inexact[Array, "2 N"]  # the last two Lanczos vectors
    z: Inexact[Array, " N"]
    w: Inexact[Array, "2 N"]  # the last two search directions
    gamma: Float[Array, "2"]
    eta: Float[Array, ""]
    s: Float[Array, "2"]
    c: Float[Array, "2"]
    iterations: Int[Array, ""]
    broken: Array


class MINRES(AbstractKrylov):
    """Minimal residuals: the choice for large symmetric (Hermitian) operators that are indefinite.

    Saddle points (Stokes, constraints) and shifted operators (A - σ I). Eight vectors of memory. Where A is positive
    definite, `CG` takes as many iterations with less work in each. Converged has the meaning it has for `CG`.

    Parameters
    ----------
    rtol, atol
        Tolerances, dimensionless and in the units of b. `rtol` is 1e-8 by default (1e-4 in float32).
    max_iters
        Limit on the number of iterations; ten times the number of unknowns by default.
    preconditioner
        M, symmetric positive definite (even if A is not).

    Notes
    -----
    Source: Paige and Saunders, SIAM J. Numer. Anal. 12 (1975), doi:10.1137/0712047, with the preconditioner of Elman,
    Silvester and Wathen, *Finite Elements and Fast Iterative Solvers*, 2nd ed., Algorithm 4.1,
    doi:10.1093/acprof:oso/9780199678792.001.0001.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = jnp.array([[1.0, 2.0], [2.0, -1.0]])
    >>> x = solvers.linear_solve(A, jnp.array([3.0, 1.0]), solvers.MINRES()).value
    >>> [f"{float(each):.3f}" for each in x]
    ['1.000', '1.000']
    """

    symmetric: ClassVar[bool] = True
    breakdown: ClassVar[Status] = Status.indefinite  # of the preconditioner

    def cycle(self, A: Flat, M: Flat | None, r: Any, target: Any, limit: Any) -> Cycle:
        """Iterate on the residual in the preconditioner's norm, in proportion to the true one at the start."""
        z = r if M is None else M(r)
        square = dot(z, r)
        first = jnp.sqrt(square)
        aim = target * safe_quotient(first, norm(r))

        def continues(s: _State) -> jax.Array:
            return (jnp.abs(s.eta) > aim) & (s.iterations < limit) & ~s.broken

        def step(k: _State) -> _State:
            z = k.z / k.gamma[1]
            Az = A(z)
            delta = dot(Az, z)
            v = Az - (delta / k.gamma[1]) * k.v[1] - safe_quotient(k.gamma[1], k.gamma[0]) * k.v[0]
            z_new = v if M is None else M(v)
            square = dot(z_new, v)
            gamma = jnp.sqrt(jnp.maximum(square, 0))
            a0 = k.c[1] * delta - k.c[0] * k.s[1] * k.gamma[1]
            a1 = jnp.hypot(a0, gamma)
            a2 = k.s[1] * delta + k.c[0] * k.c[1] * k.gamma[1]
            a3 = k.s[0] * k.gamma[1]
            c, s = safe_quotient(a0, a1), safe_quotient(gamma, a1)
            w = safe_quotient(z - a3 * k.w[0] - a2 * k.w[1], a1)
            # A residual that no longer turns (gamma and a0 vanish) is that of a singular, inconsistent system.
            return _State(
                k.x + c * k.eta * w,
                jnp.stack([k.v[1], v]),
                z_new,
                jnp.stack([k.w[1], w]),
                jnp.stack([k.gamma[1], gamma]),
                -s * k.eta,
                jnp.stack([k.s[1], s]),
                jnp.stack([k.c[1], c]),
                k.iterations + 1,
                (square < 0) | (gamma == 0),
            )

        zeros, two, real = jnp.zeros_like(r), jnp.zeros((2, r.size), r.dtype), r.real.dtype
        start = _State(
            zeros,
            two.at[1].set(r),
            z,
            two,
            jnp.zeros(2, real).at[1].set(first),
            first,
            jnp.zeros(2, real),
            jnp.ones(2, real),
            jnp.zeros((), jnp.int32),
            ~(square > 0),
        )
        end = while_loop(continues, step, start)
        exhausted = end.broken & (end.gamma[1] == 0)  # the Krylov space is complete: no breakdown, but the end
        return Cycle(end.x, end.iterations, end.broken & ~exhausted)
