"""Steps of a method on flat lists, as a rollout wants them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..adjoint import Status, Step, failed
from ..adjoint._trace import state_dtype
from ._field import TracedField
from ._grid import Grid, step_times
from ._method import AbstractMethod

Flat = list[Any]


def clock_of(t: Any, y: Any) -> jax.Array:
    """Time in the state's own precision."""
    return jnp.asarray(t).astype(jnp.finfo(state_dtype(y)).dtype)


class Stepper(Step):
    """A method's step as a `Step`: x is the flat state, `inputs` = (constants, [step index]).

    The constants are what the system captured, the parameters, and the clock (t0, span, dt). The flat state holds y,
    what the method carries from step to step, and, where the method solves, its first bad status and its iterations.
    """

    def __init__(self, method: AbstractMethod, field: TracedField, n: int, y0: Any, memory: Any, saving: bool):
        self.method, self.field, self.n, self.saving = method, field, n, saving
        self.tree = jax.tree.structure((y0, memory, self.fresh_report() if method.solves else ()))
        self.size = len(jax.tree.leaves(y0))

    def fresh_report(self) -> tuple[Status, Any]:
        """The status and the iterations before the first step."""
        return Status.converged, jnp.zeros((), jnp.int32)

    def pack(self, y: Any, memory: Any, report: Any) -> Flat:
        """The flat state."""
        return jax.tree.leaves((y, memory, report if self.method.solves else ()))

    def unpack(self, x: Sequence[Any]) -> tuple[Any, Any, Any]:
        """State, memory and report of a flat state."""
        y, memory, report = jax.tree.unflatten(self.tree, list(x))
        return y, memory, report if self.method.solves else self.fresh_report()

    def _times(self, y: Any, clock: Any, i: Any) -> tuple[jax.Array, jax.Array]:
        t, h = step_times(Grid(self.n, *clock), i)
        return clock_of(t, y), clock_of(h, y)

    def advance(self, x: Flat, inputs: tuple[Flat, Flat]) -> Flat:
        """Step i. A failed stage does not stop the run; its status is carried to the end and reported there."""
        (*fields, t0, span, dt), (i,) = inputs
        y, memory, (status, iterations) = self.unpack(x)
        t, h = self._times(y, (t0, span, dt), i)
        result = self.method.step(self.field.fill(fields), t, h, y, memory)
        report = (
            Status.where(failed(status), status, result.status),
            iterations + jnp.asarray(result.iterations, jnp.int32),
        )
        return self.pack(result.y, result.memory, report)

    def pullback(self, x: Flat, x_next: Flat, inputs: tuple[Flat, Flat], cotangent: Flat) -> tuple[Flat, Any]:
        """The adjoint of step i from its two end states, by the method's own rule."""
        (*fields, t0, span, dt), (i,) = inputs
        y, y_next = self.unpack(x)[0], self.unpack(x_next)[0]
        y_bar = jax.tree.unflatten(jax.tree.structure(y), cotangent[: self.size])
        (t, h), of_clock = jax.vjp(lambda clock: self._times(y, clock, i), (t0, span, dt))
        y_bar, t_bar, h_bar, fields_bar = self.method.pullback(self.field.fill, fields, t, h, y, y_next, y_bar)
        (clock_bar,) = of_clock((t_bar, h_bar))
        none = [None] * (len(x) - self.size)
        return [*jax.tree.leaves(y_bar), *none], ([*fields_bar, *clock_bar], [None])

    def rollout_step(self, consts: Flat, carry: Flat, xs: Flat) -> tuple[Flat, Flat]:
        """`advance` with the outputs that a rollout saves."""
        x_next = self.advance(carry, (consts, xs))
        return x_next, x_next[: self.size] if self.saving else []

    def rollout_pullback(
        self, consts: Flat, carry: Flat, xs: Flat, carry_next: Flat, carry_bar: Flat, ys_bar: Flat
    ) -> tuple[Flat, Flat, Flat]:
        """`pullback` with the cotangents of the saved outputs added to those of the state."""
        bars = list(carry_bar[: self.size])
        if self.saving:
            bars = [a + b for a, b in zip(bars, ys_bar, strict=True)]
        x_bar, (consts_bar, xs_bar) = self.pullback(carry, carry_next, (consts, xs), bars)
        return consts_bar, x_bar, xs_bar

    def partial(self, t: Any, h: Any, y: Any) -> tuple[Any, Status]:
        """One shorter step from a grid point to a save time, and its status."""
        field, t = self.field.fill(), clock_of(t, y)
        result = self.method.step(field, t, clock_of(h, y), y, self.method.begin(field, t, y))
        return result.y, result.status
