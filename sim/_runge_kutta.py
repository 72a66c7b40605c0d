"""Explicit Runge-Kutta methods: the stepping once, the tableaux as data."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from ._method import AbstractMethod, Field, Rate, StepResult, explicit_result


@dataclasses.dataclass(frozen=True, eq=False)
class Tableau:
    """Coefficients of an explicit Runge-Kutta method.

    kᵢ = f(t + cᵢ h, y + h Σ_{j<i} aᵢⱼ kⱼ),   y⁺ = y + h Σ bᵢ kᵢ.
    """

    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    c: tuple[float, ...]


# A state of several small leaves is stepped as one vector: sums over stages then compile to one kernel each instead
# of one a leaf. On six bodies (two leaves of 15 numbers) the pullback of a twelve-stage step fell from 93 to 24 μs.
# Above this size the copies would cost more than the kernels they save.
_PACKED_SIZE = 4096


class AbstractRungeKutta(AbstractMethod):
    """Explicit Runge-Kutta stepping for a tableau."""

    tableau: ClassVar[Tableau]

    def step(self, field: Field, t: jax.Array, dt: jax.Array, y: Any, memory: Any) -> StepResult:
        """One step of the tableau."""
        del memory
        leaves = jax.tree.leaves(y)
        rate, unpack = field.rate, _identity
        if len(leaves) > 1 and sum(x.size for x in leaves) <= _PACKED_SIZE and len({x.dtype for x in leaves}) == 1:
            y, unpack = ravel_pytree(y)
            rate = _packed(field.rate, unpack)
        ks: list[Any] = []
        for row, c in zip(self.tableau.a, self.tableau.c, strict=True):
            ks.append(rate(t + c * dt, _combine(y, dt, row, ks)))
        return explicit_result(unpack(_combine(y, dt, self.tableau.b, ks)))


def _identity(y: Any) -> Any:
    return y


def _packed(rate: Rate, unpack: Callable[[Any], Any]) -> Rate:
    return lambda t, y: ravel_pytree(rate(t, unpack(y)))[0]


def _combine(y: Any, dt: jax.Array, weights: tuple[float, ...], ks: list[Any]) -> Any:
    """Y + h Σ wᵢ kᵢ, without the terms whose weight is zero."""
    used = [(w, k) for w, k in zip(weights, ks, strict=True) if w != 0]
    if not used:
        return y

    def leaf(y: jax.Array, *k: jax.Array) -> jax.Array:
        total = sum(np.asarray(w, y.real.dtype) * x for (w, _), x in zip(used, k, strict=True))
        return y + dt.astype(y.real.dtype) * total

    return jax.tree.map(leaf, y, *(k for _, k in used))
