"""Chandrupatla's bracketing method."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ._lu import LU
from ._method import AbstractLinearMethod, AbstractRootMethod, Outcome, status_where
from ._newton import at_noise

_SHARE = 10


class _State(NamedTuple):
    a: Float[Array, ""]  # the newest point; the root is between a and b
    b: Float[Array, ""]
    fa: Float[Array, ""]
    fb: Float[Array, ""]
    fraction: Float[Array, ""]  # where between a and b to look next
    iterations: Int[Array, ""]


class Chandrupatla(AbstractRootMethod):
    """Chandrupatla's bracketing method: for one scalar equation whose root lies in a known interval.

    Inverse quadratic interpolation where it is safe, bisection elsewhere: it finds a root of any continuous F with
    F(lower) F(upper) ≤ 0, usually in fewer evaluations than Brent's method. Under `vmap` each lane has its own bracket.

    Converged means that the bracket is no wider than `atol` + `rtol` |u|, and that the residual is as small as the
    slope makes it there: a pole or a jump, where the sign changes too, is `Status.stalled`.

    Parameters
    ----------
    lower, upper
        Ends of the bracket, in the units of u; arrays are allowed. They carry no derivative.
    rtol, atol
        Tolerances on the width of the bracket, by default 1e-10 and 1e-12 (1e-5 and 1e-6 in float32).
    max_iters
        Limit on the number of evaluations.

    Notes
    -----
    `guess` gives the structure of the unknown only; its number is not used. Source: Chandrupatla, "A new hybrid
    quadratic/bisection algorithm for finding the zero of a nonlinear function without using derivatives", Adv. Eng.
    Softw. 28 (1997), doi:10.1016/S0965-9978(96)00051-8.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> method = solvers.Chandrupatla(0.0, 2.0, rtol=1e-5)
    >>> solution = solvers.root_find(lambda u, p: jnp.cos(u) - p * u, 1.0, 1.0, method)
    >>> round(float(solution.value), 4)
    0.7391
    """

    lower: Any
    upper: Any
    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=200, static=True)
    linear: AbstractLinearMethod = LU()

    def resolve(self, dtype: jnp.dtype) -> Self:
        """Fill in the default tolerances; the ends become arrays of the dtype."""
        method = super().resolve(dtype)
        ends = jnp.asarray(self.lower, dtype), jnp.asarray(self.upper, dtype)
        return eqx.tree_at(lambda m: (m.lower, m.upper), method, ends)

    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Narrow the bracket."""
        del params
        flat, unravel = ravel_pytree(guess)
        if flat.size != 1 or jnp.iscomplexobj(flat):
            message = (
                f"Chandrupatla is for one real unknown. Expected a guess of size 1, got {flat.size} of {flat.dtype}. "
                "Use jax.vmap for several independent equations, and Newton() or TrustRegion() for a system."
            )
            raise ValueError(message)

        def F(u: jax.Array) -> jax.Array:
            return ravel_pytree(f(unravel(u[None])))[0].astype(flat.dtype)[0]

        method = self.resolve(flat.dtype)
        a, b = (jnp.reshape(end, ()) for end in (method.lower, method.upper))
        half = jnp.asarray(0.5, flat.dtype)
        start = _State(a, b, F(a), F(b), half, jnp.zeros((), jnp.int32))
        bracketed = jnp.sign(start.fa) * jnp.sign(start.fb) <= 0

        def continues(s: _State) -> jax.Array:
            best = jnp.where(jnp.abs(s.fa) < jnp.abs(s.fb), s.a, s.b)
            wide = jnp.abs(s.b - s.a) > method.weight(best)
            return bracketed & wide & (s.fa != 0) & (s.fb != 0) & (s.iterations < self.max_iters)

        end = while_loop(continues, lambda s: _narrowed(F, s, method), start)
        u = jnp.where(jnp.abs(end.fa) < jnp.abs(end.fb), end.a, end.b)
        width = jnp.where((end.fa == 0) | (end.fb == 0), 0, jnp.abs(end.b - end.a))
        value, slope = jax.jvp(F, (u,), (jnp.ones_like(u),))
        status = _status(F, (u, value, slope), width, bracketed, continues(end), (start, end))
        stats = {"iterations": end.iterations, "residual": jnp.abs(value), "correction": width}
        # At a root of third order the slope vanishes, and the derivative with it; rounding leaves it not quite zero.
        secant = jnp.abs(start.fb - start.fa)
        regular = jnp.abs(slope * (b - a)) > jnp.finfo(flat.dtype).eps * secant
        return Outcome(unravel(u[None]), status, stats, regular)


def _narrowed(F: Callable[[Any], Any], s: _State, method: Chandrupatla) -> _State:
    """One evaluation inside the bracket, and where to look next (the paper's step 3)."""
    x = s.a + s.fraction * (s.b - s.a)
    fx = F(x)
    same = jnp.sign(fx) == jnp.sign(s.fa)
    # The point that leaves the bracket serves the interpolation.
    c, fc = jnp.where(same, s.a, s.b), jnp.where(same, s.fa, s.fb)
    b, fb = jnp.where(same, s.b, s.a), jnp.where(same, s.fb, s.fa)
    xi, phi = (x - b) / (c - b), (fx - fb) / (fc - fb)
    safe = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
    slope = (c - x) / (b - x)
    interpolated = fx / (fb - fx) * fc / (fb - fc) + slope * fx / (fc - fx) * fb / (fc - fb)
    width = jnp.abs(b - x)
    least = jnp.minimum(0.5, 0.5 * method.weight(x) / jnp.where(width > 0, width, 1))
    fraction = jnp.where(safe & jnp.isfinite(interpolated), jnp.clip(interpolated, least, 1 - least), 0.5)
    return _State(x, b, fx, fb, fraction, s.iterations + 1)


def _status(F: Callable[[Any], Any], at: Any, width: Any, bracketed: Any, cut: Any, ends: Any) -> Status:
    (u, value, slope), (start, end) = at, ends
    explained = jnp.abs(value) <= _SHARE * jnp.abs(slope) * width
    noisy = at_noise(lambda x: F(x[0])[None], u[None], jnp.abs(value))
    at_root = (value == 0) | explained | noisy
    finite = jnp.isfinite(start.fa) & jnp.isfinite(start.fb) & jnp.isfinite(end.fa) & jnp.isfinite(end.fb)
    shrunk = jnp.abs(value) <= jnp.maximum(jnp.abs(start.fa), jnp.abs(start.fb))
    return status_where(
        [
            (~finite, Status.nonfinite),
            (~bracketed, Status.unbracketed),
            (cut, Status.max_iterations),
            (~(at_root & shrunk), Status.stalled),
        ],
        Status.converged,
    )
