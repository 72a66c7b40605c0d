"""A sweep driven from the host over compiled segments, with snapshots in memory and on disk."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..adjoint import linear_node
from ..adjoint._loops import fori_loop
from ..adjoint._trace import differentiable, instantiated, known_value, zero_tangent
from ._active import Active, active_tangents
from ._disk import Disk
from ._loop import Inputs
from ._memory import bytes_of
from ._progress import Bar
from ._reverse import reverse_steps
from ._rollout import Residuals, Rollout, output_buffers, tangent
from ._snapshot_files import SnapshotFiles
from ._sweep import Arrays, Kept, store, sweep_forward
from .schedules import Advance, Restore, Store

_TRIAL_SECONDS = 0.2  # how long costs are measured before a run


def refuse_traced(args: Sequence[Any]) -> None:
    """One clear error where a host-driven sweep cannot run."""
    if any(known_value(x) is None for x in args):
        message = (
            "snapshots on disk need a call that is not traced: `Disk` drives its sweep from the host. Take the "
            "gradient outside `jit` and `vmap` (the steps are compiled all the same), or keep snapshots in memory with "
            "`checkpoint=` a number or a `Budget`."
        )
        raise ValueError(message)


def run_on_disk(rollout: Rollout, key: Any, level: Disk, consts: Arrays, init: Arrays, xs: Arrays) -> Any:
    """The final carry and the outputs of a rollout with snapshots on disk, with derivatives of first order.

    `key` stands for the step: equal keys share compiled programs.
    """
    refuse_traced([*consts, *init, *xs])
    bar = rollout.progress
    compiled = dataclasses.replace(rollout, progress=None)  # whose segments are parts of what the bars show
    consts, init, xs = jax.tree.map(jnp.asarray, (consts, init, xs))

    @jax.custom_jvp
    def node(consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return rollout(consts, init, xs)

    def rule(primals: Any, tangents: Any) -> Any:
        consts, init, xs = primals
        _refuse_second_order([*consts, *init, *xs])
        active = Active.of(tangents[0], init, tangents[2])
        run = _HostRun(_programs(key, _Shape(compiled), active), level, Inputs(consts, init, xs), bar)
        carry, ys = run.forward()
        residuals = Residuals(Inputs(consts, init, xs))
        dots = [*map(instantiated, active.pick(tangents[0], None, tangents[2])), *active_tangents(tangents[1])]
        out = linear_node(
            lambda r, z: tangent(compiled, active, residuals.rebuild(r)[0], z),
            lambda _, ct: run.reverse(list(ct)),
            residuals.flat,
            dots,
            "rollout on disk",
            on_host=True,
        )
        dots_of = iter(out)
        return (carry, ys), jax.tree.map(lambda x: next(dots_of) if differentiable(x) else zero_tangent(x), (carry, ys))

    node.defjvp(rule, symbolic_zeros=True)
    return node(consts, init, xs)


def with_costs(rollout: Rollout, key: Any, level: Disk, consts: Arrays, init: Arrays, xs: Arrays) -> Disk:
    """The level with its costs measured."""
    programs = _programs(key, _Shape(rollout), Active((), (), ()))
    with SnapshotFiles(level.path) as files:
        return level.costing(lambda: measured_costs(programs, Inputs(consts, init, xs), files))


def _refuse_second_order(values: Sequence[Any]) -> None:
    if any(isinstance(x, Tracer) for x in values):
        message = (
            "a rollout with snapshots on disk has first derivatives only, one cotangent at a time. Keep snapshots in "
            "memory for more: `checkpoint=` a number of snapshots or a `Budget`."
        )
        raise ValueError(message)


class _HostRun:
    """One forward run and its reversal, action by action."""

    def __init__(self, programs: "_Programs", level: Disk, inputs: Inputs, progress: tuple[Bar, Bar] | None = None):
        self.programs, self.level, self.inputs, self.progress = programs, level, inputs, progress
        self.ready: Any = None  # (files, what is left of the schedule, its last chain in memory)

    def forward(self) -> tuple[Arrays, Arrays]:
        """Run all steps, storing snapshots; return the final state and the outputs."""
        files = SnapshotFiles(self.level.path)
        try:
            return self._forward(files)
        except BaseException:
            files.close()
            raise

    def _forward(self, files: SnapshotFiles) -> tuple[Arrays, Arrays]:
        programs, inputs = self.programs, self.inputs
        level = self.level.costing(lambda: measured_costs(programs, inputs, files))
        schedule = level.schedule(programs.length, bytes_of(inputs.init))
        segments: Iterator[Any] = schedule.segments()
        x, ys = inputs.init, programs.outputs(inputs)
        for segment in segments:
            if isinstance(segment, Store):
                files.write(segment.slot, segment.step, _as_numbers(x))
            elif isinstance(segment, Advance):
                x, ys = programs.advance(inputs, x, ys, segment.start, segment.stop)
                self._show(0, segment.stop, x)
            else:
                x, ys, kept = programs.keep(inputs, x, ys, segment.start, segment.stop)
                self.ready = files, segments, segment, kept
                self._show(0, segment.stop, x)
                break
        return x, ys

    def reverse(self, bars: Arrays) -> Arrays:
        """Cotangents of the active inputs from those of the final state and the outputs."""
        _refuse_second_order(bars)
        if self.ready is None:  # pulled back a second time
            self.forward()
        ready: Any = self.ready
        (files, segments, last, kept), self.ready = ready, None
        with contextlib.closing(files):
            return self._reverse(files, segments, last, kept, bars)

    def _reverse(self, files: SnapshotFiles, segments: Iterator[Any], last: Any, kept: Any, bars: Arrays) -> Arrays:
        programs, inputs = self.programs, self.inputs
        total, ys_bar = programs.start(inputs, bars)
        total = programs.turn(inputs, kept, total, ys_bar, last.start, last.stop)
        self._show(1, programs.length - last.start, total)
        del kept
        x = inputs.init
        for segment in segments:
            if isinstance(segment, Restore):
                x = _as_state(files.read(segment.slot, segment.step), inputs.init)
            elif isinstance(segment, Store):
                files.write(segment.slot, segment.step, _as_numbers(x))
            elif isinstance(segment, Advance):
                x, _ = programs.advance(inputs, x, [], segment.start, segment.stop)
            else:
                *_, kept = programs.keep(inputs, x, [], segment.start, segment.stop, finish=False)
                total = programs.turn(inputs, kept, total, ys_bar, segment.start, segment.stop)
                self._show(1, programs.length - segment.start, total)
        consts_bar, carry_bar, xs_bar = total
        return [*consts_bar, *xs_bar, *carry_bar]

    def _show(self, which: int, done: int, result: Any) -> None:
        if self.progress is not None:
            jax.block_until_ready(result)
            self.progress[which].move(done, done == self.programs.length)


def measured_costs(programs: "_Programs", inputs: Inputs, files: SnapshotFiles) -> tuple[float, float]:
    """Seconds of writing and of reading a state, in those of a step."""

    def advance(steps: int) -> None:
        jax.block_until_ready(programs.advance(inputs, inputs.init, [], 0, steps))

    x = _as_numbers(inputs.init)
    write = _seconds(lambda: files.write(0, 0, x))
    read = _seconds(lambda: files.read(0, 0))
    files.remove(0)
    advance(1)  # compiles
    steps, total = 1, 0.0
    while total < _TRIAL_SECONDS and steps < programs.length:
        steps = min(8 * steps, programs.length)
        total = _seconds(lambda steps=steps: advance(steps))
    step = (total or _seconds(lambda: advance(1))) / steps
    return write / step, read / step


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A rollout, compared by everything but its step: that is compared by the key."""

    rollout: Rollout = dataclasses.field(compare=False)
    rest: Any = None

    def __post_init__(self) -> None:
        r = self.rollout
        object.__setattr__(self, "rest", (r.length, r.snapshots, r.leaf, r.reverse))


