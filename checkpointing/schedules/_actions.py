"""The language of schedules. Steps are numbered from 0; step k leads from state k to state k + 1."""

from typing import NamedTuple


class Advance(NamedTuple):
    """Evaluate steps `start`, ..., `stop - 1`, from state `start` to state `stop`."""

    start: int
    stop: int


class Store(NamedTuple):
    """Copy the working state, which is state `step`, to slot `slot` of memory (level 0) or disk (level 1)."""

    step: int
    slot: int
    level: int = 0


class Restore(NamedTuple):
    """Make the snapshot in slot `slot` of a level, which is state `step`, the working state."""

    step: int
    slot: int
    level: int = 0


class Youturn(NamedTuple):
    """Evaluate steps `start`, ..., `stop - 1` from the working state, recording them, and reverse them at once."""

    start: int
    stop: int


Action = Advance | Store | Restore | Youturn
