"""What all Krylov methods share: tolerances, preconditioners, restarts from the true residual, and the final word."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint import Status
from ..adjoint._loops import vary_together, while_loop
from ..adjoint._tolerance import resolve_tolerance
from ._method import AbstractLinearMethod, Outcome, all_finite, on_flat, status_where
from ._preconditioner import as_preconditioner
from ._structured import Structured

# Cycles that gain nothing, after which a solve has stalled: rounding may spoil one.
_IDLE = 2
Flat = Callable[[Any], Any]


class Cycle(NamedTuple):
    """What one cycle of a method reports: the correction, its iterations, whether it met a breakdown."""

    x: Inexact[Array, " N"]
    iterations: Int[Array, ""]
    broken: Array


class _State(NamedTuple):
    x: Inexact[Array, " N"]
    r: Inexact[Array, " N"]
    residual: Float[Array, ""]
    iterations: Int[Array, ""]
    idle: Int[Array, ""]
    broken: Array


class AbstractKrylov(AbstractLinearMethod):
    """A Krylov method: cycles that start from the true residual, until it meets the tolerance."""

    rtol: float | None = None
    atol: float = 0.0
    max_iters: int | None = eqx.field(default=None, static=True)
    preconditioner: Any = None

    symmetric: ClassVar[bool] = False  # whether the method is for symmetric (Hermitian) operators only
    breakdown: ClassVar[Status] = Status.nonfinite  # what it means that a cycle broke down, or ended in no number
    progress: ClassVar[float] = 0.5  # a cycle that leaves more than this part of the residual has gained nothing

    @abc.abstractmethod
    def cycle(self, A: Flat, M: Flat | None, r: Any, target: Any, limit: Any) -> Cycle:
        """Solve A x = r from zero until ‖r - A x‖ ≤ `target`, in at most `limit` iterations."""

    def resolve(self, dtype: jnp.dtype) -> Self:
        """Fill in the default tolerance, or refuse one out of the dtype's reach."""
        rtol = resolve_tolerance("rtol", self.rtol, 1e-8, dtype)
        atol = resolve_tolerance("atol", self.atol, 0.0, dtype, reachable=False)
        return dataclasses.replace(self, rtol=rtol, atol=atol, preconditioner=as_preconditioner(self.preconditioner))

    def for_matrix(self, matrix: Any) -> Self:
        """The method whose preconditioner knows the structure of a matrix."""
        M = self.preconditioner
        return dataclasses.replace(self, preconditioner=M.for_matrix(matrix)) if isinstance(M, Structured) else self

    def for_function(self, f: Callable[[Any], Any], like: Any) -> Self:
        """The method whose preconditioner knows the structure of f's Jacobian."""
        M = self.preconditioner
        return dataclasses.replace(self, preconditioner=M.for_function(f, like)) if isinstance(M, Structured) else self

    def hoisted(self, like: Any) -> Self:
        """The method with arrays that its preconditioner closes over as leaves."""
        M = as_preconditioner(self.preconditioner)
        return self if M is None else dataclasses.replace(self, preconditioner=M.hoisted(like))

    def transposed(self, like: Any) -> Self:
        """The same method with the transposed preconditioner."""
        M = as_preconditioner(self.preconditioner)
        return self if M is None else dataclasses.replace(self, preconditioner=M.transposed(like))

    def tightened(self, rtol: Any) -> Self:
        """The same method with a relative tolerance of at most `rtol`."""
        return self if self.rtol is None else dataclasses.replace(self, rtol=jnp.minimum(self.rtol, rtol))

    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Iterate from zero."""
        flat, unravel = ravel_pytree(b)
        if flat.size == 0:
            return Outcome(b, Status.converged, {"iterations": jnp.zeros((), jnp.int32), "residual": norm(flat)})
        limit = 10 * flat.size if self.max_iters is None else self.max_iters

        preconditioner = as_preconditioner(self.preconditioner)
        flattened = functools.partial(on_flat, unravel=unravel, dtype=flat.dtype)
        A = flattened(matvec)
        M = None if preconditioner is None else flattened(preconditioner.prepare(matvec, b))
        rtol = resolve_tolerance("rtol", self.rtol, 1e-8, flat.dtype)
        # Squared norms of a right-hand side near the ends of the number range would vanish or overflow.
        size = jnp.max(jnp.abs(flat), initial=0.0)
        size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
        target = (self.atol / size) + rtol * norm(ravel_pytree(reference)[0] / size)
        end = self._iterate(A, M, flat / size, target, limit)
        missed = end.residual > target
        no, x = jnp.array(False), size * end.x
        unsymmetric, undefined = self._faults(A, flat, missed) if self.symmetric else (no, no)
        finite = jnp.isfinite(end.residual) & all_finite(flat) & all_finite(x)
        status = status_where(
            [
                (~finite | undefined, Status.nonfinite),
                (~missed, Status.converged),
                (unsymmetric, Status.unsymmetric),
                (end.broken, self.breakdown),
                (end.iterations >= limit, Status.max_iterations),
            ],
            Status.stalled,
        )
        stats = {"iterations": end.iterations, "residual": size * end.residual}
        return Outcome(unravel(x), status, stats)

    def _iterate(self, A: Flat, M: Flat | None, b: Any, target: Any, limit: int) -> _State:
        def continues(s: _State) -> jax.Array:
            return (s.residual > target) & (s.iterations < limit) & (s.idle < _IDLE) & ~s.broken

        def body(s: _State) -> _State:
            step = self.cycle(A, M, s.r, target, limit - s.iterations)
            x = s.x + step.x
            r = b - A(x)
            residual = norm(r)
            idle = jnp.where(residual > self.progress * s.residual, s.idle + 1, 0)
            broken = step.broken | ~jnp.isfinite(residual)
            better = residual <= s.residual
            x, r, residual = (jnp.where(better, new, old) for new, old in zip((x, r, residual), s[:3], strict=True))
            return _State(x, r, residual, s.iterations + step.iterations, idle, broken)

        zero = jnp.zeros((), jnp.int32)
        return while_loop(continues, body, _State(jnp.zeros_like(b), b, norm(b), zero, zero, jnp.array(False)))

    @staticmethod
    def _faults(A: Flat, like: Any, asked: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whether ⟨v, A w⟩ differs from ⟨A v, w⟩ for two generic vectors, or is no number; seen only where `asked`."""
        k = jnp.arange(like.size, dtype=like.real.dtype)
        # Of many values: rows that break the symmetry in mirrored places, such as the two ends, must not cancel.
        v, w = jnp.sin(1 + 2.1 * k).astype(like.dtype), jnp.sin(2 + 3.7 * k).astype(like.dtype)
        v, w, no, _ = vary_together((v, w, jnp.array(False), like))

        def look() -> tuple[jax.Array, jax.Array]:
            Av, Aw = A(v), A(w)
            size = norm(v) * norm(Aw) + norm(Av) * norm(w)
            differs = jnp.abs(jnp.vdot(v, Aw) - jnp.vdot(Av, w)) > jnp.finfo(like.dtype).eps ** 0.5 * size
            return differs, ~jnp.isfinite(size)

        return lax.cond(asked, look, lambda: (no, no))


def norm(v: Any) -> jax.Array:
    """The Euclidean norm."""
    return jnp.sqrt(dot(v, v))


def dot(a: Any, b: Any) -> jax.Array:
    """The real part of the inner product."""
    return jnp.vdot(a, b).real


def safe_quotient(a: Any, b: Any) -> Any:
    """Return a / b, zero where b is zero."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
