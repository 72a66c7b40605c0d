"""The sweeps of a rollout: forward with snapshots, and reverse by binomial checkpointing.

One executor serves every schedule, whether the number of steps is known when the program is traced or only when the
loop has ended. No conditional surrounds a buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..adjoint._loops import fori_loop, while_loop
from ._splits import Splits

Arrays = list[Any]


class Kept(NamedTuple):
    """What a forward sweep leaves to a reverse sweep."""

    slots: Arrays  # each of (snapshots + 1, ...)
    order: Any  # slots in the order of their states; the first `live` hold one
    positions: Any  # which state each slot holds
    live: Any
    start: Any  # the slot from which the last segment is reversed


def store(buffers: Arrays, values: Sequence[Any], index: Any) -> Arrays:
    """Write one entry along the leading axis of each buffer."""
    return [lax.dynamic_update_index_in_dim(b, v, index, 0) for b, v in zip(buffers, values, strict=True)]


def load(buffers: Sequence[Any], index: Any) -> Arrays:
    """Read one entry along the leading axis of each buffer."""
    return [lax.dynamic_index_in_dim(b, index, 0, keepdims=False) for b in buffers]


def make_slots(count: int, init: Arrays) -> Arrays:
    """Room for `count` states."""
    return [jnp.broadcast_to(x[None], (count, *x.shape)) for x in init]


def sweep_forward(
    splits: Splits, n: Any, advance: Any, init: Arrays, ys: Arrays, finish: bool = True
) -> tuple[Arrays, Arrays, Kept]:
    """Run n steps; return the final state, the outputs, and the snapshots.

    `advance(i, carry, ys)` evaluates step i. The extra slot holds the state before the last segment: the reverse sweep
    begins there without an evaluation, and if only the snapshots are wanted (`finish` is false) the sweep ends there.
    """
    extra = splits.slots

    def segment(state: Any) -> Any:
        position, live, carry, ys, slots, positions = state
        last = n - position <= splits.leaf
        slot = jnp.where(last, extra, live)
        slots, positions = store(slots, carry, slot), positions.at[slot].set(position)
        ahead = splits.first_advance(n - position, jnp.maximum(extra - live, 1))
        stop = jnp.where(last, n, position + ahead)
        end = stop if finish else jnp.where(last, position, stop)
        carry, ys = fori_loop(position, end, lambda i, c: advance(i, *c), (carry, ys))
        return stop, live + jnp.where(last, 0, 1), carry, ys, slots, positions

    zero = jnp.int32(0)
    start = (zero, zero, init, ys, make_slots(extra + 1, init), jnp.zeros(extra + 1, jnp.int32))
    _, live, carry, ys, slots, positions = while_loop(lambda state: state[0] < n, segment, start)
    return carry, ys, Kept(slots, jnp.arange(extra, dtype=jnp.int32), positions, live, jnp.int32(extra))


def sweep_reverse(
    splits: Splits,
    n: Any,
    advance: Callable[[Any, Arrays], Arrays],
    reverse: Callable[[Any, Any, Arrays, Any], Any],
    kept: Kept,
    state: Any,
) -> Any:
    """Reverse n steps from the snapshots of a forward sweep.

    `advance(i, x)` evaluates step i; `reverse(start, stop, x, state)` reverses steps start, ..., stop - 1, at most a
    leaf of them, from state `start`, updating what it carries from call to call.
    """

    def turn(loop: Any) -> Any:
        stop, live, source, positions, slots, state = loop
        start, x = positions[source], load(slots, source)
        start, x, live, positions, slots = _replay(splits, kept.order, advance, stop, start, x, live, positions, slots)
        state = reverse(start, stop, x, state)
        top = kept.order[jnp.maximum(live - 1, 0)]
        live = live - jnp.where(positions[top] == start, 1, 0)
        source = kept.order[jnp.maximum(live - 1, 0)]
        return start, live, source, positions, slots, state

    loop = (jnp.asarray(n, jnp.int32), kept.live, kept.start, kept.positions, kept.slots, state)
    return while_loop(lambda loop: loop[0] > 0, turn, loop)[-1]


def _replay(
    splits: Splits, order: Any, advance: Any, stop: Any, start: Any, x: Arrays, live: Any, positions: Any, slots: Arrays
) -> Any:
    """Go from the latest snapshot to the last segment before `stop`, storing snapshots on the way."""

    def part(loop: Any) -> Any:
        start, x, live, positions, slots = loop
        # On the first pass this is the latest snapshot itself, written over with what it holds.
        fresh = positions[order[live - 1]] != start
        live = live + jnp.where(fresh, 1, 0)
        slot = order[live - 1]
        slots, positions = store(slots, x, slot), positions.at[slot].set(start)
        ahead = splits.first_advance(stop - start, splits.slots - live + 1)
        return start + ahead, fori_loop(start, start + ahead, advance, x), live, positions, slots

    return while_loop(lambda loop: stop - loop[0] > splits.leaf, part, (start, x, live, positions, slots))
