"""A rollout of n steps as a node: snapshots by a schedule, derivatives of every kind in bounded memory.

With the rollout R(z), z the inputs (constants, initial state, per-step data), and the adjoint of its result ȳ:

- tangent  dR(z) dz: the rollout of the pair (u, du), itself checkpointed;
- cotangent  P(z, ȳ) = (∂R/∂z)ᵀ ȳ: one reverse sweep;
- derivative of the cotangent: P is linear in ȳ, with the tangent as its transpose, and
  ∂P/∂z dz = H dz with H = ∂²⟨ȳ, R⟩/∂z². H dz is one reverse sweep of the rollout of pairs, and since H is symmetric
  it is its own transpose. So forward over reverse, reverse over forward and reverse over reverse all work in
  bounded memory, to any order.

A rollout whose length shows only when it ends has a condition; its derivatives hold the number of steps fixed, and are
those of a rollout that is told the number.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..adjoint import linear_node
from ..adjoint._loops import fori_loop, while_loop
from ..adjoint._tie import tie
from ..adjoint._trace import define_by_run, differentiable, instantiated, zero_tangent
from ._active import Active, active_tangents
from ._loop import Inputs, Loop, of_active
from ._online_sweep import sweep_online
from ._progress import Bar, moving
from ._reverse import reverse_rollout
from ._splits import make_splits
from ._sweep import Arrays, store, sweep_forward


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout(Loop):
    """A loop that can be called, and differentiated in every mode."""

    def __call__(self, consts: Arrays, init: Arrays, xs: Arrays, rows: Any = None, aux: Any = ()) -> Any:
        """Run the steps; return the final carry and the outputs."""
        consts, init, xs, aux = jax.tree.map(jnp.asarray, (list(consts), list(init), list(xs), list(aux)))
        inputs = Inputs(consts, init, xs, rows, None, aux)
        if define_by_run():
            return _define_by_run(self, inputs)
        carry, ys, _ = rollout_node(self, keep=False)(*inputs)
        return carry, ys

    @property
    def counted(self) -> "Rollout":
        """The rollout that is told its number of steps."""
        return dataclasses.replace(self, cond=None)


def _define_by_run(rollout: Rollout, inputs: Inputs) -> Any:
    """Under `jax.disable_jit()`, a plain Python loop on JAX's own derivatives: the user's function sees numbers."""
    n, rows = rollout.length or 0, inputs.rows
    outputs: dict[int, Arrays] = {}
    carry = inputs.init
    for i in range(n):
        carry, y = rollout.step(inputs.consts, carry, rollout.data(inputs, i))
        outputs[int(rollout.row(inputs, i))] = y
    kept = [outputs[row] for row in range(n if rows is None else rollout.num_rows)]
    return carry, [jnp.stack(y) for y in zip(*kept, strict=True)]


def rollout_node(rollout: Rollout, keep: bool) -> Callable[..., tuple[Arrays, Arrays, Any]]:
    """The rollout as a differentiable function; with what the reverse sweep needs if that is to be kept."""

    def primal(*inputs: Any) -> tuple[Arrays, Arrays, Any]:
        carry, ys, kept = _run(rollout, keep, Inputs(*inputs))
        # The schedule keeps no batch axis: it is one for all lanes.
        carry, ys, slots = tie((carry, ys, kept[0].slots if keep else []), *inputs[:3])
        return carry, ys, (kept[0]._replace(slots=slots), kept[1]) if keep else ()

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        inputs = Inputs(*primals)
        carry, ys, kept = rollout_node(rollout, keep=True)(*primals)
        kept, count = jax.tree.map(_stopped, kept)
        active = Active.of(tangents[0], inputs.init, tangents[2])
        end = [] if rollout.pullback is None else jax.tree.map(_stopped, carry)
        residuals = Residuals(inputs._replace(count=count, aux=()), kept, end)
        counted = rollout.counted
        dots = [*active.pick(tangents[0], None, tangents[2]), *active_tangents(tangents[1])]
        out = linear_node(
            lambda r, z: tangent(counted, active, residuals.rebuild(r)[0], z),
            lambda r, ct: cotangent_node(counted, active)(residuals.rebuild(r), list(ct)),
            residuals.flat,
            [instantiated(t) for t in dots],
            "rollout",
        )
        dots_of = iter(out)
        result = (carry, ys, (kept, count) if keep else ())
        # Snapshots are a cache: what is computed from them is differentiated in z.
        result_dot = jax.tree.map(lambda x: next(dots_of) if differentiable(x) else zero_tangent(x), (carry, ys))
        return result, (*result_dot, jax.tree.map(zero_tangent, result[2]))

    node = jax.custom_jvp(primal)
    node.defjvp(rule, symbolic_zeros=True)
    return node


def forward_bar(rollout: Rollout) -> Bar | None:
    """The bar of the forward sweep, if there is one."""
    return None if rollout.progress is None else rollout.progress[0]


def _run(rollout: Rollout, keep: bool, inputs: Inputs) -> Any:
    """The final carry, the outputs, and (snapshots, count) if they are kept."""
    if rollout.cond is not None:
        return _run_while(rollout, keep, inputs)
    n = rollout.num_steps(inputs)

    def advance(i: Any, carry: Arrays, ys: Arrays) -> tuple[Arrays, Arrays]:
        carry, y = rollout.live_step(inputs.count, i, inputs.consts, carry, rollout.data(inputs, i))
        moving(forward_bar(rollout), i, i + 1, n)
        return carry, store(ys, y, rollout.row(inputs, i))

    unroll = rollout.unroll if inputs.count is None and rollout.unroll > 1 else None
    ys = output_buffers(rollout, inputs)
    if keep:
        carry, ys, kept = sweep_forward(rollout.splits, n, advance, inputs.init, ys)
    else:
        carry, ys = fori_loop(0, n, lambda i, c: advance(i, *c), (inputs.init, ys), unroll=unroll)
        kept = None
    return carry, ys if inputs.rows is None else [y[:-1] for y in ys], (kept, inputs.count)


def _run_while(rollout: Rollout, keep: bool, inputs: Inputs) -> Any:
    cond: Any = rollout.cond

    def step(consts: Arrays, carry: Arrays) -> Arrays:
        return rollout.step(consts, carry, [])[0]

    bar = forward_bar(rollout)
    if keep or bar is not None:  # batched, only the sweep has one count for all lanes, to move a bar by
        splits = rollout.splits if keep else make_splits(None, 1, 1)
        carry, *kept = sweep_online(splits, cond, step, list(inputs.aux), inputs.consts, inputs.init, bar)
        return carry, [], tuple(kept)
    return while_loop(lambda c: cond(inputs.aux, c), lambda c: step(inputs.consts, c), inputs.init), [], ()


def output_buffers(rollout: Rollout, inputs: Inputs) -> Arrays:
    """Room for the outputs of all steps."""
    data = [x[0] for x in inputs.xs]
    avals = jax.eval_shape(lambda *a: rollout.step(*a)[1], inputs.consts, inputs.init, data)
    num = rollout.length if inputs.rows is None else rollout.num_rows + 1
    return [jnp.zeros((num, *a.shape), a.dtype) for a in avals]


def _stopped(x: Any) -> Any:
    return lax.stop_gradient(x) if differentiable(x) else x


class Residuals:
    """Arrays of a pytree as one flat list and back."""

    def __init__(self, *parts: Any):
        self.flat, self.tree = jax.tree.flatten(parts)

    def rebuild(self, flat: Sequence[Any]) -> Any:
        """The parts, from the flat list."""
        return jax.tree.unflatten(self.tree, list(flat))


def _paired(rollout: Rollout, active: Active, sizes: tuple[int, int, int]) -> Rollout:
    """The rollout of (u, du): tangents follow the primals (`sizes` of them) in consts, carry, xs and outputs."""

    def step(*inputs: Arrays) -> tuple[Arrays, Arrays]:
        primals = [list(x[:size]) for x, size in zip(inputs, sizes, strict=True)]
        dots = [list(x[size:]) for x, size in zip(inputs, sizes, strict=True)]
        function, at = of_active(rollout.step, active, primals)
        _, (new_dot, ys_dot), (new, ys) = jax.jvp(function, at, dots, has_aux=True)
        return [*new, *new_dot], [*ys, *ys_dot]

    return dataclasses.replace(rollout, step=step, pullback=None)


def _of_pairs(rollout: Rollout, active: Active, inputs: Inputs, dots: Sequence[Any]) -> tuple[Rollout, Inputs]:
    """The rollout of pairs, and its inputs."""
    consts, init, xs = inputs[:3]
    consts_dot, init_dot, xs_dot = active.split(dots)
    pair = _paired(rollout, active, (len(consts), len(init), len(xs)))
    return pair, inputs._replace(consts=[*consts, *consts_dot], init=[*init, *init_dot], xs=[*xs, *xs_dot])


def tangent(rollout: Rollout, active: Active, inputs: Inputs, dots: Sequence[Any]) -> Arrays:
    """Tangents of the differentiable carry and outputs."""
    pair, paired = _of_pairs(rollout, active, inputs, dots)
    carry, ys, _ = rollout_node(pair, keep=False)(*paired)
    count = sum(differentiable(y) for y in ys) // 2
    return [*carry[len(inputs.init) :], *(ys[len(ys) - count :] if count else [])]


def _cotangent(rollout: Rollout, active: Active, residuals: Any, bars: Arrays) -> Arrays:
    """One reverse sweep, from what a forward run kept, or after such a run."""
    if len(residuals) == 3:
        inputs, kept, end = residuals
    else:
        (inputs,) = residuals
        end, _, (kept, count) = rollout_node(rollout, keep=True)(*inputs)
        inputs = inputs._replace(count=count)
    return reverse_rollout(rollout, active, inputs, kept, end, bars)


def cotangent_node(rollout: Rollout, active: Active) -> Callable[[Any, Arrays], Arrays]:
    """P(z, ȳ) as a differentiable function of z and ȳ, for the active entries of z."""

    def rollout_cotangent(residuals: Any, bars: Arrays) -> Arrays:
        return tie(_cotangent(rollout, active, residuals, bars), residuals, bars)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        residuals, bars = primals
        out = node(residuals, bars)
        dots, bars_dot = tangents[0][0], tangents[1]
        total: list[Any] = [None] * len(out)
        if any(not isinstance(t, SymbolicZero) for t in bars_dot):
            flat = Residuals(*residuals)
            total = linear_node(
                lambda r, ct: node(flat.rebuild(r), list(ct)),
                lambda r, z: tangent(rollout, active, flat.rebuild(r)[0], z),
                flat.flat,
                active_tangents(bars_dot),
                "rolloutᵀ",
            )
        moving = Active.of(dots.consts, [], dots.xs)
        if moving.consts or moving.xs or any(not isinstance(t, SymbolicZero) for t in dots.init):
            total = _add(total, _second_order(rollout, active, moving, residuals[0], bars, dots))
        return out, [jnp.zeros_like(x) if t is None else t for x, t in zip(out, total, strict=True)]

    node = jax.custom_jvp(rollout_cotangent)
    node.defjvp(rule, symbolic_zeros=True)
    return node


def _add(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [y if x is None else x + y for x, y in zip(a, b, strict=True)]


def _second_order(
    rollout: Rollout, active: Active, moving: Active, inputs: Inputs, bars: Arrays, dots: Inputs
) -> Arrays:
    """H dz for the active entries, H the Hessian of ⟨ȳ, R(z)⟩: symmetric, so its own transpose."""
    every = active.union(moving)
    flat = Residuals(inputs, bars)

    def hessian_vector(r: Sequence[Any], z: Sequence[Any]) -> Arrays:
        inputs, bars = flat.rebuild(r)
        pair, paired = _of_pairs(rollout, every, inputs, z)
        # Of the pair's inputs only the primals: its cotangent for them, at (0, ȳ), is H dz.
        carry = tuple(i for i, x in enumerate(paired.init) if differentiable(x))
        primal = Active(every.consts, carry, every.xs)
        zero = [jnp.zeros_like(b) for b in bars]
        count = len(every.carry)
        paired_bars = [*zero[:count], *bars[:count], *zero[count:], *bars[count:]]
        consts_bar, carry_bar, xs_bar = primal.split(cotangent_node(pair, primal)((paired,), paired_bars))
        return [*consts_bar, *xs_bar, *carry_bar[:count]]

    dz = [instantiated(t) for t in every.pick(dots.consts, dots.init, dots.xs)]
    out = linear_node(hessian_vector, hessian_vector, flat.flat, dz, "rollout″")
    consts_bar, carry_bar, xs_bar = every.split(out)
    return [
        *(b for i, b in zip(every.consts, consts_bar, strict=True) if i in active.consts),
        *(b for i, b in zip(every.xs, xs_bar, strict=True) if i in active.xs),
        *carry_bar,
    ]
