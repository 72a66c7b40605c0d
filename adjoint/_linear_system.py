"""A x = b inside a node's derivative, as a solve that can be differentiated again.

    x = A(r)⁻¹ b,   dx = A⁻¹ (db - dA x),   transpose in db: A⁻ᵀ

A is given by its action and that of its transpose, both functions of residuals r, so that no derivative ever looks
inside the solver.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._node import linear_node
from ._status import poison
from ._tie import tie
from ._trace import instantiated, replaced

Arrays = list[Any]
Action = Callable[[Sequence[Any], Arrays], Arrays]
Solve = Callable[[Sequence[Any], Callable[[Arrays], Arrays], Arrays], tuple[Arrays, jax.Array]]


class LinearSystem(NamedTuple):
    """The actions of A and Aᵀ, `(residuals, v) -> A v`, and for each a solver `(residuals, matvec, b) -> (x, ok)`."""

    action: Action
    transposed_action: Action
    solver: Solve
    transposed_solver: Solve

    def transposed(self) -> "LinearSystem":
        """The system Aᵀ x = b."""
        return LinearSystem(self.transposed_action, self.action, self.transposed_solver, self.solver)

    def solve(self, residuals: Sequence[Any], b: Sequence[Any]) -> Arrays:
        """Solve A x = b; x is NaN where the solver missed its tolerance."""
        return _solve_node(self)(list(residuals), list(b))


def _solve_node(system: LinearSystem) -> Callable[[Arrays, Arrays], Arrays]:
    def linear_solve(residuals: Arrays, b: Arrays) -> Arrays:
        x, ok = system.solver(residuals, lambda v: system.action(residuals, v), b)
        return tie(poison(x, jnp.logical_not(ok)), residuals, b)

    def rule(primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
        residuals, b = primals
        residuals_dot, b_dot = tangents
        x = node(residuals, b)
        rhs = list(map(instantiated, b_dot))
        moving = [i for i, t in enumerate(residuals_dot) if not isinstance(t, SymbolicZero)]
        if moving:

            def of_moving(*values: Any) -> Arrays:
                return system.action(replaced(residuals, moving, values), x)

            at, dots = ([values[i] for i in moving] for values in (residuals, residuals_dot))
            rhs = [a - c for a, c in zip(rhs, jax.jvp(of_moving, at, dots)[1], strict=True)]
        x_dot = linear_node(
            lambda r, c: system.solve(r, c),
            lambda r, c: system.transposed().solve(r, c),
            residuals,
            rhs,
            "linear_solve",
        )
        return x, x_dot

    node = jax.custom_jvp(linear_solve)
    node.defjvp(rule, symbolic_zeros=True)
    return node
