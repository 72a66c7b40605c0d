"""The planner: what the gradient of a loop will cost, before it is run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from ..adjoint._shift import with_shifts
from ._budget import BOOKKEEPING, Budget, Cost, best_schedule, evaluations, readable
from ._disk import Disk
from ._equation import equation_inputs, scan_rollout, split_arguments, traced_equation
from ._host_sweep import refuse_traced, with_costs
from ._memory import StepBytes, step_bytes
from ._signature import signature
from .schedules import binomial, store_all


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for a loop and what it will cost. Print it; give `plan.checkpoint` to the loop.

    All bytes are those of one gradient beyond its arguments and results, for all lanes.
    """

    n: int
    budget: Budget
    step: StepBytes
    schedule: binomial | store_all
    disk: Disk | None = None

    @property
    def checkpoint(self) -> binomial | store_all | Disk:
        """What to give to `checkpointing.scan` as `checkpoint`."""
        return self.schedule if self.disk is None else self.disk

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes at the peak of the reverse sweep."""
        return Cost(self.step, self.budget.lanes).peak(self.n, self.schedule)

    @property
    def evaluations(self) -> int:
        """Evaluations of the step for a value and gradient."""
        return evaluations(self.n, self.schedule if self.disk is None else self.disk.schedule(self.n, self.step.state))

    @property
    def ratio(self) -> float:
        """Evaluations of the step in units of one forward run."""
        return self.evaluations / max(self.n, 1)

    def __str__(self) -> str:
        """A table of bytes and evaluations."""
        lanes = f", {self.budget.lanes} lanes" if self.budget.lanes > 1 else ""
        rows = [("budget", readable(self.budget.bytes)), ("predicted peak", readable(self.peak_bytes))]
        rows += [(f"  {name}", readable(size)) for name, size in self.parts().items() if size]
        rows += [("evaluations of the step", f"{self.evaluations:,}"), ("  per forward run", f"{self.ratio:.3f}")]
        width = max(len(name) for name, _ in rows)
        lines = [f"{self.checkpoint} for {self.n:,} steps of {readable(self.step.state)}{lanes}"]
        return "\n".join(lines + [f"  {name:<{width}}  {value}" for name, value in rows])

    def parts(self) -> dict[str, int]:
        """What the peak is made of."""
        cost, lanes = Cost(self.step, self.budget.lanes), self.budget.lanes
        slots = 0 if isinstance(self.schedule, store_all) else self.schedule.slots + 1
        snapshots = lanes * slots * (self.step.state + BOOKKEEPING)
        fixed = lanes * cost.fixed(self.n)
        return {
            "snapshots": snapshots,
            "residuals": self.peak_bytes - snapshots - fixed,
            "pullback of a step": fixed - lanes * 2 * self.n * self.step.outputs,
            "outputs and their cotangents": lanes * 2 * self.n * self.step.outputs,
        }

    def draw(self, axes: Any = None) -> Any:
        """Draw evaluations against bytes for all budgets, with this plan marked; return the Matplotlib axes."""
        import matplotlib.pyplot as plt

        axes = plt.subplots(figsize=(6, 4), layout="constrained")[1] if axes is None else axes
        curve = trade_off(self.n, self.step, self.budget.lanes)
        ratios = [e / max(self.n, 1) for _, e in curve]
        axes.plot([b / 1e6 for b, _ in curve], ratios, drawstyle="steps-post", label="best plan")
        axes.plot(self.peak_bytes / 1e6, self.ratio, "o", color="tab:red", label="this plan")
        axes.axvline(self.budget.bytes / 1e6, color="tab:gray", linestyle="--", label="budget")
        axes.set(xscale="log", yscale="log", xlabel="peak memory of the gradient (MB)")
        axes.set_ylim(0.9, 1.2 * max(self.ratio, min(max(ratios), 20.0)))
        axes.set_ylabel("evaluations of the step per forward run")
        axes.set_title(f"{self.schedule}", fontsize="medium")
        axes.legend()
        return axes


def plan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    budget: Budget | str | int = "256 MB",
    *,
    closed_over: bool = True,
) -> Plan:
    """Plan the gradient of `checkpointing.scan(f, init, xs, length)` within a budget of bytes.

    Choose it to see beforehand what a gradient will take. Nothing is run: the bytes of a state and of a step's
    residuals are found by abstract evaluation, the scratch of one pullback by compiling it.

    Parameters
    ----------
    f, init, xs, length
        As for `checkpointing.scan`; abstract values (`jax.ShapeDtypeStruct`) serve as well.
    budget
        A `Budget`, or its size: "200 MB", or a number of bytes.
    closed_over
        Whether to plan for gradients with respect to the arrays that `f` closes over, as for `xs`. Say `False` where
        they are grids, masks or wavenumbers; `checkpoint=Budget(...)` sees by itself what is being differentiated.

    Returns
    -------
    Plan
        With `.checkpoint`, `.schedule`, `.peak_bytes`, `.evaluations`, `.ratio`; it prints and draws itself.

    Raises
    ------
    ValueError
        No schedule keeps within the budget; the text says the smallest possible one.

    Notes
    -----
    The plan is the cheapest of storing everything, and binomial checkpointing with leaf segments of any length.
    What is counted is temporary memory: not the arguments (parameters, `xs`) nor their gradients. Python
    numbers that `f` closes over are part of the step, and no gradients are planned for them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import checkpointing
    >>> step = lambda u, _: (u + 0.01 * jnp.sin(u), None)
    >>> p = checkpointing.plan(step, jnp.ones(1000, jnp.float32), None, 100_000, budget="1 MB")
    >>> p.peak_bytes <= 10**6 and p.ratio < 4
    True
    """
    budget = budget if isinstance(budget, Budget) else Budget(budget)
    closed, _, equation = traced_equation(lambda i, x: lax.scan(f, i, x, length), "scan", init, xs)
    params = equation.params
    body = with_shifts(params["jaxpr"])
    num_consts = params["num_consts"]
    still = () if closed_over else range(num_consts)
    found = plan_step(params["length"], body, num_consts, params["num_carry"], budget, still)
    if budget.disk is None or isinstance(found.schedule, store_all):
        return found
    args = equation_inputs(closed, equation, jax.tree.leaves((init, xs)))
    refuse_traced(args)
    consts, state, data = split_arguments(params, args)
    level = Disk(budget.disk, found.schedule.snapshots, leaf=found.schedule.leaf)
    rollout = scan_rollout(params, body, level.snapshots, level.leaf)
    level = with_costs(rollout, signature(body), level, consts, state, data)
    return dataclasses.replace(found, disk=level)


def plan_step(
    n: int, body: jex.ClosedJaxpr, num_consts: int, num_carry: int, budget: Budget, still: Sequence[int] = ()
) -> Plan:
    """The plan for n steps with this body, whose arguments are constants, carry and data; for `still`, `step_bytes`."""
    step = step_bytes(body, num_consts, num_carry, still)
    return Plan(n, budget, step, best_schedule(n, budget, step))


def trade_off(n: int, step: StepBytes, lanes: int) -> list[tuple[int, int]]:
    """(bytes, evaluations) of the best schedules, from the least memory to storing everything."""
    cost = Cost(step, lanes)
    low, high = cost.peak(n, binomial(n, 1)), cost.peak(n, store_all(n))
    sizes = [int(low * (max(high, low + 1) / low) ** (i / 60)) for i in range(60)] + [max(high, low)]
    plans = [best_schedule(n, Budget(max(size, low), lanes), step) for size in sizes]
    return [(cost.peak(n, s), evaluations(n, s)) for s in plans]
