"""Snapshots on disk: a sweep driven from the host over compiled segments."""

import contextlib
import dataclasses
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..adjoint import linear_node
from ..adjoint._loops import fori_loop
from ..adjoint._trace import differentiable, instantiated, known_value, zero_tangent
from ._active import Active, active_tangents
from ._loop import Inputs
from ._memory import bytes_of
from ._reverse import reverse_steps
from ._rollout import Residuals, Rollout, output_buffers, tangent
from ._snapshot_files import SnapshotFiles
from ._sweep import Arrays, Kept, store, sweep_forward
from .schedules import Advance, Restore, Store, multistage
from .schedules._schedule import checked

_TRIAL_SECONDS = 0.2  # how long costs are measured before a run
_SHARE = 0.9  # of the free space, at most


@dataclasses.dataclass(frozen=True)
class Disk:
    """Snapshots in memory and on disk, for a gradient whose states do not fit in memory.

    Choose it for long runs of large states, where `snapshots` states in memory would cost many evaluations. The
    schedule is the optimal one for the measured cost of a step and of an access (`multistage`); a disk that is too slow
    to help is not used. The sweep is driven from the host: it cannot be part of a larger `jit` or `vmap`, and has no
    second derivatives.

    Parameters
    ----------
    path
        A folder. Each run makes a folder of its own in it, and removes it when the gradient has been computed; what a
        killed run left there is removed by the next. Several runs may share it.
    snapshots
        Number of states held in memory.
    disk
        Most states on disk at once; None for as many as nine tenths of the free space hold.
    leaf
        Number of consecutive steps that are reversed at once from their residuals.
    write_cost, read_cost
        Cost of writing and reading a state in evaluations of a step; None to measure them.

    Raises
    ------
    ValueError
        On use under `jit`, `vmap` or a second derivative.
    SnapshotError
        The disk is full, or a snapshot is not what was written.

    Source: Herrmann and Pallez, "H-Revolve", ACM TOMS 46 (2020), doi:10.1145/3378672.

    Examples
    --------
    >>> import tempfile, jax, jax.numpy as jnp
    >>> from tapeless import checkpointing
    >>> level = checkpointing.Disk(tempfile.mkdtemp(), snapshots=3)
    >>> step = lambda u, _: (u - 0.01 * u**2, None)
    >>> f = lambda u: checkpointing.scan(step, u, length=100, checkpoint=level)[0]
    >>> round(float(jax.grad(f)(1.0)), 4)
    0.2504
    """

    path: str | os.PathLike[str]
    snapshots: int
    disk: int | None = None
    leaf: int = 1
    write_cost: float | None = None
    read_cost: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        object.__setattr__(self, "path", os.fspath(self.path))
        checked("snapshots", self.snapshots, 1)
        checked("leaf", self.leaf, 1)
        if self.disk is not None:
            checked("disk", self.disk, 0)

    def schedule(self, n: int, state_bytes: int, costs: Callable[[], tuple[float, float]]) -> multistage:
        """The optimal schedule for n steps; `costs()` measures those that are not given."""
        write, read = self.write_cost, self.read_cost
        if write is None or read is None:
            measured = costs()
            write = measured[0] if write is None else write
            read = measured[1] if read is None else read
        most = self.disk
        if most is None:
            most = int(_SHARE * shutil.disk_usage(_existing(Path(self.path))).free) // max(state_bytes, 1)
        return multistage(n, self.snapshots, min(most, max(n // self.leaf, 1)), write, read, self.leaf)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def refuse_traced(args: Sequence[Any]) -> None:
    """One clear error where a host-driven sweep cannot run."""
    if any(known_value(x) is None for x in args):
        message = (
            "snapshots on disk need a call that is not traced: `Disk` drives its sweep from the host. Take the gradient "
            "outside `jit` and `vmap` (the steps are compiled all the same), or keep snapshots in memory with "
            "`checkpoint=` a number or a `Budget`."
        )
        raise ValueError(message)


def run_on_disk(rollout: Rollout, key: Any, level: Disk, consts: Arrays, init: Arrays, xs: Arrays) -> Any:
    """The final carry and the outputs of a rollout with snapshots on disk, with derivatives of first order.

    `key` stands for the step: equal keys share compiled programs.
    """
    refuse_traced([*consts, *init, *xs])
    consts, init, xs = jax.tree.map(jnp.asarray, (consts, init, xs))

    @jax.custom_jvp
    def node(consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return rollout(consts, init, xs)

    def rule(primals: Any, tangents: Any) -> Any:
        consts, init, xs = primals
        _refuse_second_order([*consts, *init, *xs])
        active = Active.of(tangents[0], init, tangents[2])
        run = _HostRun(_programs(key, _Shape(rollout), active), level, Inputs(consts, init, xs))
        carry, ys = run.forward()
        residuals = Residuals(Inputs(consts, init, xs))
        dots = [*map(instantiated, active.pick(tangents[0], None, tangents[2])), *active_tangents(tangents[1])]
        out = linear_node(
            lambda r, z: tangent(rollout, active, residuals.rebuild(r)[0], z),
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


def _refuse_second_order(values: Sequence[Any]) -> None:
    if any(isinstance(x, Tracer) for x in values):
        message = (
            "a rollout with snapshots on disk has first derivatives only, one cotangent at a time. Keep snapshots in "
            "memory for more: `checkpoint=` a number of snapshots or a `Budget`."
        )
        raise ValueError(message)


class _HostRun:
    """One forward run and its reversal, action by action."""

    def __init__(self, programs: "_Programs", level: Disk, inputs: Inputs):
        self.programs, self.level, self.inputs = programs, level, inputs
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
        schedule = self.level.schedule(programs.length, bytes_of(inputs.init), lambda: self._costs(files))
        segments = schedule.segments()
        x, ys = inputs.init, programs.outputs(inputs)
        for segment in segments:
            if isinstance(segment, Store):
                files.write(segment.slot, segment.step, _as_numbers(x))
            elif isinstance(segment, Advance):
                x, ys = programs.advance(inputs, x, ys, segment.start, segment.stop)
            else:
                x, ys, kept = programs.keep(inputs, x, ys, segment.start, segment.stop)
                self.ready = files, segments, segment, kept
                break
        return x, ys

    def reverse(self, bars: Arrays) -> Arrays:
        """Cotangents of the active inputs from those of the final state and the outputs."""
        _refuse_second_order(bars)
        if self.ready is None:  # pulled back a second time
            self.forward()
        (files, segments, last, kept), self.ready = self.ready, None
        with contextlib.closing(files):
            return self._reverse(files, segments, last, kept, bars)

    def _reverse(self, files: SnapshotFiles, segments: Iterator[Any], last: Any, kept: Any, bars: Arrays) -> Arrays:
        programs, inputs = self.programs, self.inputs
        total, ys_bar = programs.start(inputs, bars)
        total = programs.turn(inputs, kept, total, ys_bar, last.start, last.stop)
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
                *_, kept = programs.keep(inputs, x, [], segment.start, segment.stop)
                total = programs.turn(inputs, kept, total, ys_bar, segment.start, segment.stop)
        consts_bar, carry_bar, xs_bar = total
        return [*consts_bar, *xs_bar, *carry_bar]

    def _costs(self, files: SnapshotFiles) -> tuple[float, float]:
        """Seconds of writing and of reading a state, in those of a step."""
        x = _as_numbers(self.inputs.init)
        write = _seconds(lambda: files.write(0, 0, x))
        read = _seconds(lambda: files.read(0, 0))
        files.remove(0)
        steps, step = 1, 0.0
        self._advance(1)  # compiles
        while step * steps < _TRIAL_SECONDS and steps < self.programs.length:
            steps = min(8 * steps, self.programs.length)
            step = _seconds(lambda steps=steps: self._advance(steps)) / steps
        step = step or _seconds(lambda: self._advance(1))
        return write / step, read / step

    def _advance(self, steps: int) -> None:
        x, _ = self.programs.advance(self.inputs, self.inputs.init, [], 0, steps)
        jax.block_until_ready(x)


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
        object.__setattr__(self, "rest", (r.length, r.snapshots, r.leaf, r.reverse, r.progress))


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
        self.keep = jax.jit(self._keep)
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

    def _keep(self, inputs: Inputs, x: Arrays, ys: Arrays, start: Any, stop: Any) -> tuple[Arrays, Arrays, Kept]:
        part = _part(inputs, start, stop)
        return sweep_forward(self.rollout.splits, part.count[0], self._step(part), x, ys)

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
