"""The language of schedules. Steps are numbered from 0; step k leads from state k to state k + 1."""

from typing import NamedTuple


class Advance(NamedTuple):
    """Evaluate steps `start`, ..., `stop - 1`, from state `start` to state `stop`."""

    start: int
    stop: int


class Store(NamedTuple):
    """Copy the working state, which is state `step`, to slot `slot`."""

    step: int
    slot: int


class Restore(NamedTuple):
    """Make the snapshot in slot `slot`, which is state `step`, the working state."""

    step: int
    slot: int


class Youturn(NamedTuple):
    """Evaluate step `step` from the working state and reverse it at once."""

    step: int


Action = Advance | Store | Restore | Youturn
