"""The generalised minimal residual method, restarted."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Int

from ..adjoint._loops import while_loop
from ._krylov import AbstractKrylov, Cycle, Flat, norm, safe_quotient


class _State(NamedTuple):
    V: Inexact[Array, "m1 N"]  # the orthonormal basis
    R: Inexact[Array, "m m"]  # the triangular factor of the Hessenberg matrix
    Q: Inexact[Array, "m1 m1"]  # the product of the rotations
    residual: Float[Array, ""]
    k: Int[Array, ""]


class GMRES(AbstractKrylov):
    """Generalised minimal residuals, restarted: the choice for large unsymmetric operators.

    The residual never grows. `restart` + 6 vectors of memory; a restart forgets the space built so far, and may stall
    where a longer one would not. Converged has the meaning it has for `CG`. The preconditioner stands on the right,
    A M y = b, x = M y, so that the residual is the true one.

    Parameters
    ----------
    rtol, atol
        Tolerances, dimensionless and in the units of b. `rtol` is 1e-8 by default (1e-4 in float32).
    max_iters
        Limit on the number of iterations (products with A); ten times the number of unknowns by default.
    preconditioner
        M ≈ A⁻¹, any linear function.
    restart
        Vectors of the basis.

    Notes
    -----
    Source: Saad and Schultz, SIAM J. Sci. Stat. Comput. 7 (1986), Algorithm 4, doi:10.1137/0907058; orthogonalised
    twice by classical Gram-Schmidt (Giraud et al., Numer. Math. 101 (2005), doi:10.1007/s00211-005-0615-4).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A = jnp.array([[1.0, 2.0], [0.0, -1.0]])
    >>> x = solvers.linear_solve(A, jnp.array([3.0, -1.0]), solvers.GMRES()).value
    >>> [f"{float(each):.3f}" for each in x]
    ['1.000', '1.000']
    """

    restart: int = eqx.field(default=30, static=True)

    progress: ClassVar[float] = 0.999

    def __check_init__(self) -> None:
        """Refuse a basis without vectors."""
        if isinstance(self.restart, bool) or not isinstance(self.restart, int) or self.restart < 1:
            message = f"`restart` must be an integer of at least 1, got {self.restart!r}. 30 is usual."
            raise ValueError(message)

    def cycle(self, A: Flat, M: Flat | None, r: Any, target: Any, limit: Any) -> Cycle:
        """Build a basis of at most `restart` vectors, and minimise over it."""
        m = min(self.restart, r.size)
        beta = norm(r)
        AM = A if M is None else lambda v: A(M(v))

        def continues(s: _State) -> jax.Array:
            return (s.residual > target) & (s.k < m) & (s.k < limit)

        def step(s: _State) -> _State:
            w = AM(lax.dynamic_index_in_dim(s.V, s.k, keepdims=False))
            h = jnp.conj(s.V) @ w
            w = w - h @ s.V
            again = jnp.conj(s.V) @ w
            w = w - again @ s.V
            length = norm(w)
            V = lax.dynamic_update_index_in_dim(s.V, safe_quotient(w, length), s.k + 1, 0)
            column = s.Q @ (h + again).at[s.k + 1].add(length)
            Q, R = _rotated(s.Q, s.R, column, s.k)
            return _State(V, R, Q, beta * jnp.abs(Q[s.k + 1, 0]), s.k + 1)

        V = jnp.zeros((m + 1, r.size), r.dtype).at[0].set(safe_quotient(r, beta))
        start = _State(V, jnp.eye(m, dtype=r.dtype), jnp.eye(m + 1, dtype=r.dtype), beta, jnp.zeros((), jnp.int32))
        end = while_loop(continues, step, start)
        used = jnp.arange(m) < end.k
        singular = jnp.diagonal(end.R) == 0  # A maps the last vector into the space: it cannot help
        R = end.R + jnp.diag(jnp.where(singular, 1, 0).astype(r.dtype))
        g = jnp.where(used & ~singular, beta * end.Q[:m, 0], 0)
        y = jax.scipy.linalg.solve_triangular(R, g) @ end.V[:m]
        return Cycle(y if M is None else M(y), end.k, jnp.array(False))


def _rotated(Q: Any, R: Any, column: Any, k: Any) -> tuple[Any, Any]:
    """Rotate rows k and k + 1 so that the entry of the new column below the diagonal vanishes."""
    a, b = column[k], column[k + 1]
    length = jnp.sqrt(jnp.abs(a) ** 2 + jnp.abs(b) ** 2)
    c, s = jnp.where(length == 0, 1, safe_quotient(a, length)), safe_quotient(b, length)
    upper, lower = Q[k], Q[k + 1]
    Q = Q.at[k].set(jnp.conj(c) * upper + jnp.conj(s) * lower).at[k + 1].set(c * lower - s * upper)
    entries = jnp.where(jnp.arange(R.shape[0]) < k, column[:-1], 0).at[k].set(length.astype(column.dtype))
    return Q, R.at[:, k].set(entries)
