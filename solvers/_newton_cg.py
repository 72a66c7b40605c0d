"""Newton's method for a minimum, by conjugate gradients within a trust region."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..adjoint import Status
from ._cg import CG
from ._krylov import safe_quotient
from ._method import AbstractLinearMethod, all_finite
from ._objective import AbstractMinimizer, Move, Problem
from ._truncated_cg import truncated_cg

_ACCEPTED, _POOR, _GOOD = 1e-4, 0.25, 0.75
_LOOSE, _TIGHT = 0.5, 1e-2
_AGAIN = 1e-3  # the least radius, relative to the unknowns, after a step of another kind


class AbstractScalarMethod(AbstractMinimizer):
    """A way to minimise a scalar function of many unknowns, matrix-free."""

    def __check_init__(self) -> None:
        """Refuse what would build the Hessian, or would not see its negative curvature."""
        if not isinstance(self.linear, CG):
            message = (
                f"`linear` must be solvers.CG(...), which meets directions of negative curvature, got {self.linear!r}. "
                "Other methods for the derivative's solves are given by `adjoint=`."
            )
            raise TypeError(message)


class _Region(NamedTuple):
    radius: Float[Array, ""]
    forcing: Float[Array, ""]


class NewtonCG(AbstractScalarMethod):
    """Newton's method within a trust region, matrix-free: the first choice for minima with many unknowns.

    Each iteration minimises the quadratic model f + g·d + ½ d·H d for ‖d‖ ≤ Δ by conjugate gradients on products with
    the Hessian. They stop at the edge of the region, or go to it along a direction of negative curvature; the radius Δ
    follows the decrease of f over that of the model. Far from the minimum the model is minimised loosely.

    Converged means that the Newton correction is below the weights, max |dᵢ| / (`atol` + `rtol` |uᵢ|) ≤ 1, that no
    direction of non-positive curvature was met, by a generic right-hand side neither, and that the gradient, evaluated
    at the point that is returned, fell with the correction by a factor of five or is at its rounding noise. A saddle
    point is left along its negative curvature; a minimum that is not isolated is `Status.singular`.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction: relative (dimensionless) and absolute (in the units of u). By default 1e-10
        and 1e-12, in float32 1e-5 and 1e-6.
    max_iters
        Limit on the number of Newton iterations.
    linear
        `CG(...)`: its preconditioner shapes the region and speeds up all solves, the derivative's too; its `rtol` is
        that of the derivative's solves, which are at least as tight as the minimum.

    Notes
    -----
    Memory is a dozen vectors. Without a preconditioner the region is a ball in the unknowns: bring them to like sizes.
    The preconditioner must be symmetric positive definite wherever the iteration goes.

    Source: Nocedal and Wright, *Numerical Optimization*, 2nd ed., Algorithms 4.1 and 7.2,
    doi:10.1007/978-0-387-40065-5.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def rosenbrock(u, p):
    ...     return p * (u[1] - u[0] ** 2) ** 2 + (1 - u[0]) ** 2
    >>> u = solvers.minimize(rosenbrock, jnp.array([-1.2, 1.0]), 100.0, solvers.NewtonCG(rtol=1e-4)).value
    >>> [f"{float(each):.3f}" for each in u]
    ['1.000', '1.000']
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=500, static=True)
    linear: AbstractLinearMethod = CG()
    objective: Callable[[Any, Any], Any] | None = eqx.field(default=None, kw_only=True, repr=False)

    def start(self, problem: Problem, u: jax.Array) -> _Region:
        """A region of the size of the unknowns."""
        del problem
        size = jnp.linalg.norm(u)
        return _Region(jnp.where(size > 0, size, 1), _LOOSE * jnp.ones_like(size))

    def refreshed(self, problem: Problem, u: jax.Array, memory: _Region) -> _Region:
        """A region that is not too small for what may come at the new point."""
        return _Region(jnp.maximum(memory.radius, _AGAIN * self.start(problem, u).radius), memory.forcing)

    def advance(self, problem: Problem, u: jax.Array, memory: _Region) -> Move:
        """One step within the region."""
        g, hessian = jax.linearize(problem.gradient, u)
        M = problem.preconditioner(hessian)
        end = truncated_cg(hessian, M, g, memory.forcing, problem.limit, radius=memory.radius)
        d = end.step
        predicted = -jnp.vdot(d, g) - jnp.vdot(d, hessian(d)) / 2
        value, new = problem.value(u), problem.value(u + d)
        after = problem.gradient(u + d)
        ratio = gain(value, new, -jnp.vdot(g + after, d) / 2, predicted)
        moves = ratio > _ACCEPTED
        wider = jnp.where((ratio > _GOOD) & end.edge, 2 * memory.radius, memory.radius)
        # The length of an inner step in the norm of M⁻¹ is not known: then the region alone shrinks.
        length = jnp.minimum(jnp.linalg.norm(d), memory.radius) if M is None else memory.radius
        fall = safe_quotient(jnp.linalg.norm(after), jnp.linalg.norm(g))
        forcing = jnp.where(moves, jnp.clip(fall**2, _TIGHT, _LOOSE), memory.forcing)
        size = self.weighted(d, u)
        return Move(
            u=jnp.where(moves, u + d, u),
            memory=_Region(jnp.where(ratio < _POOR, length / 4, wider), forcing),
            size=jnp.where(moves & ~end.edge, size, jnp.inf),
            stuck=~moves & (size <= 1),
            status=Status.where(all_finite(g), Status.max_iterations, Status.nonfinite),
            linear_iterations=end.iterations,
        )


def gain(value: Any, new: Any, trapezoid: Any, predicted: Any) -> jax.Array:
    """The actual decrease over the predicted one.

    Where the difference of two values would be rounding, it is found from the gradients at both ends: the values alone
    lead no closer to a minimum than the square root of the rounding unit.
    """
    visible = predicted > jnp.finfo(value.dtype).eps ** 0.75 * jnp.abs(value)
    actual = jnp.where(visible, value - new, trapezoid)
    ratio = jnp.where(predicted > 0, actual / jnp.where(predicted > 0, predicted, 1), -1)
    return jnp.where(jnp.isfinite(new) & jnp.isfinite(trapezoid), ratio, -1)
