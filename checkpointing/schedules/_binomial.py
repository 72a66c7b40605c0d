"""Binomial (Revolve) checkpointing, with leaf segments."""

import dataclasses
import math
from collections.abc import Iterator

from ._actions import Action, Advance, Restore, Store, Youturn
from ._schedule import Schedule, checked


@dataclasses.dataclass(frozen=True)
class binomial(Schedule):  # noqa: N801 (a value made by its name, as the field writes it)
    """The schedule that reverses `n` steps with `snapshots` states in memory and the fewest evaluations.

    Choose it when all steps cost the same and their number is known.

    With β(s, r) = C(s + r, s), L the leaf and r the smallest integer with n ≤ L β(s, r), the number of evaluations
    that only advance the state is t(n, s) = r n - L β(s + 1, r - 1). The initial state is one of the s snapshots.

    Parameters
    ----------
    n
        Number of steps.
    snapshots
        Number of states held at once, the initial one included. More than there are segments are not used.
    leaf
        L, the number of consecutive steps that are reversed at once from their residuals. It saves evaluations and
        costs the residuals of L steps; L = n is store-all.

    Source: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26 (2000), doi:10.1145/347837.347846,
    Proposition 1 and Lemma 1, for L = 1; for a leaf of L steps every length in them is scaled by L.

    Examples
    --------
    >>> from tapeless.checkpointing import binomial
    >>> schedule = binomial(100, 5)
    >>> schedule.advances, schedule.repetitions
    (316, 4)
    >>> binomial(100, 5, leaf=5).advances
    165
    >>> list(binomial(2, 1))[:3]
    [Store(step=0, slot=0, level=0), Advance(start=0, stop=1), Youturn(start=1, stop=2)]
    """

    n: int
    snapshots: int
    leaf: int = 1

    def __post_init__(self) -> None:
        """Refuse what no schedule can do."""
        for name, value, least in (("n", self.n, 0), ("snapshots", self.snapshots, 1), ("leaf", self.leaf, 1)):
            checked(name, value, least)

    @property
    def slots(self) -> int:
        """Snapshots that are used: never more than there are segments."""
        return max(1, min(self.snapshots, -(-self.n // self.leaf)))

    @property
    def repetitions(self) -> int:
        """The repetition number r: no step is advanced over more often than r times before it is reversed."""
        return repetitions(self.n, self.slots, self.leaf)

    @property
    def advances(self) -> int:
        """t(n, s), the evaluations that only advance the state."""
        return advances(self.n, self.slots, self.leaf)

    def __iter__(self) -> Iterator[Action]:
        """Yield the actions of one forward run and its reversal."""
        if self.n == 0:
            return
        yield Store(0, 0)
        yield from reversal(self.n, [(0, 0)], list(reversed(range(1, self.slots))), self.leaf)


def reversal(n: int, stored: list[tuple[int, int]], free: list[int], leaf: int) -> Iterator[Action]:
    """Actions that reverse steps 0, ..., n - 1 from snapshots `stored`, (position, slot) in order.

    The working state is that of the last snapshot; `free` are the slots left.
    """
    position = stored[-1][0]
    while n > 0:
        while n - position > leaf:
            if stored[-1][0] != position:
                stored.append((position, free.pop()))
                yield Store(*stored[-1])
            stop = position + first_advance(n - position, len(free) + 1, leaf)
            yield Advance(position, stop)
            position = stop
        yield Youturn(position, n)
        n = position
        if stored[-1][0] == n:
            free.append(stored.pop()[1])
        if n > 0:
            position = stored[-1][0]
            yield Restore(*stored[-1])


def beta(s: int, r: int) -> int:
    """β(s, r) = C(s + r, s): the longest chain reversible with s snapshots and r evaluations of any step."""
    return math.comb(s + r, s) if r >= 0 and s >= 0 else 0


def repetitions(n: int, s: int, leaf: int = 1) -> int:
    """The smallest r with n ≤ L β(s, r)."""
    if s == 1:
        return max(-(-n // leaf) - 1, 0)
    r = 0
    while leaf * beta(s, r) < n:
        r += 1
    return r


def advances(n: int, s: int, leaf: int = 1) -> int:
    """t(n, s) = r n - L β(s + 1, r - 1)."""
    r = repetitions(n, s, leaf)
    return r * n - leaf * beta(s + 1, r - 1)


def first_advance(n: int, s: int, leaf: int = 1) -> int:
    """Number of steps to advance before the next snapshot; the largest of the optimal choices."""
    if s == 1:
        return n - leaf
    r = repetitions(n, s, leaf)
    return min(leaf * beta(s, r - 1), n - leaf * beta(s - 1, r - 1))
