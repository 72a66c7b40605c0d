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

BLOCKS = 4096  # longer chains are planned in this many blocks, or in as many as can be compared with this much work:
WORK = 2**27  # blocks squared times slots, which takes about 0.1 s
SLOTS = 512  # most slots on disk that a plan with too few of them uses
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

    and the schedule costs Q(n, disk). The first state is stored on one of the two levels.

    Snapshots go to disk at multiples of the leaf. The cost is the lowest possible for up to 4,096 leaves if the disk
    has room for all the plan wants; where it has not, for up to √(2²⁷ / disk) leaves: 1,638 with 50 slots, and 512
    with 512, the most that are then used. Longer chains are planned in that many blocks, and each block within itself.

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
        return _segments(self.n, _plan(self)) if self.n else iter(())

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
    """Where to split a chain that is made of blocks, and of one shorter block at its end."""

    block: int
    inner: np.ndarray  # blocks ahead to the split, 0 for none, for chains that end at a block: [stored, free, blocks]
    last: np.ndarray  # the same for chains that end where all do
    costs: tuple[np.ndarray, np.ndarray]  # P and Q of the whole chain: [free]
    parts: "dict[int, Plan]"  # plans within a block, by its number of steps; empty if blocks are leaves

    def split(self, steps: int, used: int, stored: bool) -> "tuple[Plan, int]":
        """Steps ahead to the next state that goes to disk, 0 for none, and the plan of both parts."""
        blocks = -(-steps // self.block)
        if blocks == 1 and self.parts:
            return self.parts[steps].split(steps, used, stored)
        table = self.last if steps % self.block else self.inner
        free = max(table.shape[1] - 1 - used, 0)
        return self, self.block * int(table[int(stored), free, blocks])


def _segments(n: int, plan: Plan) -> Iterator[Store | Restore | Advance | Reverse]:
    chains = [(plan, 0, n, 0, False)]  # whose first state has slot `slot`, and is stored in it or not
    while chains:
        plan, start, stop, slot, stored = chains.pop()
        if stored:
            yield Restore(start, slot, level=1)
        plan, ahead = plan.split(stop - start, slot, stored)
        if ahead == 0:
            yield Reverse(start, stop)
            continue
        if not stored:
            yield Store(start, slot, level=1)
        yield Advance(start, start + ahead)
        chains += [(plan, start, start + ahead, slot, True), (plan, start + ahead, stop, slot + 1, False)]


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
    plan = _blocks(schedule, schedule.n, None)
    stores = (segment for segment in _segments(schedule.n, plan) if isinstance(segment, Store))
    if all(store.slot < schedule.disk for store in stores):
        return plan
    return _blocks(schedule, schedule.n, min(schedule.disk, SLOTS))


def _blocks(schedule: multistage, n: int, slots: int | None) -> Plan:
    """Plan a chain of n steps with `slots` on disk, or with no limit (None)."""
    most = min(BLOCKS, math.isqrt(WORK // (slots or 1)))
    block = schedule.leaf * -(-n // (schedule.leaf * most))
    whole = block * np.arange(-(-n // block) + 1)
    short = np.maximum(whole - (whole[-1] - n), 0)
    sizes = {block, int(short[1])} if block > schedule.leaf else set()
    parts = {size: _blocks(schedule, size, slots) for size in sizes}
    inner, back, costs = _splits(schedule, slots, whole, parts)
    last = inner
    if short[-1] < whole[-1]:
        last, _, costs = _splits(schedule, slots, short, parts, back)
    return Plan(block, inner, last, costs, parts)


def _splits(
    schedule: multistage, slots: int | None, steps: np.ndarray, parts: dict[int, Plan], back: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Blocks ahead to the best splits of chains of `steps[k]` steps, with `slots` on disk or with no limit (None).

    `back[m, j]` is the cost of going j blocks ahead, and in the end of coming back and reversing them: j + r + P(j, m).
    """
    in_memory = np.array([advances(int(n), schedule.memory, schedule.leaf) for n in steps], float)
    P = np.tile(in_memory, (2 if slots is None else slots + 1, 1))
    Q = P.copy()
    if parts:
        P[:, 1], Q[:, 1] = parts[int(steps[1])].costs
    splits = np.zeros((2, *P.shape), np.int16)
    given, back = back, P + steps + schedule.read_cost if back is None else back
    rows = np.arange(len(P) - 1)
    for k in range(2, len(steps)):
        costs = Q[:-1, 1:k] + back[1:, k - 1 : 0 : -1]
        best = costs.argmin(axis=1)  # of equal splits the farthest: it takes fewer accesses
        split = costs[rows, best]
        for stored, table, cost in ((1, P, split), (0, Q, split + schedule.write_cost)):
            better = cost < in_memory[k] * ROUNDING
            table[1:, k] = np.where(better, cost, in_memory[k])
            splits[stored, 1:, k] = np.where(better, k - 1 - best, 0)
        if slots is None:  # one slot less makes no difference
            P[0, k], Q[0, k], splits[:, 0, k] = P[1, k], Q[1, k], splits[:, 1, k]
        if given is None:
            back[:, k] = P[:, k] + steps[k] + schedule.read_cost
    return splits, back, (P[:, -1], Q[:, -1])


def _shifted(action: Action, by: int) -> Action:
    if isinstance(action, Advance | Youturn):
        return action._replace(start=action.start + by, stop=action.stop + by)
    return action._replace(step=action.step + by)


def _checked_cost(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        message = f"`{name}` must be a finite number of at least 0, got {value!r}."
        raise ValueError(message)
