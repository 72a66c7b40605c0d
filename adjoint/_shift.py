"""A periodic shift as a node: its transpose is the opposite shift.

JAX writes `jnp.roll` as two slices and a concatenation, and transposes those to pads and sums, which the compiler fuses
badly: most of the time of a stencil's pullback. `with_shifts` finds such pairs in a traced function and puts one
equation in their place that knows its transpose. Values are the same bit for bit.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import ad, batching, mlir

shift_p = jex.Primitive("shift")

# Equations that hold jaxprs of their own, with the same inputs and outputs after the exchange.
_HOLDERS = {"jit", "pjit", "scan", "while", "cond"}


def _lowered(x: Any, *, axis: int, by: int) -> Any:
    size = x.shape[axis]
    first = lax.slice_in_dim(x, size - by, size, axis=axis)
    return lax.concatenate([first, lax.slice_in_dim(x, 0, size - by, axis=axis)], axis)


def shift(x: Any, axis: int, by: int) -> Any:
    """Move entries `by` places along a periodic axis."""
    by %= x.shape[axis]
    return shift_p.bind(x, axis=axis, by=by) if by else x


def _batch(args: Sequence[Any], dims: Sequence[int], *, axis: int, by: int) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    return shift_p.bind(x, axis=axis + (dim <= axis), by=by), dim


shift_p.def_impl(jax.jit(_lowered, static_argnames=("axis", "by")))
shift_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(shift_p, mlir.lower_fun(_lowered, multiple_results=False))
ad.deflinear2(shift_p, lambda ct, _, *, axis, by: [shift(ct, axis, -by)])
batching.primitive_batchers[shift_p] = _batch


@functools.lru_cache(maxsize=256)
def with_shifts(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same function with each periodic shift as one equation; itself if there is none."""
    makers = {v: eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "slice" for v in eqn.outvars}
    eqns = [_exchanged(eqn, makers) for eqn in closed.jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, closed.jaxpr.eqns, strict=True)):
        return closed
    return jex.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def _exchanged(eqn: jex.JaxprEqn, makers: dict[Any, jex.JaxprEqn]) -> jex.JaxprEqn:
    found = _shifted(eqn, makers)
    if found:
        x, axis, by = found
        return eqn.replace(primitive=shift_p, invars=[x], params={"axis": axis, "by": by})
    if eqn.primitive.name not in _HOLDERS:
        return eqn
    params = {name: _exchanged_inside(value) for name, value in eqn.params.items()}
    same = all(params[name] is value for name, value in eqn.params.items())
    return eqn if same else eqn.replace(params=params)


def _exchanged_inside(value: Any) -> Any:
    if isinstance(value, jex.ClosedJaxpr):
        return with_shifts(value)
    if type(value) is not tuple:
        return value
    new = tuple(map(_exchanged_inside, value))
    return value if all(a is b for a, b in zip(new, value, strict=True)) else new


def _shifted(eqn: jex.JaxprEqn, makers: dict[Any, jex.JaxprEqn]) -> tuple[Any, int, int] | None:
    """The variable, axis and distance of a shift that a concatenation of two slices makes; None if it makes none."""
    if eqn.primitive.name != "concatenate" or len(eqn.invars) != 2:
        return None
    pair = [makers[v] for v in eqn.invars if isinstance(v, jex.Var) and v in makers]
    if len(pair) != 2 or pair[0].invars[0] is not pair[1].invars[0]:
        return None
    x: Any = pair[0].invars[0]
    first, out = (v.aval for v in (*eqn.invars[:1], *eqn.outvars))
    axis, shape = eqn.params["dimension"], _shape(out)
    by = _shape(first)[axis]
    starts = [[0] * len(shape), [0] * len(shape)]
    starts[0][axis] = shape[axis] - by
    fits = all(list(p.params["start_indices"]) == s for p, s in zip(pair, starts, strict=True))
    whole = _shape(x.aval) == shape and all(stride == 1 for p in pair for stride in p.params["strides"] or ())
    return (x, axis, by) if whole and fits else None


def _shape(aval: Any) -> tuple[int, ...]:
    return tuple(aval.shape)
