"""Storing everything: one forward run that keeps the residuals of all steps."""

import dataclasses
from collections.abc import Iterator

from ._actions import Action, Store, Youturn
from ._schedule import Schedule, checked


@dataclasses.dataclass(frozen=True)
class store_all(Schedule):  # noqa: N801 (a value made by its name, as the field writes it)
    """The schedule that keeps the residuals of all steps and evaluates each step once.

    Choose it when they fit in memory: nothing is faster.

    Parameters
    ----------
    n
        Number of steps; None for those of the loop it is given to.

    Examples
    --------
    >>> from tapeless.checkpointing import store_all
    >>> list(store_all(7))
    [Store(step=0, slot=0, level=0), Youturn(start=0, stop=7)]
    """

    n: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no schedule can do."""
        if self.n is not None:
            checked("n", self.n, 0)

    @property
    def advances(self) -> int:
        """No step is evaluated only to advance."""
        return 0

    def __iter__(self) -> Iterator[Action]:
        """Yield the actions of one forward run and its reversal."""
        if self.n is None:
            message = "`store_all()` has no number of steps to iterate over; use `store_all(n)`."
            raise ValueError(message)
        if self.n > 0:
            yield Store(0, 0)
            yield Youturn(0, self.n)
