"""A rollout of n steps as a node: snapshots by a schedule, derivatives of every kind in bounded memory.

With the rollout R(z), z the inputs (constants, initial state, per-step data), and the adjoint of its result ȳ:

- tangent  dR(z) dz: the rollout of the pair (u, du), itself checkpointed;
- cotangent  P(z, ȳ) = (∂R/∂z)ᵀ ȳ: one reverse sweep;
- derivative of the cotangent: P is linear in ȳ, with the tangent as its transpose, and
  ∂P/∂z dz = H dz with H = ∂²⟨ȳ, R⟩/∂z². H dz is one reverse sweep of the rollout of pairs, and since H is symmetric
  it is its own transpose. So forward over reverse, reverse over forward and reverse over reverse all work in
  bounded memory, to any order.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..adjoint import linear_node
from ..adjoint._loops import fori_loop
from ..adjoint._tie import tie
from ..adjoint._trace import define_by_run, differentiable, instantiated, replaced, zero_tangent
from ._sweep import Arrays, load, make_plan, store, sweep_forward, sweep_reverse

StepFn = Callable[..., tuple[Arrays, Arrays]]
PullbackFn = Callable[..., tuple[Arrays, Arrays, Arrays]]


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """What does not change between calls: the step, the loop and its schedule. All arrays are arguments.

    `step(consts, carry, x) -> (carry, ys)` works on flat lists and closes over no arrays. `num_rows` is the number
    of rows of the outputs: n, or fewer where `rows` selects the steps whose outputs are kept.
    `pullback(consts, carry, x, carry_next, carry_bar, ys_bar) -> bars of (consts, carry, x)` replaces the
    derivative of `step` in first-order reverse mode, with bars for all floating-point entries in full-length lists
    (None elsewhere): a step whose adjoint follows from its two end states is then not evaluated again.
    """

    step: StepFn
    length: int
    snapshots: int
    reverse: bool = False
    num_rows: int = 0
    pullback: PullbackFn | None = None

    def __call__(self, consts: Arrays, init: Arrays, xs: Arrays, rows: Any = None) -> tuple[Arrays, Arrays]:
        """Run the steps; `rows[i]` is the output row of step i, `num_rows` for none."""
        consts, init, xs = jax.tree.map(jnp.asarray, (list(consts), list(init), list(xs)))
        if define_by_run():
            return _define_by_run(self, consts, init, xs, rows)
        carry, ys, _ = _node(self, keep=False)(consts, init, xs, rows)
        return carry, ys


def _define_by_run(rollout: Rollout, consts: Arrays, init: Arrays, xs: Arrays, rows: Any) -> Any:
    """Under `jax.disable_jit()`, a plain Python loop on JAX's own derivatives: the user's function sees numbers."""
    n = rollout.length
    outputs: dict[int, Arrays] = {}
    carry = init
    for i in range(n):
        carry, y = rollout.step(consts, carry, load(xs, n - 1 - i if rollout.reverse else i))
        outputs[int(_row(rollout, rows, i))] = y
    kept = [outputs[row] for row in range(n if rows is None else rollout.num_rows)]
    return carry, [jnp.stack(y) for y in zip(*kept, strict=True)]


def _output_buffers(rollout: Rollout, consts: Arrays, init: Arrays, xs: Arrays, rows: Any) -> Arrays:
    avals = jax.eval_shape(lambda *a: rollout.step(*a)[1], consts, init, [x[0] for x in xs])
    num = rollout.length if rows is None else rollout.num_rows + 1
    return [jnp.zeros((num, *a.shape), a.dtype) for a in avals]


def _node(rollout: Rollout, keep: bool) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """The rollout as a differentiable function; with its snapshots if they are to be kept."""

    def rollout_node(consts: Arrays, init: Arrays, xs: Arrays, rows: Any) -> tuple[Arrays, Arrays, Arrays]:
        return tie(_run(rollout, keep, consts, init, xs, rows), consts, init, xs)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        consts, init, xs, rows = primals
        carry, ys, slots = _node(rollout, keep=True)(*primals)
        slots = jax.tree.map(_stopped, slots)
        active = _Active.of(tangents[0], init, tangents[2])
        end = [] if rollout.pullback is None else jax.tree.map(_stopped, carry)
        residuals = _Residuals(consts, init, xs, rows, slots, end)
        dots = [*active.pick(tangents[0], None, tangents[2]), *_instantiated(tangents[1])]
        out = linear_node(
            lambda r, z: _tangent(rollout, active, residuals.rebuild(r), z),
            lambda r, ct: _cotangent_node(rollout, active)(residuals.rebuild(r), list(ct)),
            residuals.flat,
            dots,
            "rollout",
        )
        dots_of = iter(out)
        result = (carry, ys, slots if keep else [])
        # Snapshots are a cache: what is computed from them is differentiated in z.
        result_dot = (
            jax.tree.map(lambda x: next(dots_of) if differentiable(x) else zero_tangent(x), (carry, ys)),
            jax.tree.map(zero_tangent, result[2]),
        )
        return result, (*result_dot[0], result_dot[1])

    node = jax.custom_jvp(rollout_node)
    node.defjvp(rule, symbolic_zeros=True)
    return node


def _run(rollout: Rollout, keep: bool, consts: Arrays, init: Arrays, xs: Arrays, rows: Any) -> Any:
    n = rollout.length

    def advance(i: Any, carry: Arrays, ys: Arrays) -> tuple[Arrays, Arrays]:
        carry, y = rollout.step(consts, carry, load(xs, n - 1 - i if rollout.reverse else i))
        return carry, store(ys, y, _row(rollout, rows, i))

    ys = _output_buffers(rollout, consts, init, xs, rows)
    if keep:
        carry, ys, slots = sweep_forward(make_plan(n, rollout.snapshots), advance, init, ys)
    else:
        carry, ys = fori_loop(0, n, lambda i, c: advance(i, *c), (init, ys))
        slots = []
    return carry, ys if rows is None else [y[:-1] for y in ys], slots


def _row(rollout: Rollout, rows: Any, i: Any) -> Any:
    if rows is not None:
        return rows[i]
    return rollout.length - 1 - i if rollout.reverse else i


def _stopped(x: Any) -> Any:
    return lax.stop_gradient(x) if differentiable(x) else x


def _instantiated(tangents: Sequence[Any]) -> Arrays:
    """Tangents of the entries that carry derivatives, as arrays."""
    return [instantiated(t) for t in tangents if jnp.issubdtype(t.dtype, jnp.inexact)]


@dataclasses.dataclass(frozen=True)
class _Active:
    """Which inputs carry tangents: positions in consts, in the carry (all that can) and in xs."""

    consts: tuple[int, ...]
    carry: tuple[int, ...]
    xs: tuple[int, ...]

    @staticmethod
    def of(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> "_Active":
        def nonzero(tangents: Sequence[Any]) -> tuple[int, ...]:
            return tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))

        carry = tuple(i for i, x in enumerate(init) if differentiable(x))
        return _Active(nonzero(consts), carry, nonzero(xs))

    def union(self, other: "_Active") -> "_Active":
        return _Active(tuple(sorted({*self.consts, *other.consts})), self.carry, tuple(sorted({*self.xs, *other.xs})))

    def pick(self, consts: Sequence[Any], carry: Sequence[Any] | None, xs: Sequence[Any]) -> Arrays:
        """The active entries as one list: constants, per-step data, then (if given) the carry."""
        picked = [consts[i] for i in self.consts] + [xs[i] for i in self.xs]
        return picked + ([] if carry is None else [carry[i] for i in self.carry])

    def split(self, flat: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        """Undo `pick`: constants, carry, xs."""
        a, b = len(self.consts), len(self.consts) + len(self.xs)
        return list(flat[:a]), list(flat[b:]), list(flat[a:b])


class _Residuals:
    """Inputs of a rollout as one flat list and back."""

    def __init__(self, consts: Arrays, init: Arrays, xs: Arrays, rows: Any, *more: Arrays):
        self.flat, self.tree = jax.tree.flatten((consts, init, xs, rows, *more))

    def rebuild(self, flat: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, list(flat))


def _of_active(rollout: Rollout, active: _Active, inputs: Sequence[Arrays]) -> tuple[Callable[..., Any], list[Arrays]]:
    """One step as a function of its active inputs, with their values.

    It returns the carry and outputs that carry derivatives, and, as auxiliary output, all of them.
    """
    positions = (active.consts, active.carry, active.xs)

    def of_active(*values: Arrays) -> tuple[Any, Any]:
        new, ys = rollout.step(*(replaced(x, i, v) for x, i, v in zip(inputs, positions, values, strict=True)))
        return ([new[i] for i in active.carry], [y for y in ys if differentiable(y)]), (new, ys)

    return of_active, [[x[i] for i in where] for x, where in zip(inputs, positions, strict=True)]


def _paired(rollout: Rollout, active: _Active, sizes: tuple[int, int, int]) -> Rollout:
    """The rollout of (u, du): tangents follow the primals (`sizes` of them) in consts, carry, xs and outputs."""

    def step(*inputs: Arrays) -> tuple[Arrays, Arrays]:
        primals = [list(x[:size]) for x, size in zip(inputs, sizes, strict=True)]
        dots = [list(x[size:]) for x, size in zip(inputs, sizes, strict=True)]
        of_active, at = _of_active(rollout, active, primals)
        _, (new_dot, ys_dot), (new, ys) = jax.jvp(of_active, at, dots, has_aux=True)
        return [*new, *new_dot], [*ys, *ys_dot]

    return dataclasses.replace(rollout, step=step, pullback=None)


def _run_paired(rollout: Rollout, active: _Active, residuals: Any, dots: Sequence[Any]) -> Any:
    """Inputs of the rollout of pairs, and that rollout."""
    consts, init, xs, rows = residuals[:4]
    consts_dot, init_dot, xs_dot = active.split(dots)
    pair = _paired(rollout, active, (len(consts), len(init), len(xs)))
    return pair, ([*consts, *consts_dot], [*init, *init_dot], [*xs, *xs_dot], rows)


def _tangent(rollout: Rollout, active: _Active, residuals: Any, dots: Sequence[Any]) -> Arrays:
    """Tangents of the differentiable carry and outputs."""
    pair, inputs = _run_paired(rollout, active, residuals, dots)
    carry, ys = pair(*inputs)
    count = sum(differentiable(y) for y in ys) // 2
    return [*carry[len(residuals[1]) :], *(ys[len(ys) - count :] if count else [])]


def _cotangent_node(rollout: Rollout, active: _Active) -> Callable[[Any, Arrays], Arrays]:
    """P(z, ȳ) as a differentiable function of z and ȳ, for the active entries of z."""

    def rollout_cotangent(residuals: Any, bars: Arrays) -> Arrays:
        return tie(_cotangent(rollout, active, residuals, bars), residuals, bars)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        residuals, bars = primals
        out = rollout_cotangent_node(residuals, bars)
        dots, bars_dot = tangents
        total: list[Any] = [None] * len(out)
        if any(not isinstance(t, SymbolicZero) for t in bars_dot):
            flat = _Residuals(*residuals)
            total = linear_node(
                lambda r, ct: rollout_cotangent_node(flat.rebuild(r), list(ct)),
                lambda r, z: _tangent(rollout, active, flat.rebuild(r), z),
                flat.flat,
                _instantiated(bars_dot),
                "rolloutᵀ",
            )
        moving = _Active.of(dots[0], [], dots[2])
        if moving.consts or moving.xs or any(not isinstance(t, SymbolicZero) for t in dots[1]):
            total = _add(total, _second_order(rollout, active, moving, residuals, bars, dots))
        return out, [jnp.zeros_like(x) if t is None else t for x, t in zip(out, total, strict=True)]

    rollout_cotangent_node = jax.custom_jvp(rollout_cotangent)
    rollout_cotangent_node.defjvp(rule, symbolic_zeros=True)
    return rollout_cotangent_node


def _add(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [y if x is None else x + y for x, y in zip(a, b, strict=True)]


def _second_order(
    rollout: Rollout, active: _Active, moving: _Active, residuals: Any, bars: Arrays, dots: Any
) -> Arrays:
    """H dz for the active entries, H the Hessian of ⟨ȳ, R(z)⟩: symmetric, so its own transpose."""
    every = active.union(moving)
    flat = _Residuals(*residuals[:4], bars)

    def hessian_vector(r: Sequence[Any], z: Sequence[Any]) -> Arrays:
        *inputs, bars = flat.rebuild(r)
        pair, paired = _run_paired(rollout, every, inputs, z)
        # Of the pair's inputs only the primals: its cotangent for them, at (0, ȳ), is H dz.
        carry = tuple(i for i, x in enumerate(paired[1]) if differentiable(x))
        primal = _Active(every.consts, carry, every.xs)
        zero = [jnp.zeros_like(b) for b in bars]
        count = len(every.carry)
        paired_bars = [*zero[:count], *bars[:count], *zero[count:], *bars[count:]]
        out = _cotangent_node(pair, primal)(paired, paired_bars)
        consts_bar, carry_bar, xs_bar = primal.split(out)
        return [*consts_bar, *xs_bar, *carry_bar[:count]]

    dz = [instantiated(t) for t in every.pick(dots[0], dots[1], dots[2])]
    out = linear_node(hessian_vector, hessian_vector, flat.flat, dz, "rollout″")
    consts_bar, carry_bar, xs_bar = every.split(out)
    return [
        *(b for i, b in zip(every.consts, consts_bar, strict=True) if i in active.consts),
        *(b for i, b in zip(every.xs, xs_bar, strict=True) if i in active.xs),
        *carry_bar,
    ]


def _cotangent(rollout: Rollout, active: _Active, residuals: Any, bars: Arrays) -> Arrays:
    """The reverse sweep: cotangents of the active constants, per-step data, and the initial state."""
    consts, init, xs, rows = residuals[:4]
    if len(residuals) > 4:
        slots, end = residuals[4:]
    else:
        end, _, slots = _node(rollout, keep=True)(consts, init, xs, rows)
    n, plan = rollout.length, make_plan(rollout.length, rollout.snapshots)
    count = len(active.carry)
    carry_bar, ys_bar = list(bars[:count]), list(bars[count:])

    def at(k: Any) -> Arrays:
        return load(xs, n - 1 - k if rollout.reverse else k)

    def advance(i: Any, carry: Arrays) -> Arrays:
        return rollout.step(consts, carry, at(i))[0]

    def pullback(k: Any, carry: Arrays, carry_next: Any, state: Any) -> Any:
        consts_bar, carry_bar, xs_bar = state
        y_bar = _cotangents_of_row(rollout, rows, ys_bar, k)
        c, u, d = _step_pullback(rollout, active, (consts, carry, at(k)), carry_next, carry_bar, y_bar)
        consts_bar = [a + b for a, b in zip(consts_bar, c, strict=True)]
        return consts_bar, u, store(xs_bar, d, n - 1 - k if rollout.reverse else k)

    start = (
        [jnp.zeros_like(consts[i]) for i in active.consts],
        carry_bar,
        [jnp.zeros_like(xs[i]) for i in active.xs],
    )
    consts_bar, carry_bar, xs_bar = sweep_reverse(
        plan, advance, pullback, slots, start, None if rollout.pullback is None else end
    )
    return [*consts_bar, *xs_bar, *carry_bar]


def _cotangents_of_row(rollout: Rollout, rows: Any, ys_bar: Arrays, k: Any) -> Arrays:
    if rows is None:
        return load(ys_bar, _row(rollout, rows, k))
    row = rows[k]
    found = load(ys_bar, jnp.minimum(row, rollout.num_rows - 1))
    return [jnp.where(row < rollout.num_rows, y, jnp.zeros_like(y)) for y in found]


def _step_pullback(
    rollout: Rollout, active: _Active, inputs: Any, carry_next: Any, carry_bar: Arrays, y_bar: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    if rollout.pullback is not None:
        c, u, d = rollout.pullback(*inputs, carry_next, carry_bar, y_bar)
        return [c[i] for i in active.consts], [u[i] for i in active.carry], [d[i] for i in active.xs]

    of_active, at = _of_active(rollout, active, inputs)
    _, pull, _ = jax.vjp(of_active, *at, has_aux=True)
    return pull((carry_bar, y_bar))
