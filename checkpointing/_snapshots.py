"""How many snapshots a loop keeps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ._binomial import binomial
from ._residual_bytes import STORE_ALL_BYTES, residual_bytes
from ._rollout import Rollout


def resolve_snapshots(n: int, checkpoint: int | binomial | None, step_bytes: Callable[[], int]) -> int | None:
    """The number of snapshots for n steps; None to store everything.

    `step_bytes()` is the residual of one step in bytes, asked for only where it decides.
    """
    if isinstance(checkpoint, binomial):
        if checkpoint.n != n:
            message = f"`checkpoint` must be a schedule of the loop's {n} steps, got {checkpoint}. Use binomial({n}, ...)."
            raise ValueError(message)
        return checkpoint.snapshots
    if checkpoint is not None:
        if isinstance(checkpoint, bool) or not isinstance(checkpoint, int) or checkpoint < 1:
            message = (
                f"`checkpoint` must be a number of snapshots of at least 1, a schedule, or None; got {checkpoint!r}."
            )
            raise ValueError(message)
        return checkpoint if n > 0 else None
    if n * step_bytes() <= STORE_ALL_BYTES:
        return None
    return max(1, round((2 * n) ** 0.5))


def resolve_rollout(
    rollout: Rollout, checkpoint: int | binomial | None, consts: list[Any], init: list[Any], xs: list[Any]
) -> Rollout:
    """The rollout with its number of snapshots set from `checkpoint`."""

    def step_bytes() -> int:
        if jax.config.jax_disable_jit:
            return 0
        flat, tree = jax.tree.flatten((consts, init, [x[0] for x in xs]))
        step = jax.make_jaxpr(lambda *flat: rollout.step(*jax.tree.unflatten(tree, flat)))(*flat)
        return residual_bytes(step)

    snapshots = resolve_snapshots(rollout.length, checkpoint, step_bytes)
    return dataclasses.replace(rollout, snapshots=snapshots)
