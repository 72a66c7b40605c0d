"""Bytes that a loop's gradient needs, by abstract evaluation of one step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import Tracer

from ..adjoint._trace import replaced
from ._leaf import LinearisedStep


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of a step: its state, the residuals of its derivative, the scratch of its pullback, its outputs."""

    state: int
    residuals: int
    scratch: int
    outputs: int


def bytes_of(avals: Sequence[Any]) -> int:
    """Bytes of arrays or abstract values."""
    typed = (a if hasattr(a, "dtype") else jax.typeof(a) for a in avals)
    return sum(int(a.size) * a.dtype.itemsize for a in typed)


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def residual_bytes(body: jex.ClosedJaxpr, num_consts: int, num_carry: int) -> int:
    """Bytes that storing everything keeps of each step, for `step_bytes`' arguments; nothing is compiled."""
    ends, groups = _groups(body, num_consts, num_carry)
    return bytes_of(LinearisedStep(_differentiated(body, ends, ()), *groups).kept_avals)


def step_bytes(body: jex.ClosedJaxpr, num_consts: int, num_carry: int, still: Sequence[int] = ()) -> StepBytes:
    """The bytes of one step of a scan, whose jaxpr takes constants, carry and data.

    `still` are the places among its inputs of those that carry no derivatives.
    """
    ends, (consts, carry, data) = _groups(body, num_consts, num_carry)
    outputs = body.out_avals[num_carry:]
    bars = [a for a in body.out_avals if jnp.issubdtype(a.dtype, jnp.inexact)]
    differentiated = _differentiated(body, ends, still)

    def pull(args: Any, bars: Any) -> Any:
        new, function = differentiated(*args)
        return new, function(bars)

    # What the compiler makes of one pullback cannot be told from outside; it is compiled to see.
    compiled = jax.jit(pull).lower((consts, carry, data), list(map(_struct, bars))).compile()
    temporaries = compiled.memory_analysis()
    scratch = 0 if temporaries is None else int(temporaries.temp_size_in_bytes)
    residuals = LinearisedStep(differentiated, consts, carry, data).kept_avals
    return StepBytes(bytes_of(carry), bytes_of(residuals), scratch, bytes_of(outputs))


def _groups(body: jex.ClosedJaxpr, num_consts: int, num_carry: int) -> tuple[tuple[int, int], list[list[Any]]]:
    avals = list(map(_struct, body.in_avals))
    ends = num_consts, num_consts + num_carry
    return ends, [avals[: ends[0]], avals[ends[0] : ends[1]], avals[ends[1] :]]


def still_inputs(args: Sequence[Any], num_consts: int, num_carry: int) -> tuple[int, ...]:
    """Places of constants and data with plain numbers: what is being differentiated is traced."""
    state = range(num_consts, num_consts + num_carry)
    return tuple(i for i, a in enumerate(args) if i not in state and not isinstance(a, Tracer))


def _differentiated(body: jex.ClosedJaxpr, ends: tuple[int, int], still: Sequence[int]) -> Any:
    """The step with its pullback, for all inputs that carry derivatives."""

    def step(consts: Any, carry: Any, data: Any) -> Any:
        args = [*consts, *carry, *data]
        active = [i for i, a in enumerate(args) if i not in still and jnp.issubdtype(a.dtype, jnp.inexact)]

        def function(*values: Any) -> Any:
            out = jex.jaxpr_as_fun(body)(*replaced(args, active, values))
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)], out[: ends[1] - ends[0]]

        _, pull, new = jax.vjp(function, *(args[i] for i in active), has_aux=True)
        return new, pull

    return step
