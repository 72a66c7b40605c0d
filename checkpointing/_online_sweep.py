"""The forward sweep of a loop whose length shows only when it ends, as one primitive with its own batching rule.

Batched, the loop runs until its last lane has ended. `vmap` of JAX's loop would select over its whole state, slots of
snapshots included, at every step; here the predicate is whether any lane runs, the states of ended lanes stand still,
and the schedule and the writing of slots know nothing of lanes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from ..adjoint._loops import while_loop
from ._leaf import depending
from ._progress import Bar, ended, moving
from ._splits import Splits
from ._sweep import Arrays, Kept, make_slots, store
from .schedules._online import BASE

sweep_p = jex.Primitive("online_sweep")
sweep_p.multiple_results = True

Cond = Callable[[Arrays, Arrays], Any]
Step = Callable[[Arrays, Arrays], Arrays]


def sweep_online(
    splits: Splits, cond: Cond, step: Step, aux: Arrays, consts: Arrays, init: Arrays, bar: Bar | None = None
) -> tuple[Arrays, Kept, tuple[Any, Any]]:
    """Run `step(consts, x)` while `cond(aux, x)`; return the final state, the snapshots, and two lengths.

    The first length is that of the loop, the second has an entry for each lane.
    """
    groups = (len(aux), len(consts), len(init))
    out = _bind([*aux, *consts, *init], groups=groups, cond=cond, step=step, splits=splits, bar=bar)
    return _unflat(groups[2], out)


def _unflat(count: int, out: Sequence[Any]) -> Any:
    x, slots, (order, positions, live, start, n, lanes) = out[:count], out[count : 2 * count], out[2 * count :]
    return list(x), Kept(list(slots), order, positions, live, start), (n, lanes)


def _bind(args: Sequence[Any], **params: Any) -> list[Any]:
    jaxpr = jax.make_jaxpr(lambda *args: _run(args, **params))(*args)
    return sweep_p.bind(*args, jaxpr=jaxpr, **params)


def _run(args: Sequence[Any], *, groups: Any, cond: Cond, step: Step, splits: Splits, bar: Bar | None) -> list[Any]:
    a, b = groups[0], groups[0] + groups[1]
    aux, consts, init = list(args[:a]), list(args[a:b]), list(args[b:])

    def advance(x: Arrays, running: Any, lanes: Any) -> tuple[Arrays, Any, Any]:
        x = [_select(running, new, old) for new, old in zip(step(consts, x), x, strict=True)]
        return x, cond(aux, x) & running, lanes + running.astype(jnp.int32)

    def segment(state: Any) -> Any:
        (x, running, lanes), n, kept, levels = state
        kept, levels = _store(splits, kept, levels, x, n)

        def one(inner: Any) -> Any:
            i, x = inner
            return i + 1, advance(*x)

        def inside(inner: Any) -> Any:
            return (inner[0] < splits.leaf) & jnp.any(inner[1][1])

        # A leaf of one step needs no inner loop: the outer one has looked whether to go on.
        start = (jnp.int32(0), (x, running, lanes))
        steps, x = one(start) if splits.leaf == 1 else while_loop(inside, one, start)
        moving(bar, n, n + steps)
        return x, n + steps, kept, levels

    running = cond(aux, init)
    ranks = jnp.arange(splits.slots, dtype=jnp.int32)
    zero = jnp.int32(0)
    room = max(splits.slots, 2)  # one snapshot needs the state before the last segment beside it
    kept = Kept(make_slots(room, init), ranks, jnp.zeros(room, jnp.int32), zero, zero)
    state = ((init, running, jnp.zeros(jnp.shape(running), jnp.int32)), zero, kept, jnp.zeros_like(ranks))
    (x, _, lanes), n, kept, _ = while_loop(lambda state: jnp.any(state[0][1]), segment, state)
    ended(bar, n)
    start = kept.start if splits.slots == 1 else kept.order[jnp.maximum(kept.live - 1, 0)]
    return [*x, *kept.slots, kept.order, kept.positions, kept.live, start, n, lanes]


def _select(running: Any, new: Any, old: Any) -> Any:
    if jnp.ndim(running) == 0:
        return new
    return jnp.where(running.reshape(running.shape + (1,) * (jnp.ndim(new) - running.ndim)), new, old)


def _store(splits: Splits, kept: Kept, levels: Any, x: Arrays, position: Any) -> tuple[Kept, Any]:
    """Keep state `position` by the online rule; `levels` and `kept.order` are in the order of the states."""
    slots, order, positions, live, start = kept
    last = splits.slots - 1
    if last == 0:
        slot = jnp.where(position == 0, jnp.int32(0), jnp.int32(1))
        return Kept(store(slots, x, slot), order, positions.at[slot].set(position), jnp.int32(1), slot), levels
    ranks = jnp.arange(last + 1, dtype=jnp.int32)
    full = live == last + 1
    dispensable = jnp.max(jnp.where(levels[:-1] < levels[1:], ranks[:-1], jnp.int32(-1)))
    dropped = jnp.where(dispensable < 0, last, dispensable)
    slot = jnp.where(full, order[dropped], order[jnp.minimum(live, last)])
    level = jnp.where(full & (dispensable < 0), levels[last] + 1, 0)
    moved = jnp.minimum(jnp.where(full & (ranks >= dropped), ranks + 1, ranks), last)
    rank = jnp.minimum(live, last)
    order = order[moved].at[rank].set(slot)
    levels = levels[moved].at[rank].set(jnp.where(position == 0, BASE, level))
    positions = positions.at[slot].set(position)
    return Kept(store(slots, x, slot), order, positions, jnp.minimum(live + 1, last + 1), start), levels


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int | None]]:
    params = {name: value for name, value in params.items() if name != "jaxpr"}
    groups, cond, step = params["groups"], params["cond"], params["step"]
    a, b = groups[0], groups[0] + groups[1]
    (size, *_) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    aux_dims, consts_dims = list(dims[:a]), list(dims[a:b])
    init = [batching.bdim_at_front(x, d, size) for x, d in zip(args[b:], dims[b:], strict=True)]
    batched_step = jax.vmap(step, (consts_dims, 0))
    by_lane = _ends_by_lane(args, dims, **params)
    batched_cond = jax.vmap(cond, (aux_dims, 0)) if by_lane else lambda aux, x: cond(aux, [v[0] for v in x])
    out = _bind([*args[:b], *init], **(params | {"cond": batched_cond, "step": batched_step}))
    count = groups[2]
    return out, [0] * count + [1] * count + [None] * 5 + [0 if by_lane else None]


def _ends_by_lane(args: Sequence[Any], dims: Sequence[Any], *, groups: Any, cond: Cond, step: Step, **_: Any) -> bool:
    """Whether lanes may end at different steps: whether the predicate depends on anything batched."""
    a, b = groups[0], groups[0] + groups[1]
    one = [x if d is None else jax.lax.index_in_dim(x, 0, d, keepdims=False) for x, d in zip(args, dims, strict=True)]
    aux, consts, x = one[:a], one[a:b], one[b:]
    step_jaxpr = jax.make_jaxpr(lambda c, x: step(list(c), list(x)))(consts, x).jaxpr
    cond_jaxpr = jax.make_jaxpr(lambda c, x: cond(list(c), list(x)))(aux, x).jaxpr
    batched, before = [d is not None for d in dims[a:]], None
    while batched != before:
        before = batched
        found = depending(step_jaxpr, [v for v, is_in in zip(step_jaxpr.invars, batched, strict=True) if is_in])
        new = [
            is_in or (isinstance(out, jex.Var) and out in found)
            for is_in, out in zip(batched[groups[1] :], step_jaxpr.outvars, strict=True)
        ]
        batched = batched[: groups[1]] + new
    inputs = [d is not None for d in dims[:a]] + batched[groups[1] :]
    found = depending(cond_jaxpr, [v for v, is_in in zip(cond_jaxpr.invars, inputs, strict=True) if is_in])
    (out,) = cond_jaxpr.outvars
    return isinstance(out, jex.Var) and out in found


sweep_p.def_impl(lambda *args, jaxpr, **_: jax.jit(jex.jaxpr_as_fun(jaxpr))(*args))
sweep_p.def_abstract_eval(lambda *_, jaxpr, **__: list(jaxpr.out_avals))
mlir.register_lowering(
    sweep_p, mlir.lower_fun(lambda *args, jaxpr, **_: jex.jaxpr_as_fun(jaxpr)(*args), multiple_results=True)
)
batching.primitive_batchers[sweep_p] = _batch
