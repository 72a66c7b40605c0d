"""The implicit midpoint rule."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..adjoint import implicit_root
from ..solvers import AbstractRootMethod, Newton
from ..solvers._method import linear_solver, root_solver
from ._method import AbstractMethod, Field, StepResult, add_scaled


class ImplicitMidpoint(AbstractMethod):
    """The implicit midpoint rule, symplectic and symmetric, order 2.

    The choice for stiff oscillators and for Hamiltonians that do not separate: stable for every step size in the
    left half plane (but not damping: L-stable methods come with the stiff integrators), and quadratic invariants
    are kept exactly.

        yₙ₊₁ = yₙ + h f(tₙ + h/2, (yₙ + yₙ₊₁)/2)

    Each step is a root node: its derivative is one linear solve, however many iterations the root took.

    Parameters
    ----------
    root
        How to solve for yₙ₊₁, with its tolerances.

    Source: Hairer, Lubich and Wanner, *Geometric Numerical Integration*, 2nd ed., eq. (I.1.7) and Theorem IV.2.1,
    doi:10.1007/3-540-30666-8.
    """

    root: AbstractRootMethod = eqx.field(default_factory=Newton)
    order: ClassVar[int] = 2
    stages: ClassVar[int] = 1
    solves: ClassVar[bool] = True
    has_pullback: ClassVar[bool] = True

    def resolve(self, dtype: jnp.dtype) -> "ImplicitMidpoint":
        """Fill in the tolerances of the root solver."""
        return ImplicitMidpoint(self.root.resolve(dtype))

    def step(self, field: Field, t: jax.Array, dt: jax.Array, y: Any, memory: Any) -> StepResult:
        """Solve for the next state, starting from an explicit Euler step."""
        del memory
        guess = add_scaled(y, dt, field.rate(t, y))
        y_next, (_, (status, stats)) = self._node(lambda _: field)(guess, (y, t, dt, ()))
        return StepResult(y_next, (), status, stats["iterations"])

    def pullback(
        self,
        fill: Callable[[Any], Field],
        fields: Any,
        t: jax.Array,
        dt: jax.Array,
        y: Any,
        y_next: Any,
        y_bar: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """One transposed solve at the two end states; the step itself is not solved again."""
        return self._node(fill).pullback(y_next, (y, t, dt, fields), y_bar)

    def _node(self, fill: Callable[[Any], Field]) -> implicit_root:
        def residual(y_next: Any, params: Any) -> Any:
            y, t, dt, fields = params
            middle = jax.tree.map(lambda a, b: (a + b) / 2, y, y_next)
            end = add_scaled(y, dt, fill(fields).rate(t + dt / 2, middle))
            return jax.tree.map(jnp.subtract, y_next, end)

        return implicit_root(residual, root_solver(self.root), linear_solver(self.root.linear))
