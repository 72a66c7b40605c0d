"""The binomial schedule, replayed against a model of storage and against exact tables."""

import pytest
from helpers import REVOLVE_TABLE as TABLE
from tapeless.checkpointing import Advance, Restore, Store, binomial


def replay(schedule: binomial) -> tuple[int, int]:
    """Run the actions on a model of memory; return advances and the peak number of snapshots."""
    slots: dict[int, int] = {}
    position, advances, peak, next_reversed = 0, 0, 0, schedule.n - 1
    for action in schedule:
        if isinstance(action, Store):
            assert action.step == position, "only the working state can be stored"
            slots = {slot: step for slot, step in slots.items() if slot < action.slot}
            slots[action.slot] = position
            peak = max(peak, len(slots))
        elif isinstance(action, Restore):
            assert slots[action.slot] == action.step, "a slot holds what it is said to hold"
            position = action.step
        elif isinstance(action, Advance):
            assert (action.start, action.stop > action.start) == (position, True)
            advances += action.stop - action.start
            position = action.stop
        else:
            assert action.step == position == next_reversed, "every step is reversed once, last one first"
            next_reversed -= 1
        assert len(slots) <= schedule.snapshots
    assert next_reversed == -1
    return advances, peak


@pytest.mark.parametrize("row", [r for r in TABLE if r["n"] <= 1000], ids=lambda r: f"{r['n']}-{r['s']}")
def test_replay_meets_the_table(row: dict[str, int]) -> None:
    """Assert that the replayed actions take exactly the optimal number of advances, within the slots."""
    schedule = binomial(row["n"], row["s"])
    advances, peak = replay(schedule)
    assert advances == schedule.advances == row["A_untaped_advances"]
    assert peak <= row["s"]


def test_counts_of_long_chains() -> None:
    """Assert the closed form for every row of the table, a million steps included, without iterating."""
    for row in TABLE:
        schedule = binomial(row["n"], row["s"])
        assert schedule.advances == row["A_untaped_advances"]
        if row["s"] <= row["n"]:
            assert schedule.repetitions == row["r"]


def test_schedules_are_values() -> None:
    """Assert that schedules compare, print, and refuse what is no schedule."""
    assert binomial(10, 3) == binomial(10, 3) != binomial(10, 2)
    assert repr(binomial(10, 3)) == "binomial(n=10, snapshots=3)"
    assert list(binomial(0, 3)) == []
    for n, s, name in ((-1, 2, "n"), (10, 0, "snapshots"), (10, 2.5, "snapshots"), (True, 2, "n")):
        with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least"):
            binomial(n, s)  # pyright: ignore[reportArgumentType]
