"""Schedules, replayed against a model of storage, exact tables, and optima found in other ways."""

import csv
import functools
import heapq
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
from tapeless.checkpointing import (
    Action,
    Advance,
    Restore,
    Schedule,
    Store,
    Youturn,
    binomial,
    multistage,
    online,
    store_all,
)
from tapeless.checkpointing.schedules import _multistage


def table(name: str) -> list[dict[str, str]]:
    """Rows of a table that was made independently of this package."""
    return list(csv.DictReader((Path(__file__).parent / name).read_text().splitlines()))


REVOLVE, MULTISTAGE = table("revolve_table.csv"), table("multistage_table.csv")


class Replay(NamedTuple):
    """What a schedule took; peaks and accesses by level."""

    advances: int
    evaluations: int  # recorded ones too
    writes: tuple[int, int]
    reads: tuple[int, int]
    peak: tuple[int, int]


def promises(schedule: Any) -> tuple[tuple[int, int], int]:
    """Snapshots at once in memory and on disk, and the longest turn."""
    if isinstance(schedule, store_all):
        return (1, 0), schedule.n
    if isinstance(schedule, multistage):
        return (schedule.slots, schedule.disk), schedule.leaf
    return (schedule.slots, 0), schedule.leaf


def replay(schedule: Any) -> Replay:
    """Run the actions on a model of storage that holds nothing it was not given."""
    limits, leaf = promises(schedule)
    held: tuple[dict[int, int], dict[int, int]] = ({}, {})
    state: int | None = 0  # a turn leaves no working state
    remaining, advances, peak, writes, reads = schedule.n, 0, [0, 0], [0, 0], [0, 0]
    for action in schedule:
        if isinstance(action, Store):
            assert action.step == state, "only the working state can be stored"
            assert 0 <= action.slot < limits[action.level]
            held[action.level][action.slot] = action.step
            writes[action.level] += 1
        elif isinstance(action, Restore):
            assert held[action.level][action.slot] == action.step < remaining, "a slot holds what it is said to hold"
            state = action.step
            reads[action.level] += 1
        elif isinstance(action, Advance):
            assert state == action.start < action.stop < remaining, "nothing is evaluated beyond the steps left"
            advances += action.stop - action.start
            state = action.stop
        else:
            assert state == action.start < action.stop == remaining <= action.start + leaf, "last steps first, once"
            remaining, state = action.start, None
            for level in held:
                for slot in [slot for slot, step in level.items() if step >= remaining]:
                    del level[slot]
        peak = [max(two) for two in zip(peak, map(len, held), strict=True)]
    assert remaining == 0, "every step is reversed"
    assert all(map(int.__le__, peak, limits))
    assert advances == schedule.advances
    return Replay(advances, advances + schedule.n, tuple(writes), tuple(reads), tuple(peak))


@pytest.mark.parametrize("row", [r for r in REVOLVE if int(r["n"]) <= 1000], ids=lambda r: f"{r['n']}-{r['s']}")
def test_replay_meets_the_table(row: dict[str, str]) -> None:
    """Assert that the replayed actions take exactly the optimal number of evaluations, and use the slots."""
    schedule = binomial(int(row["n"]), int(row["s"]))
    replayed = replay(schedule)
    assert replayed.advances == int(row["A_untaped_advances"])
    assert replayed.evaluations == int(row["B_total_incl_taping"])
    assert replayed.peak == (schedule.slots, 0)


