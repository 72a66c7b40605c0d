"""The reverse sweep of a rollout: cotangents of its inputs from those of its results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..adjoint._loops import fori_loop
from ._active import Active
from ._leaf import LinearisedStep, empty_buffers
from ._loop import Inputs, Loop, of_active
from ._progress import moving
from ._sweep import Arrays, Kept, load, store, sweep_reverse

Bars = tuple[Arrays, Arrays, Arrays]


def reverse_rollout(loop: Loop, active: Active, inputs: Inputs, kept: Kept, end: Arrays, bars: Arrays) -> Arrays:
    """Cotangents of the active constants, per-step data and initial state.

    `bars` are those of the final state and of the outputs; `end` is the final state, if the step has its own pullback.
    """
    split = len(active.carry)
    none = [jnp.zeros_like(inputs.consts[i]) for i in active.consts], [jnp.zeros_like(inputs.xs[i]) for i in active.xs]
    start = none[0], list(bars[:split]), none[1]
    consts_bar, carry_bar, xs_bar = reverse_steps(loop, active, inputs, kept, end, list(bars[split:]), start)
    return [*consts_bar, *xs_bar, *carry_bar]


def reverse_steps(
    loop: Loop, active: Active, inputs: Inputs, kept: Kept, end: Arrays, ys_bar: Arrays, total: Bars
) -> Bars:
    """Reverse all steps, from the cotangents of the constants, the state and the data at their end."""
    # A single step's residuals are not recorded: read back at once, they mostly cost more than what the compiler
    # computes twice without them (measured: up to five times more for small steps, 0.7 to 1.6 times for larger ones).
    several = loop.leaf > 1 and loop.pullback is None
    turn, scratch = (_by_leaf if several else _one_by_one)(loop, active, inputs, end)

    def advance(i: Any, carry: Arrays) -> Arrays:
        return loop.live_step(inputs.count, i, inputs.consts, carry, loop.data(inputs, i))[0]

    def add(k: Any, total: Bars, pull: Callable[[Arrays, Arrays], Bars]) -> Bars:
        """Pull the cotangents back over step k and add them up."""
        consts_bar, carry_bar, xs_bar = total
        c, u, d = pull(carry_bar, _cotangents_of_row(loop, inputs, ys_bar, k))
        consts_bar = [a + b for a, b in zip(consts_bar, c, strict=True)]
        return consts_bar, u, store(xs_bar, d, loop.index(inputs, k))

    def reverse(start: Any, stop: Any, x: Arrays, state: Any) -> Any:
        state = turn(start, stop, x, state, add)
        moving(None if loop.progress is None else loop.progress[1], n - stop, n - start, n)
        return state

    n = loop.num_steps(inputs)
    return sweep_reverse(loop.splits, n, advance, reverse, kept, (total, scratch))[0]


def _cotangents_of_row(loop: Loop, inputs: Inputs, ys_bar: Arrays, k: Any) -> Arrays:
    row = loop.row(inputs, k)
    if inputs.rows is None:
        return load(ys_bar, row)
    found = load(ys_bar, jnp.minimum(row, loop.num_rows - 1))
    return [jnp.where(row < loop.num_rows, y, jnp.zeros_like(y)) for y in found]


def _one_by_one(loop: Loop, active: Active, inputs: Inputs, end: Arrays) -> tuple[Callable[..., Any], Arrays]:
    """Reverse a single step; what is carried is the state after it, if the step has its own pullback."""
    consts, count = inputs.consts, inputs.count

    def turn(k: Any, _: Any, carry: Arrays, state: Any, add: Any) -> Any:
        total, carry_next = state
        x = loop.data(inputs, k)

        def pull(carry_bar: Arrays, y_bar: Arrays) -> Bars:
            if loop.pullback is not None:
                c, u, d = loop.pullback(consts, carry, x, carry_next, carry_bar, y_bar)
                return [c[i] for i in active.consts], [u[i] for i in active.carry], [d[i] for i in active.xs]
            return _vjp(loop, active, count, k, consts, carry, x)[1](carry_bar, y_bar)

        return add(k, total, pull), carry_next if loop.pullback is None else carry

    return turn, end


def _vjp(loop: Loop, active: Active, count: Any, k: Any, *inputs: Arrays) -> tuple[Arrays, Callable[..., Bars]]:
    """The state after step k, and the step's pullback of cotangents of (carry, ys)."""
    function, at = of_active(lambda *args: loop.live_step(count, k, *args), active, inputs)
    _, pull, (new, _) = jax.vjp(function, *at, has_aux=True)
    return new, jax.tree_util.Partial(_call_pull, pull)


def _call_pull(pull: Any, carry_bar: Arrays, y_bar: Arrays) -> Bars:
    return pull((carry_bar, y_bar))


def _by_leaf(loop: Loop, active: Active, inputs: Inputs, _: Arrays) -> tuple[Callable[..., Any], Arrays]:
    """Reverse a leaf of steps: record the residuals of all, then pull back through all; room for the residuals."""
    consts, init, count = inputs.consts, inputs.init, inputs.count
    lanes = () if count is None else (count[1],)

    def diff_step(fixed: Arrays, carry: Arrays, data: Arrays) -> Any:
        lanes, (*x, k) = fixed[len(consts) :], data
        return _vjp(loop, active, (None, *lanes) if lanes else None, k, fixed[: len(consts)], carry, list(x))

    fixed = [*consts, *lanes]
    first = [*loop.data(inputs, 0), jnp.int32(0)]
    step = LinearisedStep(diff_step, fixed, init, first)
    shared = step.shared(fixed, init, first)

    def turn(start: Any, stop: Any, carry: Arrays, state: Any, add: Any) -> Any:
        total, buffers = state

        def record(k: Any, inner: Any) -> Any:
            carry, buffers = inner
            carry, values = step.record(fixed, carry, [*loop.data(inputs, k), k])
            return carry, store(buffers, values, k - start)

        _, buffers = fori_loop(start, stop, record, (carry, buffers))

        def back(i: Any, total: Bars) -> Bars:
            k = stop - 1 - (i - start)
            return add(k, total, step.pull(shared, load(buffers, k - start), [*loop.data(inputs, k), k]))

        return fori_loop(start, stop, back, total), buffers

    return turn, empty_buffers(step.kept_avals, loop.leaf)
