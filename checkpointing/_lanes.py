"""Lanes of a batched loop that end at different steps share one schedule.

A loop of unknown length, batched, runs until its last lane has ended; the state of a lane that ended earlier stands
still. `while_running` says so in the step itself, so that the schedule (counts, slots, positions) keeps no batch axis
and no select ever surrounds a buffer of snapshots.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

running_p = jex.Primitive("running")


def while_running(step: Any, length: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """`new` in lanes where `step` < `length`, else `old`; without lanes `new`, since no step beyond the last is run."""
    return [running_p.bind(step, length, a, b) for a, b in zip(new, old, strict=True)]


def _abstract_eval(step: Any, length: Any, new: Any, old: Any) -> Any:
    del step, length, old
    return new


def _batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    step, length, *values = args
    (size, *_) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    new, old = (batching.bdim_at_front(x, d, size) for x, d in zip(values, dims[2:], strict=True))
    if dims[1] is None:
        return running_p.bind(step, length, new, old), 0
    lanes = jnp.moveaxis(length, dims[1], 0)
    return jax.vmap(lambda n, a, b: jnp.where(step < n, a, b))(lanes, new, old), 0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = running_p.bind(*primals)
    dots = tangents[2:]
    if all(isinstance(t, ad.Zero) for t in dots):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, running_p.bind(*primals[:2], *map(ad.instantiate_zeros, dots))


def _transpose(ct: Any, step: Any, length: Any, new: Any, old: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None, None, *(ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (new, old))]
    zero = jnp.zeros_like(ct)
    return [
        None,
        None,
        running_p.bind(step, length, ct, zero) if ad.is_undefined_primal(new) else None,
        running_p.bind(step, length, zero, ct) if ad.is_undefined_primal(old) else None,
    ]


def _new(*args: Any) -> Any:
    return args[2]


running_p.def_impl(_new)
running_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(running_p, mlir.lower_fun(_new, multiple_results=False))
batching.primitive_batchers[running_p] = _batch
ad.primitive_jvps[running_p] = _jvp
ad.primitive_transposes[running_p] = _transpose