def test_counts_of_long_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert the closed form for every row of the table, a million steps included, without iterating."""
    monkeypatch.setattr(binomial, "__iter__", None)
    for row in REVOLVE:
        schedule = binomial(int(row["n"]), int(row["s"]))
        assert schedule.advances == int(row["A_untaped_advances"])
        assert schedule.n + schedule.advances == int(row["B_total_incl_taping"])
        if schedule.slots == schedule.snapshots:
            assert schedule.repetitions == int(row["r"])


@functools.cache
def optimum(n: int, s: int, leaf: int) -> float:
    """Fewest advances for n steps whose first state is stored, as one of s, by trying every first advance."""
    if n <= leaf:
        return 0
    if s == 0:
        return math.inf
    return min(m + optimum(n - m, s - 1, leaf) + optimum(m, s, leaf) for m in range(1, n))


@pytest.mark.parametrize("leaf", range(1, 6))
def test_leaves_are_optimal(leaf: int) -> None:
    """Assert that schedules with leaves take the fewest advances found by dynamic programming."""
    for n in range(61):
        for s in range(1, 6):
            assert replay(binomial(n, s, leaf)).advances == optimum(n, s, leaf)


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("leaf", [1, 3])
def test_online_replays(snapshots: int, leaf: int) -> None:
    """Assert that loops of unknown length are reversed within the slots, at the evaluations counted for them."""
    for n in [*range(50), 200]:
        assert replay(online(snapshots, n, leaf)).peak[0] <= snapshots


@pytest.mark.parametrize("snapshots", [2, 4, 8, 16, 32])
def test_online_is_near_the_optimum(snapshots: int) -> None:
    """Assert that not knowing the number of steps costs at most 31 % of the evaluations."""
    for n in range(1, 2001):
        assert online(snapshots, n).advances + n <= 1.31 * (binomial(n, snapshots).advances + n)


def test_store_all_turns_once() -> None:
    """Assert that storing everything evaluates each step once, from one snapshot."""
    assert replay(store_all(20)) == Replay(0, 20, (1, 0), (0, 0), (1, 0))
    assert list(store_all(0)) == list(binomial(0, 2)) == list(online(2, 0)) == list(multistage(0, 1, 1, 1, 1)) == []


@pytest.mark.parametrize("row", MULTISTAGE, ids=lambda r: "-".join(list(r.values())[:5]))
def test_replay_meets_the_multistage_table(row: dict[str, str]) -> None:
    """Assert the optimal cost of every row, as promised and as replayed; ties are broken as by H-Revolve."""
    n, memory, disk = (int(row[name]) for name in ("n", "ram_slots", "disk_slots"))
    schedule = multistage(n, memory, disk, float(row["write_cost"]), float(row["read_cost"]))
    cost = float(row["hrevolve_cost_excl_taping"])
    assert schedule.cost == multistage_cost(schedule) == cost
    assert row["exhaustive_optimum"] in ("", str(cost), str(int(cost)))
    counts = schedule.advances, schedule.disk_writes, schedule.disk_reads
    assert counts == tuple(int(row[f"hrevolve_{name}"]) for name in ("advances", "disk_writes", "disk_reads"))


def multistage_cost(schedule: multistage) -> float:
    """Cost of the replayed actions; a disk is used only where that gains."""
    replayed = replay(schedule)
    assert (replayed.writes[1], replayed.reads[1]) == (schedule.disk_writes, schedule.disk_reads)
    assert schedule.disk_writes == 0 or schedule.cost < binomial(schedule.n, schedule.memory, schedule.leaf).advances
    return replayed.advances + schedule.write_cost * replayed.writes[1] + schedule.read_cost * replayed.reads[1]


def cheapest(n: int, memory: int, disk: int, write_cost: float, read_cost: float, leaf: int) -> float:
    """The lowest cost of any sequence of actions at all, by Dijkstra's algorithm on the states of the storage."""
    limits, costs = (memory, disk), ((0, 0), (write_cost, read_cost))
    start = (n, 0, ((), ()))  # steps left, working state (-1: none), states held by level

    def follow(left: int, state: int, held: tuple[tuple[int, ...], ...]) -> Iterator[tuple[float, Any]]:
        for level in (0, 1):
            others = held[1 - level]
            for step in held[level]:
                yield costs[level][1], (left, step, held)
                fewer = tuple(other for other in held[level] if other != step)
                yield 0, (left, state, (fewer, others) if level == 0 else (others, fewer))
            if state >= 0 and state not in held[level] and len(held[level]) < limits[level]:
                more = tuple(sorted((*held[level], state)))
                yield costs[level][0], (left, state, (more, others) if level == 0 else (others, more))
        if 0 <= state < left - 1:
            yield 1, (left, state + 1, held)
        if state >= 0 and left - state <= leaf:
            yield 0, (state, -1, held)

    queue, done = [(0.0, start)], set()
    while True:
        cost, node = heapq.heappop(queue)
        if node[0] == 0:
            return cost
        if node not in done:
            done.add(node)
            for more, after in follow(*node):
                heapq.heappush(queue, (cost + more, after))


