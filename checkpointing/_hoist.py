"""What a step computes from constants alone is computed once, before the loop; and so is its derivative.

Else every step's pullback would repeat it: a coefficient made of parameters, and above all the sum over a state to
which the cotangent of a number reduces. Here the cotangent of the array that the number is broadcast to is added up
over the steps, and reduced once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import eval_jaxpr

from ..adjoint._loops import in_shard_map
from ._memory import SMALL_STATE, bytes_of

_ELEMENTWISE = {"add", "sub", "mul", "div", "max", "min", "pow"}
Values = dict[Any, Any]


class Hoisted(NamedTuple):
    """A step whose constants are followed by the values that `prepare(consts)` gives."""

    body: jex.ClosedJaxpr
    num_consts: int
    prepare: Callable[[Sequence[Any]], list[Any]]


def hoisted(body: jex.ClosedJaxpr, num_consts: int) -> Hoisted:
    """The same step, for larger constants; itself if it computes nothing from constants alone."""
    if in_shard_map():  # whose types say where values vary: rebuilding the step would lose them
        return Hoisted(body, num_consts, _nothing)
    return _hoisted(body, num_consts)


def _nothing(_: Sequence[Any]) -> list[Any]:
    return []


@functools.lru_cache(maxsize=256)
def _hoisted(body: jex.ClosedJaxpr, num_consts: int) -> Hoisted:
    jaxpr = body.jaxpr
    fixed = set(jaxpr.invars[:num_consts])
    lifted = []
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if isinstance(v, jex.Var)]
        if inputs and not eqn.effects and all(v in fixed for v in inputs) and _small(eqn.outvars):
            lifted.append(eqn)
            fixed.update(eqn.outvars)
    rest = [eqn for eqn in jaxpr.eqns if not any(eqn is other for other in lifted)]
    wide = list(dict.fromkeys(pair for eqn in rest for pair in _broadcasts(eqn, fixed)))
    made = {v for eqn in lifted for v in eqn.outvars}
    used = [v for eqn in rest for v in eqn.invars] + list(jaxpr.outvars)
    whole = list(dict.fromkeys(v for v in used if isinstance(v, jex.Var) and v in made))
    if not wide and not whole:
        return Hoisted(body, num_consts, _nothing)

    def prepare(consts: Sequence[Any]) -> list[Any]:
        values = dict(zip(jaxpr.invars[:num_consts], consts, strict=True))
        for eqn in lifted:
            _extend(values, jaxpr, eqn, _read(values, eqn.invars))
        return [values[v] for v in whole] + [jnp.broadcast_to(values[v], shape) for v, shape in wide]

    def step(*args: Any) -> list[Any]:
        consts, ready, others = args[:num_consts], args[num_consts:end], args[end:]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *consts, *others], strict=True))
        values.update(zip(whole, ready, strict=False))
        arrays = dict(zip(wide, ready[len(whole) :], strict=True))
        for eqn in rest:
            inputs = _read(values, eqn.invars)
            for v, shape in _broadcasts(eqn, fixed):
                inputs[list(eqn.invars).index(v)] = arrays[v, shape]
            _extend(values, jaxpr, eqn, inputs)
        return _read(values, jaxpr.outvars)

    avals = list(map(_struct, body.in_avals))
    ready = jax.eval_shape(prepare, avals[:num_consts])
    end = num_consts + len(ready)
    rebuilt = jax.make_jaxpr(step)(*avals[:num_consts], *ready, *avals[num_consts:])
    return Hoisted(rebuilt, end, prepare)


def _small(variables: Sequence[Any]) -> bool:
    return bytes_of([v.aval for v in variables]) <= SMALL_STATE


def _broadcasts(eqn: jex.JaxprEqn, fixed: set[Any]) -> list[tuple[Any, tuple[int, ...]]]:
    """(number, shape) for the operands of an elementwise equation that are broadcast to its result."""
    if eqn.primitive.name not in _ELEMENTWISE or not _small(eqn.outvars):
        return []
    shape = tuple(eqn.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    numbers = [v for v in eqn.invars if isinstance(v, jex.Var) and v in fixed and v.aval.shape == ()]  # pyright: ignore
    return [(v, shape) for v in numbers if shape and jnp.issubdtype(v.aval.dtype, jnp.inexact)]  # pyright: ignore


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _read(values: Values, atoms: Sequence[Any]) -> list[Any]:
    return [atom.val if isinstance(atom, jex.Literal) else values[atom] for atom in atoms]


def _extend(values: Values, jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, inputs: list[Any]) -> None:
    """Evaluate one equation of a jaxpr."""
    if eqn.primitive.name in _ELEMENTWISE:
        out = [eqn.primitive.bind(*inputs, **eqn.params)]
    else:
        given = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if isinstance(v, jex.Var)}
        unnamed = jaxpr.debug_info.with_unknown_names()
        parts = {"constvars": [], "invars": list(given), "outvars": list(eqn.outvars), "eqns": [eqn]}
        alone = jaxpr.replace(**parts, effects=eqn.effects, debug_info=unnamed)
        out = eval_jaxpr(alone, (), *given.values())
    values.update(zip(eqn.outvars, out, strict=True))
