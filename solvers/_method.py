"""The verbs of the two families of methods."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ..adjoint import Status


class Outcome(NamedTuple):
    """What a method reports: the value, its status and its counts."""

    value: Any
    status: Status
    stats: dict[str, Any]


class AbstractLinearMethod(eqx.Module):
    """A way to solve A x = b, where A is a function on pytrees."""

    @abc.abstractmethod
    def resolve(self, dtype: jnp.dtype) -> "AbstractLinearMethod":
        """The method with the tolerances that it uses in `dtype`; `ValueError` for one out of reach."""

    @abc.abstractmethod
    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Solve A x = b. Tolerances are relative to the norm of `reference` (b itself, as a rule)."""


class AbstractRootMethod(eqx.Module):
    """A way to solve F(u) = 0, F from a pytree to a pytree of the same structure."""

    linear: eqx.AbstractVar[AbstractLinearMethod]

    @abc.abstractmethod
    def resolve(self, dtype: jnp.dtype) -> "AbstractRootMethod":
        """The method with the tolerances that it uses in `dtype`; `ValueError` for one out of reach."""

    @abc.abstractmethod
    def solve(self, f: Callable[[Any], Any], guess: Any) -> Outcome:
        """Find a root near `guess`."""


def status_where(pairs: list[tuple[jax.Array, Any]], otherwise: Any) -> Status:
    """The status of the first condition that holds."""
    status = otherwise
    for condition, value in reversed(pairs):
        status = Status.where(condition, value, status)
    return status


def all_finite(x: jax.Array) -> jax.Array:
    """Whether a flat array holds neither infinities nor NaN."""
    return jnp.all(jnp.isfinite(x))
