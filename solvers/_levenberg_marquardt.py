"""The Levenberg-Marquardt method."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..adjoint import Status
from ._cholesky import Cholesky
from ._gauss_newton import AbstractLeastSquaresMethod, linearised
from ._krylov import safe_quotient
from ._method import AbstractLinearMethod
from ._objective import Move, Problem


class _Memory(NamedTuple):
    mu: Float[Array, ""]
    nu: Float[Array, ""]
    scale: Float[Array, " N"]


class LevenbergMarquardt(AbstractLeastSquaresMethod):
    """The Levenberg-Marquardt method: the first choice for nonlinear least squares.

    Each iteration minimises ‖r + J d‖² + μ ‖D d‖², D² being the diagonal of JᵀJ (its largest so far), so that the units
    of the unknowns do not matter. The damping μ follows the gain ratio by Nielsen's rule. Dense systems are solved by a
    QR decomposition of J stacked on √μ D, not by normal equations. Once a step is below a hundredth of the unknowns,
    Newton steps on the full Hessian JᵀJ + Σ rᵢ ∇²rᵢ take over, for the rate of this method is linear where the
    residuals are large.

    Converged means that the Newton correction is below the weights, max |dᵢ| / (`atol` + `rtol` |uᵢ|) ≤ 1, with a
    positive definite Hessian, and that the gradient fell with it by a factor of five or is at its rounding noise. The
    correction is applied, so that the error of the value, and of its derivative, is below the tolerance. Unknowns that
    the data do not determine are `Status.singular`, a degenerate minimum is `Status.stalled`; a saddle point is left
    along its negative curvature.

    Parameters
    ----------
    rtol, atol
        Tolerances on the correction: relative (dimensionless) and absolute (in the units of u). By default 1e-10
        and 1e-12, in float32 1e-5 and 1e-6.
    max_iters
        Limit on the number of steps tried.
    linear
        `Cholesky()` (or `LU()`) for dense problems of up to a few hundred unknowns; it solves for the derivative.
        `CG(...)` for large ones: steps, curvature and derivative are then found by conjugate gradients from products
        with J, Jᵀ and the Hessian, with its preconditioner, and no matrix is built. D is then a multiple of the
        identity: bring the unknowns to like sizes.
    damping
        The first μ (dimensionless): 1e-3 for a good guess, 1 for a bad one.

    Notes
    -----
    Source: Madsen, Nielsen and Tingleff, *Methods for Non-Linear Least Squares Problems*, 2nd ed., IMM, DTU 2004,
    Algorithm 3.16 (eq. 3.14, 3.15); Moré, "The Levenberg-Marquardt algorithm: implementation and theory",
    Lect. Notes Math. 630 (1978), Section 5, doi:10.1007/BFb0067700, for D.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def rosenbrock(u, p):
    ...     return jnp.stack([p * (u[1] - u[0] ** 2), 1 - u[0]])
    >>> method = solvers.LevenbergMarquardt(rtol=1e-4)
    >>> u = solvers.least_squares(rosenbrock, jnp.array([-1.2, 1.0]), 10.0, method).value
    >>> [f"{float(each):.3f}" for each in u]
    ['1.000', '1.000']
    """

    rtol: float | None = None
    atol: float | None = None
    max_iters: int = eqx.field(default=1000, static=True)
    linear: AbstractLinearMethod = Cholesky()
    damping: float = 1e-2
    objective: Callable[[Any, Any], Any] | None = eqx.field(default=None, kw_only=True, repr=False)

    def start(self, problem: Problem, u: jax.Array) -> _Memory:
        """The first damping."""
        del problem
        one = jnp.ones((), u.dtype)
        return _Memory(self.damping * one, 2 * one, jnp.zeros_like(u))

    def advance(self, problem: Problem, u: jax.Array, memory: _Memory) -> Move:
        """One step, tried with the present damping."""
        near = linearised(self, problem, u, memory.mu, memory.scale)
        predicted, _ = near.predicted()
        cost, new = self.value_of(near.r), problem.value(u + near.step)
        gain = safe_quotient(cost - new, predicted)
        gain = jnp.where(jnp.isfinite(new) & (predicted > 0), gain, -1)
        moves = gain > 0
        grown = _Memory(memory.mu * memory.nu, 2 * memory.nu, near.scale)
        eased = _Memory(memory.mu * jnp.maximum(1 / 3, 1 - (2 * gain - 1) ** 3), 2 * jnp.ones_like(cost), near.scale)
        memory = jax.tree.map(lambda a, b: jnp.where(moves, a, b), eased, grown)
        status = Status.where(near.finite, Status.max_iterations, Status.nonfinite)
        size = self.weighted(near.step, u)
        return Move(jnp.where(moves, u + near.step, u), memory, size, ~moves & (size == 0), status, near.iterations)
