"""How many snapshots a loop keeps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from .schedules import binomial
from ._residual_bytes import STORE_ALL_BYTES
from ._rollout import Rollout


def resolve_snapshots(n: int, checkpoint: int | binomial | None, step_bytes: Callable[[], int]) -> int | None:
    """The number of snapshots for n steps; None to store everything.

    `step_bytes()` is what storing everything keeps of one step, asked for only where it decides.
    """
    if isinstance(checkpoint, binomial):
        if checkpoint.n != n:
            message = (
                f"`checkpoint` must be a schedule of the loop's {n} steps, got {checkpoint}. Use binomial({n}, ...)."
            )
            raise ValueError(message)
        return checkpoint.snapshots
    if checkpoint is not None:
        whole = isinstance(checkpoint, int | np.integer) and not isinstance(checkpoint, bool)
        if not whole or checkpoint < 1:
            message = (
                f"`checkpoint` must be a number of snapshots of at least 1, a schedule, or None; got {checkpoint!r}."
            )
            raise ValueError(message)
        return int(checkpoint) if n > 0 else None
    if n * step_bytes() <= STORE_ALL_BYTES:
        return None
    return max(1, round((2 * n) ** 0.5))


def resolve_rollout(rollout: Rollout, checkpoint: int | binomial | None, init: list[Any]) -> Rollout:
    """The rollout with its number of snapshots set from `checkpoint`.

    With nothing said every state is stored while they fit 256 MB. A state is all that a reverse sweep over a rollout
    keeps of a step (not the step's residuals), so this costs one more evaluation a step than storing residuals would;
    measured on twelve-stage steps it is faster all the same, since recomputing beats reading residuals back.
    """
    state_bytes = sum(x.size * x.dtype.itemsize for x in init)
    snapshots = resolve_snapshots(rollout.length, checkpoint, lambda: state_bytes)
    return dataclasses.replace(rollout, snapshots=snapshots or rollout.length)
