"""Anderson's acceleration of fixed-point iterations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Inexact, Int

from ._gmres import GMRES
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, on_flat
from ._picard import iterated


class _State(NamedTuple):
    u: Inexact[Array, " N"]
    F: Inexact[Array, " N"]
    du: Inexact[Array, "m N"]
    df: Inexact[Array, "m N"]
    rate: Float[Array, ""]
    iterations: Int[Array, ""]


class Anderson(AbstractRootMethod):
    """Anderson's acceleration: the choice for fixed points u = g(u) without a Jacobian.

    Among the last `memory` differences it looks for the combination with the least residual, and moves from there:
    u ← u + ω F - (ΔU + ω ΔF) γ,  γ = argmin ‖F - ΔF γ‖₂,  F = g(u) - u. On linear problems that is GMRES.

    Parameters
    ----------
    rtol, atol
        Tolerances on the estimated error, as for `Picard`.
    max_iters
        Limit on the number of evaluations.
    memory
        m, the number of differences kept: 2 m + 4 vectors of memory.
    damping
        ω (dimensionless); 1 for none, smaller where g is far from a contraction.
    linear
        The method of the derivative's solves with I - g_u.

    Notes
    -----
    Source: Walker and Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49 (2011),
    eq. (2.1), doi:10.1137/10078356X.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> g = lambda u, p: p - 0.9 * jnp.roll(u, 1) * u
    >>> solution = solvers.fixed_point(g, jnp.ones(3), jnp.array([1.0, 1.1, 0.9]), solvers.Anderson(rtol=1e-4))
    >>> [f"{float(each):.2f}" for each in solution.value]
    ['0.67', '0.69', '0.56']
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=500, static=True)
    memory: int = eqx.field(default=5, static=True)
    damping: float = 1.0
    linear: AbstractLinearMethod = GMRES()

    def __check_init__(self) -> None:
        """Refuse a memory of nothing."""
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory < 1:
            message = f"`memory` must be a positive integer, got {self.memory!r}. Without memory use Picard()."
            raise ValueError(message)

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Iterate from `guess`, where f(u) = g(u) - u."""
        del params
        u, unravel = ravel_pytree(guess)
        F = on_flat(f, unravel, u.dtype)
        memory = jnp.zeros((min(self.memory, max(u.size, 1)), u.size), u.dtype)
        start = _State(u, F(u), memory, memory, jnp.ones((), u.real.dtype), jnp.zeros((), jnp.int32))
        return iterated(self, F, lambda s: _accelerated(F, s, self.damping), start, unravel)


def _accelerated(F: Callable[[Any], Any], s: _State, damping: Any) -> _State:
    gamma = _least_squares(s.df, s.F)
    u = s.u + damping * s.F - gamma @ (s.du + damping * s.df)
    value = F(u)
    rate = jnp.linalg.norm(value) / jnp.linalg.norm(s.F)
    place = s.iterations % len(s.df)
    du, df = (old.at[place].set(new) for old, new in ((s.du, u - s.u), (s.df, value - s.F)))
    return _State(u, value, du, df, rate, s.iterations + 1)


def _least_squares(rows: jax.Array, b: jax.Array) -> jax.Array:
    """Return argmin ‖b - γ rows‖: rows are scaled to unit length, and directions at rounding level left out."""
    length = jnp.linalg.norm(rows, axis=1)
    scale = jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)
    rows = rows * scale[:, None]
    values, vectors = jnp.linalg.eigh(jnp.conj(rows) @ rows.T)
    cut = 16 * len(rows) * jnp.finfo(b.dtype).eps
    inverse = jnp.where(values > cut, 1 / jnp.where(values > cut, values, 1), 0)
    return scale * (vectors @ (inverse * (jnp.conj(vectors.T) @ (jnp.conj(rows) @ b))))
