"""The time grid of a fixed-step run, and which steps are saved: whole numbers, worked out before compilation."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..adjoint._trace import known_value


class Grid(NamedTuple):
    """n steps from t0: n - 1 of length dt, the last one ends at t1 (`span` = t1 - t0)."""

    n: int
    t0: Any
    span: Any
    dt: Any


class Saves(NamedTuple):
    """Where the saved states come from.

    `times` (K,) as asked for; `steps` (K,) the grid point at or before each; `rows` (n,) the output row of each step
    (`num_rows` for none); `row_of_save` (K,) into the rows, with the initial state first. `between` says that some
    save lies between grid points, or that its time is being differentiated.
    """

    times: Any
    steps: np.ndarray
    rows: np.ndarray
    num_rows: int
    row_of_save: np.ndarray
    between: bool


def make_grid(t0: Any, t1: Any, dt: Any) -> Grid:
    """Count the steps by rounding, so that 0.1 divides 1 and 3; a remainder shortens the last step."""
    start, end, step = (_number(name, x) for name, x in (("t0", t0), ("t1", t1), ("dt", dt)))
    span = end - start
    # A span of zero whose ends are being differentiated is one step of length zero: its derivative is the rate.
    n = 1 if span == 0 and any(isinstance(x, Tracer) for x in (t0, t1)) else 0
    if span != 0:
        if step == 0 or (step > 0) != (span > 0):
            message = (
                f"`dt` must be nonzero with the sign of t1 - t0. Expected a {'positive' if span > 0 else 'negative'} "
                f"number for t0={start:g}, t1={end:g}, got {step:g}."
            )
            raise ValueError(message)
        resolution = jnp.finfo(jnp.result_type(float)).eps * max(abs(start), abs(end))
        if abs(step) < 4 * resolution:
            message = (
                f"`dt` must be resolved by the clock at t={max(start, end, key=abs):g}. Expected at least "
                f"{4 * resolution:.1e}, got {abs(step):.1e}. Count time from the start of the run, or use float64: "
                "jax.config.update('jax_enable_x64', True)."
            )
            raise ValueError(message)
        n = _count(span / step, *(t0, t1, dt))
    return Grid(n, t0, t1 - t0, dt)


def _count(ratio: float, *given: Any) -> int:
    eps = max(float(jnp.finfo(x.dtype).eps) if _is_float_array(x) else 2.3e-16 for x in given)
    nearest = round(ratio)
    if nearest >= 1 and abs(ratio - nearest) <= 16 * eps * ratio:
        return nearest
    return max(1, math.ceil(ratio))


def _is_float_array(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _number(name: str, x: Any) -> float:
    shape = () if x is None or isinstance(x, str | bytes) else jnp.shape(x)
    if x is None or isinstance(x, str | bytes) or shape != () or not jnp.isrealobj(x):
        message = f"`{name}` must be a real number, got {x!r} of shape {shape}."
        raise ValueError(message)
    value = known_value(x)
    if value is None:
        message = (
            f"`{name}` must be known when the program is traced, since it sets the number of steps. Expected a "
            f"number, got a traced value. Pass `{name}` as a Python number (static under jit), or differentiate "
            "outside jit."
        )
        raise ValueError(message)
    value = float(value)
    if not math.isfinite(value):
        message = f"`{name}` must be finite, got {value}."
        raise ValueError(message)
    return value


def make_saves(save_at: Any, grid: Grid) -> Saves:
    """Assign each save time to a grid point."""
    value = known_value(save_at)
    if value is None:
        message = (
            "`save_at` must be known when the program is traced. Expected an array of times, got a traced value. "
            "Close over the times, or differentiate with respect to them outside jit."
        )
        raise ValueError(message)
    given = np.asarray(value)
    if given.dtype.kind not in "iuf":
        message = f"`save_at` must be a one-dimensional array of times, got {save_at!r}."
        raise ValueError(message)
    wanted = given.astype(float)
    if wanted.ndim != 1:
        message = f"`save_at` must be a one-dimensional array of times, got shape {wanted.shape}."
        raise ValueError(message)
    t0, span, dt = (float(known_value(x)) for x in grid[1:])
    elapsed = (wanted - t0) * (1 if span >= 0 else -1)
    # Times are equal to a grid point, or within the span, up to the rounding of the numbers given.
    eps = max(jnp.finfo(jnp.result_type(float)).eps, np.finfo(given.dtype).eps if given.dtype.kind == "f" else 0)
    slack = 16 * float(eps) * max(abs(t0), abs(t0 + span))
    outside = ~((elapsed >= -slack) & (elapsed <= abs(span) + slack))
    if outside.any():
        message = (
            f"`save_at` must lie between t0={t0:g} and t1={t0 + span:g}, got {wanted[outside][:3].tolist()}. Extend "
            "the span, or drop these times."
        )
        raise ValueError(message)
    steps, between = _locate(elapsed, grid.n, abs(span), abs(dt), slack)
    moving = any(isinstance(x, Tracer) for x in (save_at, grid.t0, grid.span, grid.dt))
    used = np.unique(steps[steps > 0])
    rows = np.full(grid.n, len(used), np.int32)
    rows[used - 1] = np.arange(len(used), dtype=np.int32)
    row_of_save = np.where(steps > 0, np.searchsorted(used, steps) + 1, 0).astype(np.int32)
    return Saves(save_at, steps.astype(np.int32), rows, len(used), row_of_save, bool(between or moving))


def _locate(elapsed: np.ndarray, n: int, span: float, dt: float, slack: float) -> tuple[np.ndarray, bool]:
    if n == 0:
        return np.zeros(elapsed.shape, int), False
    nearest = np.rint(elapsed / dt)
    on_grid = np.abs(elapsed - nearest * dt) <= slack
    steps = np.clip(np.where(on_grid, nearest, np.floor(elapsed / dt)), 0, n - 1).astype(int)
    steps[elapsed >= span - slack] = n
    at = np.where(steps == n, span, steps * dt)
    return steps, bool(np.any(np.abs(elapsed - at) > slack))


def step_times(grid: Grid, i: Any) -> tuple[Any, Any]:
    """Start and length of step i. The clock is t0 + i dt by an integer counter: it neither drifts nor sticks."""
    last = grid.span - (grid.n - 1) * grid.dt
    return grid.t0 + i * grid.dt, jnp.where(i == grid.n - 1, last, grid.dt)
