"""Multistage (H-Revolve) checkpointing: snapshots in memory and on disk."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ._actions import Action, Advance, Restore, Store, Youturn
from ._binomial import advances, binomial
from ._schedule import Schedule, checked

BLOCKS = 1024  # a chain of more segments is planned in this many blocks; below, the plan is optimal
ROUNDING = 1 - 1e-12  # a gain that sums of costs cannot tell from rounding is none: ties go to memory


class Reverse(NamedTuple):
    """Reverse steps `start`, ..., `stop - 1` in memory, from the working state `start`, with all slots of memory."""

    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class multistage(Schedule):  # noqa: N801 (a value made by its name, as the field writes it)
    """The schedule that reverses `n` steps with snapshots in memory and on disk at the lowest total cost.

    Choose it when memory holds few states and a disk more of them, and the cost of an access has been measured. Where
    a disk is too slow to help, it is not used and the schedule is `binomial`.

    With t(n) the advances of binomial checkpointing in memory, w and r the costs of an access, P(n, m) the cost of n
    steps whose first state is on disk as one of m slots, and Q(n, m) the cost if it is not yet,

        P(n, m) = min(t(n), min over 0 < j < n of j + Q(n - j, m - 1) + r + P(j, m)),
        Q(n, m) = min(t(n), w + P(n, m)),    Q(n, 0) = t(n),

    and the schedule costs Q(n, disk). Snapshots go to disk at multiples of the leaf; in chains of more than 1,024
    leaves, at multiples of the fewest leaves that make at most 1,024 blocks, while costs in memory stay exact.

    Parameters
    ----------
    n
        Number of steps.
    memory
        Number of states held at once in memory.
    disk
        Number of states held at once on disk; 0 is allowed.
    write_cost, read_cost
        Cost of writing and of reading one state on disk, in evaluations of one step. Memory costs nothing.
    leaf
        Number of consecutive steps that are reversed at once from their residuals.

    Source: Herrmann and Pallez, "H-Revolve: a framework for adjoint computation on synchronous hierarchical
    platforms", ACM TOMS 46 (2020), doi:10.1145/3378672, for two levels of which the first is free.

    Examples
    --------
    >>> from tapeless.checkpointing import binomial, multistage
    >>> schedule = multistage(100, memory=5, disk=20, write_cost=2, read_cost=2)
    >>> schedule.cost, binomial(100, 5).advances
    (233, 316)
    >>> schedule.advances, schedule.disk_writes, schedule.disk_reads
    (181, 13, 13)
    >>> list(multistage(100, memory=5, disk=20, write_cost=99, read_cost=99)) == list(binomial(100, 5))
    True
    """

    n: int
    memory: int
    disk: int
    write_cost: float
    read_cost: float
    leaf: int = 1

    def __post_init__(self) -> None:
        """Refuse what no schedule can do."""
        for name, least in (("n", 0), ("memory", 1), ("disk", 0), ("leaf", 1)):
            checked(name, getattr(self, name), least)
        _checked_cost("write_cost", self.write_cost)
        _checked_cost("read_cost", self.read_cost)

    @property
    def slots(self) -> int:
        """Snapshots that are used in memory: never more than its longest chain has segments."""
        return binomial(_counts(self).longest, self.memory, self.leaf).slots

    @property
    def advances(self) -> int:
        """Evaluations that only advance the state."""
        return _counts(self).advances

    @property
    def disk_writes(self) -> int:
        """States written to disk."""
        return _counts(self).writes

    @property
    def disk_reads(self) -> int:
        """States read from disk."""
        return _counts(self).reads

    @property
    def cost(self) -> float:
        """Evaluations that only advance, and accesses of the disk in units of them."""
        return self.advances + self.write_cost * self.disk_writes + self.read_cost * self.disk_reads

    def segments(self) -> Iterator[Store | Restore | Advance | Reverse]:
        """Yield the coarse actions: those of the disk, and the chains that are reversed in memory."""
        if self.n == 0:
            return
        plan = _plan(self)
        chains = [(0, self.n, plan.disk, False)]
        while chains:
            start, stop, free, stored = chains.pop()
            if stored:
                yield Restore(start, plan.disk - free, level=1)
            split = plan.split(start, stop, free, stored)
            if split == stop:
                yield Reverse(start, stop)
                continue
            if not stored:
                yield Store(start, plan.disk - free, level=1)
            yield Advance(start, split)
            chains += [(start, split, free, True), (split, stop, free - 1, False)]

    def __iter__(self) -> Iterator[Action]:
        """Yield the actions of one forward run and its reversal."""
        for segment in self.segments():
            if isinstance(segment, Reverse):
                chain = binomial(segment.stop - segment.start, self.memory, self.leaf)
                yield from (_shifted(action, segment.start) for action in chain)
            else:
                yield segment


class Counts(NamedTuple):
    """What a schedule takes in all."""

    advances: int
    writes: int
    reads: int
    longest: int  # number of steps of the longest chain reversed in memory


class Plan(NamedTuple):
    """Where chains are split. Tables are indexed [start is stored, free slots, blocks]; 0 blocks ahead is no split."""

    n: int
    block: int
    disk: int  # slots that can be of use
    inner: np.ndarray  # for chains that end at a block
    last: np.ndarray  # for chains that end at n

    def split(self, start: int, stop: int, free: int, stored: bool) -> int:
        """The next state to go to disk in steps `start`, ..., `stop - 1`; `stop` if they are reversed in memory."""
        table = self.last if stop == self.n else self.inner
        ahead = int(table[int(stored), free, -(-(stop - start) // self.block)])
        return start + ahead * self.block if ahead else stop


@functools.lru_cache(maxsize=16)
def _counts(schedule: multistage) -> Counts:
    segments = list(schedule.segments())
    chains = [s.stop - s.start for s in segments if isinstance(s, Reverse)]
    between = sum(s.stop - s.start for s in segments if isinstance(s, Advance))
    return Counts(
        between + sum(advances(chain, schedule.memory, schedule.leaf) for chain in chains),
        sum(isinstance(s, Store) for s in segments),
        sum(isinstance(s, Restore) for s in segments),
        max(chains, default=0),
    )


@functools.lru_cache(maxsize=16)
def _plan(schedule: multistage) -> Plan:
    n, leaf = schedule.n, schedule.leaf
    block = leaf * -(-n // (leaf * BLOCKS))
    blocks = -(-n // block)
    disk = min(schedule.disk, blocks - 1)
    ends = block * np.arange(blocks + 1)
    inner, stored = _splits(schedule, disk, ends)
    short = ends[-1] - n  # steps that the last block lacks
    last = _splits(schedule, disk, np.maximum(ends - short, 0), stored)[0] if short else inner
    return Plan(n, block, disk, inner, last)


def _splits(
    schedule: multistage, disk: int, steps: np.ndarray, left: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks ahead to the best split of chains of `steps[k]` steps, and P, indexed [free slots, blocks].

    `left` is P for the left parts of the chains, which end at a block, where those of `steps` do not.
    """
    in_memory = np.array([advances(int(n), schedule.memory, schedule.leaf) for n in steps], float)
    P = np.tile(in_memory, (disk + 1, 1))
    Q = P.copy()
    left = P if left is None else left
    splits = np.zeros((2, *P.shape), np.int32)
    rows = np.arange(disk)
    for k in range(2, len(steps)):
        ahead = steps[k] - steps[k - 1 : 0 : -1]
        costs = Q[:-1, k - 1 : 0 : -1] + left[1:, 1:k] + (ahead + schedule.read_cost)
        best = costs.argmin(axis=1)
        split = costs[rows, best]
        for stored, table, cost in ((1, P, split), (0, Q, split + schedule.write_cost)):
            better = cost < in_memory[k] * ROUNDING
            table[1:, k] = np.where(better, cost, in_memory[k])
            splits[stored, 1:, k] = np.where(better, best + 1, 0)
    return splits, P


def _shifted(action: Action, by: int) -> Action:
    if isinstance(action, Advance | Youturn):
        return action._replace(start=action.start + by, stop=action.stop + by)
    return action._replace(step=action.step + by)


def _checked_cost(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        message = f"`{name}` must be a finite number of at least 0, got {value!r}."
        raise ValueError(message)
