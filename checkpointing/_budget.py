"""A budget of bytes, and the best schedule that keeps within it."""

import dataclasses
import os
import re
from collections.abc import Iterator

from ._memory import StepBytes
from .schedules import binomial, multistage, store_all

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BOOKKEEPING = 16  # bytes beside a snapshot: which state it is, and where
WORKING_STATES = 4  # the state, its cotangent, and the copies that a loop makes of them


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes that the gradient of a loop may use.

    Choose it instead of a number of snapshots when you know the memory and not the loop. It bounds what the gradient
    adds to the forward run: snapshots, residuals, and the scratch of one step's pullback.

    Parameters
    ----------
    size
        Bytes, as a number or with a unit: "200 MB" (10⁶), "1.5 GiB" (2³⁰).
    lanes
        Number of lanes if the loop is batched by `vmap`: every lane has its own states.
    disk
        A folder for snapshots on disk, where memory alone would cost many evaluations (`checkpointing.Disk`).

    Examples
    --------
    >>> from tapeless.checkpointing import Budget
    >>> Budget("200 MB").bytes, Budget(10**6) == Budget("1 MB")
    (200000000, True)
    """

    size: int | str
    lanes: int = 1
    disk: str | None = None

    def __post_init__(self) -> None:
        """Read the unit; refuse what is no budget."""
        object.__setattr__(self, "size", _parsed(self.size))
        if isinstance(self.lanes, bool) or not isinstance(self.lanes, int) or self.lanes < 1:
            message = f"`lanes` must be an integer of at least 1, got {self.lanes!r}."
            raise ValueError(message)
        if self.disk is not None:
            object.__setattr__(self, "disk", os.fspath(self.disk))

    @property
    def bytes(self) -> int:
        """The budget in bytes."""
        return int(self.size)


def _parsed(size: object) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if match and match[2] in _UNITS:
        try:
            value = int(float(match[1]) * _UNITS[match[2]])
        except (OverflowError, ValueError):
            value = 0
        if value > 0:
            return value
    message = f"`size` must be a positive number of bytes, or one with a unit ({', '.join(_UNITS)}); got {size!r}."
    raise ValueError(message)


def readable(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a schedule costs: bytes at the peak, and evaluations of the step."""

    step: StepBytes
    lanes: int = 1

    def fixed(self, n: int) -> int:
        """Bytes that no schedule avoids: the working states, one pullback, the outputs and their cotangents."""
        return WORKING_STATES * self.step.state + self.step.scratch + 2 * n * self.step.outputs

    def peak(self, n: int, schedule: binomial | store_all | multistage) -> int:
        """Bytes of snapshots, residuals and all else at the peak of the reverse sweep."""
        if isinstance(schedule, store_all):
            return self.lanes * (self.fixed(n) + n * self.step.residuals)
        room = (schedule.slots + 1) * (self.step.state + BOOKKEEPING)
        recorded = schedule.leaf * self.step.residuals if schedule.leaf > 1 else 0
        return self.lanes * (self.fixed(n) + room + recorded)


def evaluations(n: int, schedule: binomial | store_all | multistage) -> int:
    """Evaluations of the step for a value and gradient, the run that returns the value included."""
    if isinstance(schedule, store_all):
        return n
    return n + schedule.advances + min(schedule.leaf, n)


def best_schedule(n: int, budget: Budget, step: StepBytes, leaves: bool = True) -> binomial | store_all:
    """The schedule with the fewest evaluations that keeps within a budget; with leaves of one step if not `leaves`."""
    cost = Cost(step, budget.lanes)
    if cost.peak(n, store_all(n)) <= budget.bytes:
        return store_all(n)
    fitting = [s for s in _candidates(n, budget, cost, n if leaves else 1) if cost.peak(n, s) <= budget.bytes]
    if not fitting:
        least = cost.peak(n, binomial(n, 1))
        message = (
            f"The budget must be at least {readable(least)} ({least:,} bytes) for this loop, got "
            f"{readable(budget.bytes)} ({budget.bytes:,} bytes): one state takes "
            f"{readable(step.state * cost.lanes)}, the pullback of a step {readable(step.scratch * cost.lanes)} more. "
            "Give a larger budget, or a smaller state or dtype."
        )
        raise ValueError(message)
    return min(fitting, key=lambda s: (evaluations(n, s), cost.peak(n, s)))


def _candidates(n: int, budget: Budget, cost: Cost, longest: int) -> Iterator[binomial]:
    """For each length of a leaf up to the longest, as many snapshots as fit; lengths grow by a few per cent."""
    leaf = 1
    while leaf <= max(longest, 1):
        rest = (budget.bytes - cost.peak(n, binomial(n, 1, leaf=leaf))) // cost.lanes
        if rest < 0 and leaf > 1:
            return
        snapshots = 1 + max(rest, 0) // (cost.step.state + BOOKKEEPING)
        yield binomial(n, max(1, min(snapshots, -(-n // leaf))), leaf=leaf)
        leaf = max(leaf + 1, leaf * 103 // 100)
