"""The user's equations, traced once and filled with parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval as pe

from ..adjoint._trace import Traced, define_by_run, partition, state_dtype, trace_unknown
from ._method import AbstractMethod, Field
from ._systems import SecondOrder


class TracedField(NamedTuple):
    """Equations of motion as a jaxpr; `consts` are captured arrays, `leaves` the parameters."""

    traced: Traced | None
    system: Any
    params: Any
    consts: list[Any]
    leaves: list[Any]

    def fill(self, inputs: Sequence[Any] | None = None) -> Field:
        """The equations with captured arrays and parameters filled in."""
        inputs = [*self.consts, *self.leaves] if inputs is None else inputs

        def evaluate(*args: Any) -> list[Any]:
            if self.traced is None:
                return jax.tree.leaves(_call(self.system, self.params, *args))
            count = len(self.consts)
            t, *state = args
            return self.traced.evaluate(inputs[:count], [*jax.tree.leaves(state), t, *inputs[count:]])

        if isinstance(self.system, SecondOrder):
            return _second_order(evaluate)
        return Field(lambda t, y: _like(y, evaluate(t, y)), _no_acceleration)


def _no_acceleration(t: Any, q: Any) -> Any:
    del t, q
    message = "a first-order system has no acceleration; methods that need one set `needs_acceleration`."
    raise TypeError(message)


def _second_order(evaluate: Any) -> Field:
    def rate(t: Any, y: Any) -> Any:
        q, v = y
        return _like(y, [*jax.tree.leaves(v), *evaluate(t, q, v)])

    # The velocity slot is never read: `trace_field` has checked that.
    return Field(rate, lambda t, q: _like(q, evaluate(t, q, q)))


def _like(y: Any, flat: Sequence[Any]) -> Any:
    leaves, tree = jax.tree.flatten(y)
    return jax.tree.unflatten(tree, [f.astype(x.dtype) for x, f in zip(leaves, map(jnp.asarray, flat), strict=True)])


def _call(system: Any, params: Any, *args: Any) -> Any:
    function: Any = system.acceleration if isinstance(system, SecondOrder) else system.rate
    return function(*args, params)


def trace_field(system: Any, method: AbstractMethod, t0: Any, y0: Any, params: Any) -> tuple[TracedField, Any]:
    """Trace the system at the initial state (abstractly: it is not evaluated there) and check what it returns.

    The initial state is returned too: inside `shard_map` it may have to be marked as varying.
    """
    numbers, static = partition(params)
    second = isinstance(system, SecondOrder)
    if method.needs_acceleration and not second:
        message = (
            f"{type(method).__name__} needs positions and velocities apart. Expected sim.SecondOrder(acceleration) "
            f"with y0=(q, v), got sim.{type(system).__name__}. Rewrite the system, or use a Runge-Kutta method."
        )
        raise TypeError(message)
    t = jnp.asarray(t0).astype(jnp.finfo(state_dtype(y0)).dtype)
    state = tuple(y0) if second else (y0,)
    if define_by_run():
        return TracedField(None, system, params, [], []), y0

    def of_numbers(state: Any, t: Any, numbers: Any) -> Any:
        return _call(system, eqx.combine(numbers, static), t, *state)

    traced, state = trace_unknown(of_numbers, state, t, numbers)
    _check_result("acceleration" if second else "rate", state[0], traced)
    if method.needs_acceleration:
        _check_velocity_unused(type(method).__name__, traced, state)
    y0 = jax.tree.unflatten(jax.tree.structure(y0), jax.tree.leaves(state))
    return TracedField(traced, system, params, traced.consts, jax.tree.leaves(numbers)), y0


def _check_result(name: str, y: Any, traced: Traced) -> None:
    expected_tree = jax.tree.structure(y)
    expected = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(y)]
    got = [f"{a.dtype}{list(a.shape)}" for a in traced.out_avals]
    like = "q" if name == "acceleration" else "y"
    if traced.out_tree != expected_tree:
        message = (
            f"`{name}` must return the structure of `{like}`. Expected {expected_tree}, got {traced.out_tree}. "
            "Return the derivatives in the same containers and order as the state."
        )
        raise ValueError(message)
    shapes = [x.shape for x in jax.tree.leaves(y)]
    if shapes != [a.shape for a in traced.out_avals]:
        message = (
            f"`{name}` must return the shapes of `{like}`. Expected {expected}, got {got}. Nothing is broadcast: "
            "check sums, indices and added axes."
        )
        raise ValueError(message)
    for x, a in zip(jax.tree.leaves(y), traced.out_avals, strict=True):
        if jnp.iscomplexobj(a) and not jnp.iscomplexobj(x):
            message = (
                f"`{name}` must return real values for a real state. Expected {expected}, got {got}. Start from a "
                "complex `y0`, or take the real part."
            )
            raise ValueError(message)


def _check_velocity_unused(method: str, traced: Traced, state: Any) -> None:
    jaxpr = traced.jaxpr
    used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    size = len(jax.tree.leaves(state[0]))
    if any(used[size : 2 * size]):
        message = (
            f"{method} needs an acceleration that does not depend on the velocity: expected a(t, q, params), but "
            "`acceleration` reads `v`. Use a Runge-Kutta method or ImplicitMidpoint for drag and gyroscopic forces."
        )
        raise ValueError(message)
