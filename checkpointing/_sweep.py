"""The sweeps of a rollout: forward with snapshots, and reverse by binomial checkpointing.

Where to go next is integer arithmetic inside the loops, from a table of binomials: no code is generated per
checkpoint, and compile time does not depend on the number of steps or snapshots. No conditional surrounds a buffer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..adjoint._loops import fori_loop, while_loop
from .schedules._binomial import beta, first_advance, repetitions

Arrays = list[Any]


class Plan(NamedTuple):
    """Where the forward sweep of n steps stores its snapshots, and the table for the splits that follow."""

    n: int
    s: int
    starts: np.ndarray  # of the segments; the last one is the last step, whose start needs no slot
    table: np.ndarray  # β(s, r - 1), clipped to 32 bits


def make_plan(n: int, snapshots: int) -> Plan:
    """Plan the sweeps for n ≥ 1 steps."""
    s = max(1, min(snapshots, n))
    starts, position = [], 0
    while position < n - 1:
        starts.append(position)
        position += first_advance(n - position, s - len(starts) + 1)
    starts.append(n - 1)
    last = 1 if s == 1 else repetitions(n, s)
    limit = np.iinfo(np.int32).max
    table = np.array([[min(beta(i, r), limit) for r in range(-1, last + 1)] for i in range(s + 1)], np.int32)
    return Plan(n, s, np.array(starts, np.int32), table)


def _split(plan: Plan, length: Any, available: Any) -> Any:
    """The first advance of an optimal reversal of `length` ≥ 2 steps with `available` snapshots."""
    table = jnp.asarray(plan.table)
    r = jnp.sum(table[available, 1:] < length, dtype=jnp.int32)
    best = jnp.minimum(table[available, r], length - table[available - 1, r])
    return jnp.where(available == 1, length - 1, best)


def store(buffers: Arrays, values: Sequence[Any], index: Any) -> Arrays:
    """Write one entry along the leading axis of each buffer."""
    return [lax.dynamic_update_index_in_dim(b, v, index, 0) for b, v in zip(buffers, values, strict=True)]


def load(buffers: Sequence[Any], index: Any) -> Arrays:
    """Read one entry along the leading axis of each buffer."""
    return [lax.dynamic_index_in_dim(b, index, 0, keepdims=False) for b in buffers]


def sweep_forward(plan: Plan, advance: Any, init: Arrays, ys: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """Run all steps; return the final state, the outputs, and the snapshots.

    `advance(i, carry, ys)` evaluates step i. Slot s holds the state before the last step: the reverse sweep begins
    there without an evaluation.
    """
    slots = [jnp.broadcast_to(x[None], (plan.s + 1, *x.shape)) for x in init]
    stops = jnp.asarray(np.append(plan.starts[1:], plan.n).astype(np.int32))
    starts = jnp.asarray(plan.starts)
    last = len(plan.starts) - 1

    def segment(j: Any, state: Any) -> Any:
        carry, ys, slots = state
        slots = store(slots, carry, jnp.where(j == last, plan.s, j))
        carry, ys = fori_loop(starts[j], stops[j], lambda i, c: advance(i, *c), (carry, ys))
        return carry, ys, slots

    return fori_loop(0, last + 1, segment, (init, ys, slots))


def sweep_reverse(plan: Plan, advance: Any, pullback: Any, slots: Arrays, bars: Any, x_end: Arrays | None) -> Any:
    """Reverse all steps from the snapshots of `sweep_forward`.

    `pullback(k, x, x_next, bars)` reverses step k from state k (and state k + 1 if `x_end`, the final state, is
    given), updating the cotangents `bars`.
    """
    live = len(plan.starts) - 1
    positions = np.zeros(plan.s + 1, np.int32)
    positions[:live] = plan.starts[:-1]
    positions[plan.s] = plan.n - 1

    def reverse_one(state: Any) -> Any:
        k, live, positions, slots, x_next, bars = state
        first = k == plan.n - 1
        top = live - jnp.where(first, 0, 1)
        source = jnp.where(first, plan.s, top)
        x, positions, slots, top = _replay(plan, advance, k, load(slots, source), source, top, positions, slots)
        bars = pullback(k, x, x_next, bars)
        return k - 1, top, positions, slots, None if x_next is None else x, bars

    start = (jnp.int32(plan.n - 1), jnp.int32(live), jnp.asarray(positions), slots, x_end, bars)
    return while_loop(lambda state: state[0] >= 0, reverse_one, start)[-1]


def _replay(
    plan: Plan, advance: Any, k: Any, x: Arrays, source: Any, top: Any, positions: Any, slots: Arrays
) -> tuple[Arrays, Any, Arrays, Any]:
    """Advance from the snapshot in slot `source` to state k, storing snapshots on the way by the optimal split."""

    def part(state: Any) -> Any:
        x, position, positions, slots, top = state
        slots = store(slots, x, top)
        positions = positions.at[top].set(position)
        stop = position + _split(plan, k + 1 - position, plan.s - top)
        x = fori_loop(position, stop, advance, x)
        return x, stop, positions, slots, top + 1

    state = (x, positions[source], positions, slots, top)
    x, _, positions, slots, top = while_loop(lambda state: state[1] < k, part, state)
    return x, positions, slots, top