@functools.lru_cache(maxsize=16)
def _programs(key: Any, shape: _Shape, active: Active) -> "_Programs":
    del key
    return _Programs(shape.rollout, active)


class _Programs:
    """The compiled segments. `start` and `stop` are numbers, so that each is compiled once."""

    def __init__(self, rollout: Rollout, active: Active):
        self.rollout, self.active = rollout, active
        self.length: int = rollout.length or 0
        self.advance = jax.jit(self._advance)
        self.keep = jax.jit(self._keep, static_argnames="finish")
        self.turn = jax.jit(self._turn, donate_argnums=2)

    def outputs(self, inputs: Inputs) -> Arrays:
        """Room for the outputs of all steps."""
        return output_buffers(self.rollout, inputs)

    def start(self, inputs: Inputs, bars: Arrays) -> tuple[Any, Arrays]:
        """Cotangents before the reverse sweep: of constants, state and data; and those of the outputs."""
        split, active = len(self.active.carry), self.active
        consts_bar = [jnp.zeros_like(inputs.consts[i]) for i in active.consts]
        xs_bar = [jnp.zeros_like(inputs.xs[i]) for i in active.xs]
        return (consts_bar, [jnp.array(b, copy=True) for b in bars[:split]], xs_bar), bars[split:]

    def _step(self, inputs: Inputs) -> Callable[..., Any]:
        def step(i: Any, carry: Arrays, ys: Arrays) -> tuple[Arrays, Arrays]:
            carry, y = self.rollout.step(inputs.consts, carry, self.rollout.data(inputs, i))
            return carry, store(ys, y, self.rollout.row(inputs, i)) if ys else ys

        return step

    def _advance(self, inputs: Inputs, x: Arrays, ys: Arrays, start: Any, stop: Any) -> tuple[Arrays, Arrays]:
        step = self._step(inputs)
        return fori_loop(start, stop, lambda i, c: step(i, *c), (x, ys))

    def _keep(self, inputs: Inputs, x: Arrays, ys: Arrays, start: Any, stop: Any, finish: bool = True) -> Any:
        part = _part(inputs, start, stop)
        return sweep_forward(self.rollout.splits, part.count[0], self._step(part), x, ys, finish)

    def _turn(self, inputs: Inputs, kept: Kept, total: Any, ys_bar: Arrays, start: Any, stop: Any) -> Any:
        return reverse_steps(self.rollout, self.active, _part(inputs, start, stop), kept, [], ys_bar, total)


def _part(inputs: Inputs, start: Any, stop: Any) -> Inputs:
    """The inputs for steps start, ..., stop - 1, numbered from zero."""
    start, stop = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)
    return inputs._replace(count=(stop - start, stop - start), offset=start)


def _as_numbers(x: Arrays) -> list[np.ndarray]:
    """A state as arrays that can be stored: random keys as their data."""
    return [np.asarray(jax.random.key_data(v) if _is_key(v) else v) for v in x]


def _as_state(numbers: Sequence[np.ndarray], like: Arrays) -> Arrays:
    """A state read back."""
    return [
        jax.random.wrap_key_data(jnp.asarray(n), impl=jax.random.key_impl(v)) if _is_key(v) else jnp.asarray(n)
        for n, v in zip(numbers, like, strict=True)
    ]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
