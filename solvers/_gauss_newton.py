"""The Gauss-Newton method, and what it shares with Levenberg and Marquardt's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..adjoint import Status
from ..adjoint._loops import while_loop
from ._cg import CG
from ._cholesky import Cholesky
from ._lu import LU
from ._method import AbstractLinearMethod, all_finite, status_where
from ._objective import AbstractMinimizer, Flat, Move, Problem, is_matrix_free
from ._truncated_cg import truncated_cg

_FORCING = 0.1
_SUFFICIENT_DECREASE = 1e-4
_SMALLEST_STEP = 1e-6


class Linearised(NamedTuple):
    """The residuals at a point, their derivative, and the solution of the damped linear least-squares problem."""

    r: Float[Array, " M"]
    jacobian: Flat
    step: Float[Array, " N"]
    scale: Float[Array, " N"]
    regular: Bool[Array, ""]
    finite: Bool[Array, ""]
    iterations: Int[Array, ""]

    def predicted(self) -> tuple[jax.Array, jax.Array]:
        """The decrease of ½‖r‖² that the linear model predicts, and its slope along the step."""
        along = self.jacobian(self.step)
        slope = jnp.vdot(self.r, along)
        return -slope - jnp.vdot(along, along) / 2, slope


class AbstractLeastSquaresMethod(AbstractMinimizer):
    """A way to minimise ½‖r(u)‖²; its objective returns r as one vector."""

    def value_of(self, out: jax.Array) -> jax.Array:
        """½‖r‖²."""
        return jnp.vdot(out, out) / 2

    def __check_init__(self) -> None:
        """Refuse linear methods that the normal equations are not solved by."""
        if not isinstance(self.linear, Cholesky | LU | CG):
            message = (
                "`linear` must be solvers.Cholesky() or solvers.LU() (dense), or solvers.CG(...) (matrix-free), got "
                f"{self.linear!r}. Other methods for the derivative's solves are given by `adjoint=`."
            )
            raise TypeError(message)


def linearised(method: AbstractMinimizer, problem: Problem, u: Any, mu: Any, scale: Any) -> Linearised:
    """Minimise ‖J d + r‖² + μ ‖D d‖², D² being the largest diagonal of JᵀJ so far (matrix-free: a multiple of I)."""
    r, jacobian = jax.linearize(problem.residual, u)
    if is_matrix_free(method):
        return _matrix_free(problem, (r, jacobian), u, mu, scale)
    J = jax.vmap(jacobian)(jnp.eye(u.size, dtype=u.dtype)).T
    scale = jnp.maximum(scale, jnp.linalg.norm(J, axis=0))
    D = jnp.where(scale > 0, scale, 1)
    damping = jnp.sqrt(mu) * jnp.eye(u.size, dtype=u.dtype)
    q, R = jnp.linalg.qr(jnp.concatenate([J / D, damping]))
    step = -jax.scipy.linalg.solve_triangular(R, q[: r.size].T @ r) / D
    pivots = jnp.abs(jnp.diagonal(R))
    regular = jnp.min(pivots) > u.size * jnp.finfo(u.dtype).eps * jnp.max(pivots)
    finite = all_finite(J.ravel()) & all_finite(r)
    return Linearised(r, jacobian, step, scale, regular, finite, jnp.zeros((), jnp.int32))


def _matrix_free(problem: Problem, at: tuple[Any, Flat], u: Any, mu: Any, scale: Any) -> Linearised:
    r, jacobian = at
    transpose = jax.linear_transpose(jacobian, u)
    g = transpose(r)[0]
    length = jnp.linalg.norm(g)
    curvature = jnp.linalg.norm(jacobian(g / jnp.where(length > 0, length, 1)))
    scale = jnp.maximum(scale, curvature)
    shift = mu * jnp.max(scale) ** 2

    def normal(v: jax.Array) -> jax.Array:
        return transpose(jacobian(v))[0] + shift * v

    end = truncated_cg(normal, problem.preconditioner(normal), g, _FORCING, problem.limit)
    return Linearised(r, jacobian, end.step, scale, ~end.flat, all_finite(g), end.iterations)


class GaussNewton(AbstractLeastSquaresMethod):
    """The Gauss-Newton method with a line search: for least squares near the solution, where residuals are small.

    Each iteration minimises the linearised ‖r + J d‖² and moves u ← u + λ d, with λ halved until the cost decreases
    sufficiently. `LevenbergMarquardt` is the safer choice: it survives bad starts, and Jacobians of deficient rank,
    which are `Status.singular` here. How it ends, and what converged means, is the same for both: see there.

    Parameters
    ----------
    rtol, atol, max_iters, linear
        As for `LevenbergMarquardt`.

    References
    ----------
    Nocedal and Wright, *Numerical Optimization*, 2nd ed., Section 10.3, doi:10.1007/978-0-387-40065-5.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> t, y = jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.array([2.0, 1.2, 0.75, 0.44])
    >>> def residual(u, y):
    ...     return u[0] * jnp.exp(-u[1] * t) - y
    >>> u = solvers.least_squares(residual, jnp.array([1.5, 1.0]), y, solvers.GaussNewton(rtol=1e-4)).value
    >>> [f"{float(each):.3f}" for each in u]
    ['1.997', '0.500']
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=100, static=True)
    linear: AbstractLinearMethod = Cholesky()
    objective: Callable[[Any, Any], Any] | None = eqx.field(default=None, kw_only=True, repr=False)

    def start(self, problem: Problem, u: jax.Array) -> Any:
        """Nothing is remembered."""
        del problem, u

    def advance(self, problem: Problem, u: jax.Array, memory: Any) -> Move:
        """One step with its line search."""
        del memory
        near = linearised(self, problem, u, jnp.zeros((), u.dtype), jnp.zeros_like(u))
        _, slope = near.predicted()
        cost = self.value_of(near.r)

        def descends(c: tuple[Any, Any]) -> jax.Array:
            return c[1] <= cost + _SUFFICIENT_DECREASE * c[0] * slope

        def at(length: Any) -> tuple[Any, Any]:
            return length, problem.value(u + length * near.step)

        tried = while_loop(
            lambda c: ~descends(c) & (c[0] > _SMALLEST_STEP), lambda c: at(c[0] / 2), at(jnp.ones((), u.dtype))
        )
        moves = near.regular & descends(tried)
        status = status_where(
            [(~near.finite, Status.nonfinite), (~near.regular, Status.singular)], Status.max_iterations
        )
        step = tried[0] * near.step
        return Move(jnp.where(moves, u + step, u), None, self.weighted(step, u), ~moves, status, near.iterations)