SMALL = [(1, 1, 1), (4, 1, 1), (5, 2, 1), (7, 1, 1), (7, 1, 2), (7, 2, 1), (7, 2, 2)]


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("costs", [(0, 0), (0.5, 0.25), (1, 1), (0, 3), (2.5, 0)], ids=str)
@pytest.mark.parametrize("leaf", [1, 2])
def test_multistage_is_optimal_among_all_policies(sizes: Any, costs: Any, leaf: int) -> None:
    """Assert that an exhaustive search over what can be stored, dropped and restored finds nothing cheaper."""
    schedule = multistage(*sizes, *costs, leaf)
    assert multistage_cost(schedule) == schedule.cost
    assert schedule.cost == cheapest(*sizes, *costs, leaf)


@functools.cache
def two_levels(n: int, memory: int, disk: int, write: float, read: float, leaf: int, stored: bool = False) -> float:
    """Lowest cost of n steps whose first state is on disk (in one of its slots) or is not yet; any may go there."""
    best = optimum(n, memory, leaf)
    for m in range(1, n) if disk else ():
        right = two_levels(n - m, memory, disk - 1, write, read, leaf)
        left = two_levels(m, memory, disk, write, read, leaf, True)
        best = min(best, m + right + read + left + (0 if stored else write))
    return best


@pytest.mark.parametrize("leaf", [1, 2, 5])
@pytest.mark.parametrize("costs", [(0.1, 0.1), (0.3, 0.7), (2.1, 0.1), (0, 4)], ids=str)
def test_multistage_is_optimal(costs: tuple[float, float], leaf: int) -> None:
    """Assert the optimum for longer chains, also for costs that do not add up exactly."""
    for n in range(1, 34):
        for memory, disk in ((1, 1), (1, 4), (2, 3), (3, 40)):
            schedule = multistage(n, memory, disk, *costs, leaf)
            best = two_levels(n, memory, disk, *costs, leaf)
            assert schedule.cost == multistage_cost(schedule) == pytest.approx(best, rel=1e-13, abs=0)


def test_multistage_in_memory_is_binomial() -> None:
    """Assert that without a disk, or with one too slow, nothing goes to it and the actions are those of `binomial`."""
    for n, memory, leaf in ((1, 1, 1), (23, 1, 1), (100, 5, 1), (100, 5, 7), (7, 9, 2)):
        for disk, cost in ((0, 0), (5, 1e5)):
            assert list(multistage(n, memory, disk, cost, cost, leaf)) == list(binomial(n, memory, leaf))


@pytest.mark.parametrize(
    "schedule",
    [
        multistage(1000, 5, 50, 2, 2),
        multistage(1639, 3, 50, 0.5, 0.5),  # one step more than is planned exactly: a short block is left
        multistage(5003, 3, 50, 0.5, 0.5),
        multistage(5003, 2, 10**9, 1, 1),  # disk slots without end
        multistage(20_011, 4, 30, 2, 3, leaf=3),
    ],
    ids=str,
)
def test_long_multistage_replays(schedule: multistage) -> None:
    """Assert that plans made in blocks hold what they promise, and gain from the disk."""
    assert multistage_cost(schedule) == schedule.cost
    assert schedule.disk_writes > 0


