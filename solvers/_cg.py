"""Conjugate gradients."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ._krylov import AbstractKrylov, Cycle, Flat, dot, norm


class _State(NamedTuple):
    x: Inexact[Array, " N"]
    r: Inexact[Array, " N"]
    p: Inexact[Array, " N"]
    gamma: Float[Array, ""]  # ⟨r, M r⟩
    residual: Float[Array, ""]
    iterations: Int[Array, ""]
    indefinite: Array


class CG(AbstractKrylov):
    """Conjugate gradients: the choice for large symmetric (Hermitian) positive definite operators.

    Matrix-free in memory (six vectors) and, through the node, in its derivative: the adjoint solve is conjugate
    gradients on the transposed operator, with the transposed preconditioner.

    Converged means ‖b - A x‖₂ ≤ `atol` + `rtol` ‖b‖₂ for the *true* residual, computed anew at the end. The
    recursive residual that the iteration carries drifts from it, in float32 by orders of magnitude: where it
    does, the iteration is restarted from the true one, and `Status.stalled` tells when that no longer helps.

    Parameters
    ----------
    rtol, atol
        Tolerances, dimensionless and in the units of b. `rtol` is 1e-8 by default (1e-4 in float32).
    max_iters
        Limit on the number of iterations; ten times the number of unknowns by default.
    preconditioner
        M ≈ A⁻¹, symmetric positive definite: a function `v -> M v`, or `solvers.jacobi()`, `ilu()`, `amg()`,
        `multigrid(...)`.

    Notes
    -----
    An operator that is not symmetric positive definite is caught by non-positive curvature (`Status.indefinite`) or
    by the true residual (`Status.unsymmetric`, `Status.stalled`), not beforehand.

    Source: Saad, *Iterative Methods for Sparse Linear Systems*, 2nd ed., Algorithm 9.1,
    doi:10.1137/1.9780898718003; the numbers in the code are its steps.
    """

    symmetric: ClassVar[bool] = True
    breakdown: ClassVar[Status] = Status.indefinite

    def cycle(self, A: Flat, M: Flat | None, r: Any, target: Any, limit: Any) -> Cycle:
        """Iterate on the recursive residual."""

        def continues(s: _State) -> jax.Array:
            return (s.residual > target) & (s.iterations < limit) & ~s.indefinite

        def step(s: _State) -> _State:
            # The algorithm's loop begins with its last lines: the preconditioner is then compiled once, and not applied
            # to the last residual.
            z = s.r if M is None else M(s.r)  # 6
            gamma = s.residual**2 if M is None else dot(s.r, z)
            p = z + (gamma / s.gamma) * s.p  # 7, 8
            q = A(p)
            curvature = dot(p, q)
            good = (curvature > 0) & (gamma > 0)
            alpha = jnp.where(good, gamma / jnp.where(good, curvature, 1), 0)  # 3
            x = s.x + alpha * p  # 4
            r = s.r - alpha * q  # 5
            return _State(x, r, p, jnp.where(good, gamma, 1), norm(r), s.iterations + 1, ~good)

        zeros, zero, one = jnp.zeros_like(r), jnp.zeros((), jnp.int32), jnp.ones((), r.real.dtype)
        end = while_loop(continues, step, _State(zeros, r, zeros, one, norm(r), zero, jnp.array(False)))
        return Cycle(end.x, end.iterations, end.indefinite)
