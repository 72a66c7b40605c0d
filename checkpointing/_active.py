"""Which inputs of a rollout carry derivatives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..adjoint._trace import differentiable, instantiated

Arrays = list[Any]


@dataclasses.dataclass(frozen=True)
class Active:
    """Positions of what carries tangents: in the constants, in the carry (all that can) and in the per-step data."""

    consts: tuple[int, ...]
    carry: tuple[int, ...]
    xs: tuple[int, ...]

    @staticmethod
    def of(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> "Active":
        """From tangents of constants and data, and the initial state."""

        def nonzero(tangents: Sequence[Any]) -> tuple[int, ...]:
            return tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))

        carry = tuple(i for i, x in enumerate(init) if differentiable(x))
        return Active(nonzero(consts), carry, nonzero(xs))

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """Positions in constants, carry and data."""
        return self.consts, self.carry, self.xs

    def union(self, other: "Active") -> "Active":
        """What is active in either."""
        return Active(tuple(sorted({*self.consts, *other.consts})), self.carry, tuple(sorted({*self.xs, *other.xs})))

    def pick(self, consts: Sequence[Any], carry: Sequence[Any] | None, xs: Sequence[Any]) -> Arrays:
        """The active entries as one list: constants, per-step data, then (if given) the carry."""
        picked = [consts[i] for i in self.consts] + [xs[i] for i in self.xs]
        return picked + ([] if carry is None else [carry[i] for i in self.carry])

    def split(self, flat: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        """Undo `pick`: constants, carry, xs."""
        a, b = len(self.consts), len(self.consts) + len(self.xs)
        return list(flat[:a]), list(flat[b:]), list(flat[a:b])


def active_tangents(tangents: Sequence[Any]) -> Arrays:
    """Tangents of the entries that carry derivatives, as arrays."""
    return [instantiated(t) for t in tangents if jnp.issubdtype(t.dtype, jnp.inexact)]
