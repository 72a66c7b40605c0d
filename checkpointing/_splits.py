"""Where to store next, as integer arithmetic inside a loop.

No code is generated per checkpoint, so compile time does not depend on the number of steps or snapshots, and no host
time is spent on lists of actions.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from .schedules._binomial import beta, repetitions

LONGEST = 2**24  # steps up to which loops of unknown length are split optimally; longer ones nearly so
ROWS = 1024  # of a table; for more snapshots than that, those up to where β(a, 2) exceeds any length
_LIMIT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """Binomial splits for `slots` snapshots and segments of `leaf` steps that are reversed at once."""

    slots: int
    leaf: int
    table: np.ndarray  # leaf · β(a, r) for a = 0, 1, ... and r = 0, 1, ...
    roomy: bool = False  # whether there is a slot for every segment

    def first_advance(self, length: Any, available: Any) -> Any:
        """How far to go from a snapshot before the next, to reverse `length` > `leaf` steps at least cost.

        `available` counts the snapshot one starts from.
        """
        if self.roomy:
            return jnp.minimum(self.leaf, length - self.leaf)
        best = jnp.minimum(*self._bounds(length, available))
        return jnp.where(available == 1, length - self.leaf, best)

    def _bounds(self, length: Any, available: Any) -> tuple[Any, Any]:
        row = self._row(available)
        r = jnp.sum(row < length, dtype=jnp.int32)
        return row[r - 1], length - self._row(available - 1)[r - 1]

    def _row(self, available: Any) -> Any:
        last = len(self.table) - 1
        table = jnp.asarray(self.table)
        if self.slots <= last:
            return table[available]
        # β(a, 1) = a + 1 beyond the table, where β(a, 2) is longer than any chain.
        return table[jnp.minimum(available, last)].at[1].set(self.leaf * (available + 1))


def make_splits(n: int | None, snapshots: int, leaf: int) -> Splits:
    """Splits for n ≥ 1 steps; for any number of them if `n` is None."""
    longest = LONGEST if n is None else n
    segments = -(-longest // leaf)
    slots = max(1, min(snapshots, segments))
    if n is not None and slots == segments:
        return Splits(slots, leaf, np.zeros((0, 0), np.int32), roomy=True)
    rows = slots if slots <= ROWS else max(ROWS, int((2 * segments) ** 0.5) + 1)
    columns = 1 if slots == 1 else repetitions(longest, slots, leaf)
    table = [[min(leaf * beta(a, r), _LIMIT) for r in range(columns + 1)] for a in range(rows + 1)]
    return Splits(slots, leaf, np.array(table, np.int32))
