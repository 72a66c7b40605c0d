"""The guard: derivatives of a failed solve are an error, never a finite number.

The implicit function theorem holds at a root only. At a point that misses its tolerance the formula still
gives a number, which looks fine and is wrong. `guard_tangents` is the identity on values whose tangents and
cotangents

- raise `SolveError` when the failure is known while tracing (an eager gradient),
- raise at run time inside a compiled gradient,
- are NaN for the failed lanes only under `vmap` (and for the failed devices inside `shard_map`), where raising
  would take the good lanes along.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from ._status import SolveError, Status, fail_at_run_time, failed, poison, sentence
from ._tie import tie

guard_p = jex.Primitive("guard")

_SENTENCE = "a derivative was asked for at a point where the solve failed; it would be wrong. "


def guard(value: jax.Array, bad: jax.Array, message: str) -> jax.Array:
    """Identity, linear in `value`, that fails loudly where `bad` holds."""
    if not isinstance(bad, Tracer):
        if bool(bad):
            raise SolveError(message)
        return value
    return guard_p.bind(bad, value, message=message)


def _lowered(bad: jax.Array, value: jax.Array, *, message: str) -> jax.Array:
    return fail_at_run_time(value, bad, message)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, message: str) -> tuple[jax.Array, int]:
    bad, value = args
    (size, *_) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    value = batching.bdim_at_front(value, dims[1], size)
    if dims[0] is None:
        return guard(value, bad, message), 0
    return jax.vmap(poison)(value, jnp.moveaxis(bad, dims[0], 0)), 0


def _abstract_eval(bad: Any, value: Any, *, message: str) -> Any:
    del bad, message
    return value


guard_p.def_impl(lambda bad, value, *, message: guard(value, bad, message))
guard_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(guard_p, mlir.lower_fun(_lowered, multiple_results=False))
ad.deflinear2(guard_p, lambda ct, bad, _, *, message: [None, guard(ct, bad, message)])
batching.primitive_batchers[guard_p] = _batch


def _guard_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, message: str) -> tuple[Any, Any]:
    bad, value = primals
    out = guard_p.bind(bad, value, message=message)
    dot = tangents[1]
    return out, dot if isinstance(dot, ad.Zero) else guard_p.bind(bad, dot, message=message)


ad.primitive_jvps[guard_p] = _guard_jvp


def guard_tangents(value: Any, status: Status, what: str) -> Any:
    """Return `value` unchanged; differentiating it where `status` is a failure is an error."""

    @jax.custom_jvp
    def identity(value: Any, code: Any) -> Any:
        return tie(value, value, code)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        value, code = primals
        here = eqx.tree_at(lambda s: jax.tree.leaves(s)[0], status, code)
        bad = failed(here)
        known = not isinstance(bad, Tracer)
        message = f"{what}: {_SENTENCE}{sentence(here) if known else 'Look at `.status` for the reason.'}"

        def guarded(dot: Any) -> Any:
            return dot if isinstance(dot, SymbolicZero) else guard(dot, jnp.any(bad) if known else bad, message)

        return value, jax.tree.map(guarded, tangents[0])

    identity.defjvp(rule, symbolic_zeros=True)
    return identity(value, jax.tree.leaves(status)[0])