def test_blocks_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that planning in 32 blocks of 8 steps, each planned within itself, costs at most a fifth more."""
    exact = multistage(250, 5, 50, 2, 2).cost
    for name in ("_plan", "_counts"):
        monkeypatch.setattr(_multistage, name, getattr(_multistage, name).__wrapped__)  # not from the cache
    monkeypatch.setattr(_multistage, "BLOCKS", 32)
    blocked = multistage_cost(multistage(250, 5, 50, 2, 2))
    assert exact < blocked <= 1.2 * exact


@pytest.mark.parametrize(
    ("schedule", "other", "text"),
    [
        (binomial(10, 3), binomial(10, 2), "binomial(n=10, snapshots=3, leaf=1)"),
        (online(3), online(3, 10), "online(snapshots=3, n=None, leaf=1)"),
        (store_all(10), store_all(), "store_all(n=10)"),
        (
            multistage(10, 3, 2, 0.5, 1),
            multistage(10, 3, 2, 1, 1),
            "multistage(n=10, memory=3, disk=2, write_cost=0.5, read_cost=1, leaf=1)",
        ),
    ],
)
def test_schedules_are_values(schedule: Schedule, other: Schedule, text: str) -> None:
    """Assert that schedules compare, print what makes them, and can be keys."""
    twin = eval(text)
    assert schedule == twin != other
    assert repr(schedule) == text
    assert {schedule: 1}[twin] == 1


def test_schedules_are_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a million steps are not gone through to begin, nor planned to make a value."""
    for schedule in (binomial(10**6, 64), online(64, 10**6), store_all(10**6)):
        assert next(iter(schedule)) == Store(0, 0)
    monkeypatch.setattr(_multistage, "_plan", None)
    assert repr(multistage(10**6, 64, 10, 1, 1))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: binomial(-1, 2), "n"),
        (lambda: binomial(True, 2), "n"),
        (lambda: binomial(10, 0), "snapshots"),
        (lambda: binomial(10, 2.5), "snapshots"),
        (lambda: binomial(10, 2, 0), "leaf"),
        (lambda: online(0), "snapshots"),
        (lambda: online(2, -1), "n"),
        (lambda: online(2, leaf=0), "leaf"),
        (lambda: store_all(1.5), "n"),
        (lambda: multistage(-1, 1, 1, 1, 1), "n"),
        (lambda: multistage(10, 0, 1, 1, 1), "memory"),
        (lambda: multistage(10, 1, -1, 1, 1), "disk"),
        (lambda: multistage(10, 1, 1, 1, 1, leaf=0), "leaf"),
        (lambda: multistage(10, 1, 1, -1, 1), "write_cost"),
        (lambda: multistage(10, 1, 1, "2", 1), "write_cost"),
        (lambda: multistage(10, 1, 1, 1, math.nan), "read_cost"),
        (lambda: multistage(10, 1, 1, 1, math.inf), "read_cost"),
    ],
)
def test_misuse(make: Any, name: str) -> None:
    """Assert one clear sentence for what is no schedule."""
    with pytest.raises(ValueError, match=rf"^`{name}` must be an? [a-z ]+ of at least \d, got .*\.$"):
        make()


def test_iterating_needs_a_number_of_steps() -> None:
    """Assert that schedules for any number of steps say what is missing."""
    for ask in (lambda: online(3).advances, lambda: list(online(3)), lambda: list(store_all())):
        with pytest.raises(ValueError, match="has no number of steps to iterate over; use"):
            ask()


DRAWN = [binomial(50, 5), binomial(100, 5, 5), online(5, 60), store_all(20), multistage(100, 5, 10, 2, 2)]


@pytest.mark.parametrize("schedule", [*DRAWN, binomial(1, 1), binomial(0, 1)], ids=str)
def test_draw(schedule: Any) -> None:
    """Assert that a drawing shows each step advanced over and reversed, each access, and the peaks of storage."""
    upper, lower = schedule.draw()
    assert (upper.get_title(), upper.get_ylabel()) == (repr(schedule), "step")
    assert (lower.get_xlabel(), lower.get_ylabel()) == ("action", "live snapshots")
    drawn = {line.get_label(): line.get_ydata() for line in upper.lines}
    replayed = replay(schedule)
    assert rise(drawn.get("advance", [])) == replayed.advances
    assert rise(drawn.get("record and reverse", [])) == -schedule.n
    stores = [len(drawn.get(label, [])) for label in ("store in memory", "store on disk")]
    restores = [len(drawn.get(label, [])) for label in ("restore from memory", "restore from disk")]
    assert (tuple(stores), tuple(restores)) == (replayed.writes, replayed.reads)
    peaks = [int(line.get_ydata().max()) for line in lower.lines]
    assert peaks == [peak for level, peak in enumerate(replayed.peak) if level == 0 or peak > 0]
    plt.close(upper.figure)


def rise(heights: Any) -> float:
    """Sum of the heights of lines that are separated by NaN."""
    return float(np.nansum(np.diff(heights)))


def test_draw_on_given_axes() -> None:
    """Assert that a schedule draws itself where it is told to."""
    figure, axes = plt.subplots(2)
    assert binomial(10, 3).draw(axes) == tuple(axes)
    plt.close(figure)


def test_actions_read_as_they_are_meant() -> None:
    """Assert the language: two steps with one snapshot are advanced over once, turned, restored and turned."""
    actions: list[Action] = [Store(0, 0), Advance(0, 1), Youturn(1, 2), Restore(0, 0), Youturn(0, 1)]
    assert list(binomial(2, 1)) == actions
