"""Binomial (Revolve) checkpointing as a schedule value: plain integers, no JAX."""

import dataclasses
import math
from collections.abc import Iterator

from ._actions import Action, Advance, Restore, Store, Youturn


@dataclasses.dataclass(frozen=True)
class binomial:  # noqa: N801 (a value made by its name, as the field writes it)
    """The schedule that reverses `n` steps with `snapshots` states in memory and the fewest evaluations.

    Choose it when all steps cost the same and their number is known. Iterating yields the actions; the schedule
    moves no data itself.

    With β(s, r) = C(s + r, s) and r the smallest integer with n ≤ β(s, r), the number of evaluations that only
    advance the state is t(n, s) = r n - β(s + 1, r - 1). The initial state is one of the s snapshots.

    Parameters
    ----------
    n
        Number of steps.
    snapshots
        Number of states held at once, the initial one included. More than `n` are not used.

    Source: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26 (2000), doi:10.1145/347837.347846,
    Proposition 1 and Lemma 1.

    Examples
    --------
    >>> from tapeless.checkpointing import binomial
    >>> schedule = binomial(100, 5)
    >>> schedule.advances, schedule.repetitions
    (316, 4)
    >>> list(binomial(2, 1))[:3]
    [Store(step=0, slot=0), Advance(start=0, stop=1), Youturn(step=1)]
    """

    n: int
    snapshots: int

    def __post_init__(self) -> None:
        """Refuse what no schedule can do."""
        for name, value, least in (("n", self.n, 0), ("snapshots", self.snapshots, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                message = f"`{name}` must be an integer of at least {least}, got {value!r}."
                raise ValueError(message)

    @property
    def slots(self) -> int:
        """Snapshots that are used: never more than there are steps."""
        return max(1, min(self.snapshots, self.n))

    @property
    def repetitions(self) -> int:
        """The repetition number r: no step is evaluated more often than r times before it is reversed."""
        return repetitions(self.n, self.slots)

    @property
    def advances(self) -> int:
        """t(n, s), the evaluations that only advance the state."""
        return advances(self.n, self.slots)

    def __iter__(self) -> Iterator[Action]:
        """Yield the actions of one forward run and its reversal."""
        if self.n == 0:
            return
        stored = [0]
        yield Store(0, 0)
        position = 0
        for k in reversed(range(self.n)):
            if position != stored[-1] or k != self.n - 1:
                position = stored[-1]
                yield Restore(position, len(stored) - 1)
            while position < k:
                if stored[-1] != position:
                    stored.append(position)
                    yield Store(position, len(stored) - 1)
                stop = position + first_advance(k + 1 - position, self.slots - len(stored) + 1)
                yield Advance(position, stop)
                position = stop
            yield Youturn(k)
            if stored[-1] == k:
                stored.pop()


def beta(s: int, r: int) -> int:
    """β(s, r) = C(s + r, s): the longest chain reversible with s snapshots and r evaluations of any step."""
    return math.comb(s + r, s) if r >= 0 and s >= 0 else 0


def repetitions(n: int, s: int) -> int:
    """The smallest r with n ≤ β(s, r)."""
    if s == 1:
        return max(n - 1, 0)
    r = 0
    while beta(s, r) < n:
        r += 1
    return r


def advances(n: int, s: int) -> int:
    """t(n, s) = r n - β(s + 1, r - 1)."""
    r = repetitions(n, s)
    return r * n - beta(s + 1, r - 1)


def first_advance(n: int, s: int) -> int:
    """Number of steps to advance before the next snapshot; the largest of the optimal choices."""
    if s == 1:
        return n - 1
    r = repetitions(n, s)
    return min(beta(s, r - 1), n - beta(s - 1, r - 1))
