"""From what a user says of checkpointing to a schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._budget import Budget, best_schedule
from ._disk import Disk
from ._memory import bytes_of, step_bytes
from ._rollout import Rollout
from .schedules import Schedule, binomial, multistage, online, store_all

STORE_ALL_BYTES = 256 * 10**6
ONLINE_BYTES = 2**20
Checkpoint = int | Schedule | Budget | Disk | None
Arrays = list[Any]


def resolve_known(
    n: int,
    checkpoint: Checkpoint,
    sizes: Callable[[], tuple[int, int]],
    planned: Callable[[Budget], binomial | store_all],
) -> binomial | store_all:
    """The schedule for n steps.

    `sizes()` are the bytes of a state and of a step's residuals, `planned(budget)` the plan within a budget; both are
    asked for only where they decide.
    """
    if isinstance(checkpoint, Budget):
        return planned(checkpoint)
    if isinstance(checkpoint, multistage | online):
        text = (
            f"a schedule in memory for a known number of steps, got {checkpoint}. Use binomial({n}, ...), or "
            "Disk(path, snapshots=...) for snapshots on disk."
        )
        raise _unfit(text)
    if isinstance(checkpoint, binomial | store_all):
        if checkpoint.n not in (n, None):
            name = type(checkpoint).__name__
            text = f"a schedule of the loop's {n} steps, got {checkpoint}. Use {name}({n}, ...)."
            raise _unfit(text)
        return checkpoint
    if checkpoint is not None:
        return binomial(n, _number(checkpoint))
    state, residuals = sizes()
    if n * residuals <= STORE_ALL_BYTES:
        return store_all(n)
    return portable(n, state, residuals)


def portable(n: int, state: int, residuals: int) -> binomial:
    """√(2n) snapshots, with which no step is evaluated more than three times, and as many bytes for a leaf."""
    snapshots = max(1, round((2 * n) ** 0.5))
    leaf = snapshots * state // max(residuals, 1)
    return binomial(n, snapshots, leaf=int(min(max(leaf, 1), max(1, n // snapshots))))


def resolve_unknown(checkpoint: Checkpoint, state_bytes: int) -> online:
    """The schedule of a loop whose length shows only when it ends."""
    if isinstance(checkpoint, online):
        return dataclasses.replace(checkpoint, n=None)
    if isinstance(checkpoint, Schedule | Budget | Disk):
        text = (
            f"for a while loop a number of snapshots, online(...) or None, got {checkpoint}: the number of steps is "
            "not known before the loop has ended. Use online(snapshots), or `checkpointing.scan`."
        )
        raise _unfit(text)
    if checkpoint is not None:
        return online(_number(checkpoint))
    return online(int(min(max(ONLINE_BYTES // max(state_bytes, 1), 64), 1024)))


def _number(checkpoint: Any) -> int:
    if isinstance(checkpoint, bool) or not isinstance(checkpoint, int | np.integer) or checkpoint < 1:
        raise _misuse(checkpoint)
    return int(checkpoint)


def _misuse(checkpoint: Any) -> ValueError:
    return _unfit(f"a number of snapshots of at least 1, a schedule, a Budget, a Disk, or None; got {checkpoint!r}.")


def _unfit(text: str) -> ValueError:
    return ValueError(f"`checkpoint` must be {text}")


def resolve_rollout(rollout: Rollout, checkpoint: Checkpoint, consts: Arrays, init: Arrays, xs: Arrays) -> Rollout:
    """The rollout with its schedule set from `checkpoint`.

    With nothing said every state is stored while they fit 256 MB. A state is all that a reverse sweep over a rollout
    keeps of a step (not the step's residuals), so this costs one more evaluation a step than storing residuals would;
    measured on twelve-stage steps it is faster all the same, since recomputing beats reading residuals back.
    """
    if isinstance(checkpoint, Disk) or (isinstance(checkpoint, Budget) and checkpoint.disk is not None):
        text = (
            "in memory here: a simulation is one compiled program, and snapshots on disk are driven from the host. Use "
            "a Budget without a disk, or `checkpointing.scan` for a step of your own."
        )
        raise _unfit(text)
    n = rollout.length or 0
    state = bytes_of(init)

    def planned(budget: Budget) -> binomial | store_all:
        data = [x[0] for x in xs]
        body = jax.make_jaxpr(lambda *a: rollout.step(list(a[0]), list(a[1]), list(a[2])))(consts, init, data)
        step = step_bytes(body, len(consts), len(init))
        if rollout.pullback is None:
            return best_schedule(n, budget, step)
        # A step with its own pullback needs both its ends, and no residuals.
        return best_schedule(n, budget, dataclasses.replace(step, residuals=state), leaves=False)

    schedule = resolve_known(n, checkpoint, lambda: (state, state), planned)
    if isinstance(schedule, store_all):
        return dataclasses.replace(rollout, snapshots=n)
    return dataclasses.replace(rollout, snapshots=schedule.snapshots, leaf=schedule.leaf)
