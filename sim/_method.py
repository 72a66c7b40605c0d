"""What an integrator is to the time loop."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ..adjoint import Status

Rate = Callable[[Any, Any], Any]


class Field(NamedTuple):
    """The equations that a step evaluates, with the parameters filled in.

    `rate(t, y)` serves every method; `acceleration(t, q)` is for methods that need second-order systems.
    """

    rate: Rate
    acceleration: Rate


class StepResult(NamedTuple):
    """The next state, what the method carries to the next step, and how the step went."""

    y: Any
    memory: Any
    status: Any
    iterations: Any


class AbstractMethod(eqx.Module):
    """One-step methods: y(t) → y(t + dt)."""

    order: ClassVar[int]
    stages: ClassVar[int]
    needs_acceleration: ClassVar[bool] = False
    solves: ClassVar[bool] = False
    has_pullback: ClassVar[bool] = False

    def resolve(self, dtype: jnp.dtype) -> "AbstractMethod":
        """The method with the tolerances that it uses in `dtype`."""
        del dtype
        return self

    def begin(self, field: Field, t: jax.Array, y: Any) -> Any:
        """What the method carries from step to step beside y (first-same-as-last evaluations)."""
        del field, t, y
        return ()

    @abc.abstractmethod
    def step(self, field: Field, t: jax.Array, dt: jax.Array, y: Any, memory: Any) -> StepResult:
        """Advance from t to t + dt."""

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
        """Cotangents of (y, t, dt, fields) from those of the next state, for methods with `has_pullback`.

        `fill(fields)` gives the equations; `y_next` is what `step` returned, and is not computed again.
        """
        raise NotImplementedError


def explicit_result(y: Any, memory: Any = ()) -> StepResult:
    """The result of a step that solves nothing and so cannot fail by itself."""
    return StepResult(y, memory, Status.converged, jnp.zeros((), jnp.int32))


def add_scaled(y: Any, c: Any, k: Any) -> Any:
    """Y + c k on pytrees, in the dtype of y."""
    return jax.tree.map(lambda y, k: (y + jnp.asarray(c, y.real.dtype) * k).astype(y.dtype), y, k)
