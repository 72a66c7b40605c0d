"""What several tests need."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from tapeless import sim

# Exact counts of optimal schedules, for pairs of steps and snapshots; made independently of this package.
REVOLVE_TABLE = [
    {key: int(row[key]) for key in ("n", "s", "r", "A_untaped_advances", "B_no_turn")}
    for row in csv.DictReader((Path(__file__).parent / "checkpointing" / "revolve_table.csv").read_text().splitlines())
]


def max_error(a: Any, b: Any) -> float:
    """Largest difference of two pytrees, relative to the largest entry of the second (at least 1)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert all(np.shape(x) == np.shape(y) for x, y in pairs)
    scale = max([1.0] + [float(np.max(np.abs(y), initial=0.0)) for _, y in pairs])
    return max([0.0] + [float(np.max(np.abs(np.asarray(x) - np.asarray(y)), initial=0.0)) for x, y in pairs]) / scale


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs inside it."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, jex.ClosedJaxpr | jex.Jaxpr):
                    yield from equations(inner)


class Counter:
    """Counts calls of `tick` in compiled programs (`.runs`) and while tracing (`.traces`)."""

    def __init__(self) -> None:
        self.runs = self.traces = 0

    def tick(self) -> None:
        """Call it inside a function that is traced."""
        self.traces += 1
        jax.debug.callback(self._run)

    def _run(self) -> None:
        self.runs += 1

    def settle(self) -> int:
        """Wait for all callbacks; return and reset the number of runs."""
        jax.effects_barrier()
        runs, self.runs = self.runs, 0
        return runs


def decay(t: Any, y: Any, k: Any) -> Any:
    """y' = -k y."""
    return -k * y


def run(rate: Any, y0: Any, params: Any = None, *, t0: Any = 0.0, t1: Any = 1.0, dt: Any = 0.1, **options: Any) -> Any:
    """`sim.simulate` over [0, 1] in ten steps of RK4, unless told otherwise."""
    return sim.simulate(rate, y0, params, t0=t0, t1=t1, dt=dt, **({"method": sim.RK4()} | options))
