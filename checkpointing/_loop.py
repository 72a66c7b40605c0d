"""What a loop of steps is: its step, its length, its schedule; and the arrays it is given."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..adjoint._trace import differentiable, replaced
from ._active import Active
from ._lanes import while_running
from ._progress import Bar
from ._splits import Splits, make_splits
from ._sweep import Arrays, load

StepFn = Callable[..., tuple[Arrays, Arrays]]
PullbackFn = Callable[..., tuple[Arrays, Arrays, Arrays]]


class Inputs(NamedTuple):
    """All arrays that a rollout is given. Constants, carry and data carry derivatives."""

    consts: Arrays
    init: Arrays
    xs: Arrays
    rows: Any = None  # the output row of each step, `num_rows` for none; None for a row each
    count: Any = None  # (number of steps, that of each lane) where the program does not know it
    aux: Any = ()  # constants of the condition
    offset: Any = None  # what to add to a step's number where the loop is part of a longer one


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """What does not change between calls: the step, the loop and its schedule. All arrays are arguments.

    `step(consts, carry, x) -> (carry, ys)` works on flat lists and closes over no arrays. `num_rows` is the number
    of rows of the outputs: n, or fewer where `rows` selects the steps whose outputs are kept.
    `pullback(consts, carry, x, carry_next, carry_bar, ys_bar) -> bars of (consts, carry, x)` replaces the
    derivative of `step` in first-order reverse mode, with bars for all floating-point entries in full-length lists
    (None elsewhere): a step whose adjoint follows from its two end states is then not evaluated again.
    `length` is None where it shows only when the loop ends: while `cond(aux, carry)` holds.
    `leaf` is the number of steps that are reversed at once from their residuals; one for a step with a pullback.
    """

    step: StepFn
    length: int | None
    snapshots: int
    leaf: int = 1
    reverse: bool = False
    num_rows: int = 0
    pullback: PullbackFn | None = None
    cond: Callable[[Arrays, Arrays], Any] | None = None
    unroll: int = 1
    progress: tuple[Bar, Bar] | None = None  # of the forward and of the reverse sweep

    @property
    def splits(self) -> Splits:
        """Where snapshots go. A step with its own pullback is reversed alone, whatever the schedule's leaf."""
        return make_splits(self.length, self.snapshots, self.leaf if self.pullback is None else 1)

    def num_steps(self, inputs: Inputs) -> Any:
        """The number of steps, if known before the run."""
        return self.length if inputs.count is None else inputs.count[0]

    def index(self, inputs: Inputs, i: Any) -> Any:
        """Where the data of step i are."""
        k = i if inputs.offset is None else i + inputs.offset
        return self.length - 1 - k if self.reverse and self.length is not None else k

    def data(self, inputs: Inputs, i: Any) -> Arrays:
        """The per-step data of step i."""
        return load(inputs.xs, self.index(inputs, i))

    def row(self, inputs: Inputs, i: Any) -> Any:
        """The output row of step i."""
        return self.index(inputs, i) if inputs.rows is None else inputs.rows[i]

    def live_step(self, count: Any, i: Any, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Step i, which leaves lanes that have ended as they are; `count` as in the inputs."""
        new, ys = self.step(consts, carry, x)
        return new if count is None else while_running(i, count[1], new, carry), ys


def of_active(
    step: Callable[..., tuple[Arrays, Arrays]], active: Active, inputs: Sequence[Arrays]
) -> tuple[Callable[..., Any], list[Arrays]]:
    """One step as a function of its active inputs, with their values.

    It returns the carry and outputs that carry derivatives, and, as auxiliary output, all of them.
    """

    def function(*values: Arrays) -> tuple[Any, Any]:
        new, ys = step(*(replaced(x, i, v) for x, i, v in zip(inputs, active.positions, values, strict=True)))
        return ([new[i] for i in active.carry], [y for y in ys if differentiable(y)]), (new, ys)

    return function, [[x[i] for i in where] for x, where in zip(inputs, active.positions, strict=True)]
