"""What all schedules are: lazy iterables of actions that can be counted and drawn."""

import abc
from collections.abc import Iterator
from typing import Any

from ._actions import Action
from ._draw import draw


class Schedule(abc.ABC):
    """A plan for running n steps and reversing them: a lazy iterable of actions.

    Subclasses are frozen dataclasses, so they compare equal and print themselves. Iterating moves no data.
    """

    @property
    @abc.abstractmethod
    def advances(self) -> int:
        """Evaluations that only advance the state; the recorded ones of the turns are not among them."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Action]:
        """Yield the actions of one forward run and its reversal."""

    def draw(self, axes: Any = None) -> Any:
        """Draw the steps against the actions, and below it the live snapshots; return the two Matplotlib axes.

        `axes` is a pair of axes to draw on; without it a new figure is made.
        """
        return draw(self, axes)


def checked(name: str, value: Any, least: int) -> None:
    """Refuse what is no integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        message = f"`{name}` must be an integer of at least {least}, got {value!r}."
        raise ValueError(message)
