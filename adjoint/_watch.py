"""Watching solves: what forward, tangent and adjoint solves report while a program runs."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ._status import Status

_LOGS: list["SolveLog"] = []
_LOCK = threading.Lock()


class SolveRecord(NamedTuple):
    """One solve: `kind` is "forward", "tangent" or "adjoint"; counts that a method does not have are None."""

    kind: str
    method: str
    code: int
    iterations: int | None
    residual: float | None

    @property
    def status(self) -> str:
        """What became of the solve, as a sentence."""
        return Status[eqx.tree_at(lambda s: jax.tree.leaves(s)[0], Status.converged, jnp.asarray(self.code))]

    @property
    def converged(self) -> bool:
        """Whether the solve met its tolerance."""
        return self.code == int(jax.tree.leaves(Status.converged)[0])


class SolveLog(list[SolveRecord]):
    """Records in the order in which the solves ended; prints as a table."""

    def of(self, kind: str) -> list[SolveRecord]:
        """The records of one kind."""
        return [record for record in self if record.kind == kind]

    def __str__(self) -> str:
        rows = [("kind", "method", "iterations", "residual", "status")]
        for r in self:
            residual = "" if r.residual is None else f"{r.residual:.2e}"
            rows.append((r.kind, r.method, "" if r.iterations is None else str(r.iterations), residual, r.status))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in rows)


@contextlib.contextmanager
def watch_solves() -> Iterator[SolveLog]:
    """Collect iterations, residuals and statuses of all solves that end inside the `with` block.

    Choose it to see what the adjoint solves of a gradient cost and whether they converged: they run in the pullback,
    so no `Solution` can carry their report.

    Functions are compiled anew for it, jitted ones too, and cost a call of the host for each solve. Under `vmap` each
    lane is a record. Reports of solves on other threads are collected as well.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from tapeless import adjoint, solvers
    >>> A = jnp.diag(jnp.arange(1.0, 6.0))
    >>> with adjoint.watch_solves() as log:
    ...     _ = jax.grad(lambda b: jnp.sum(solvers.linear_solve(A, b, solvers.CG()).value))(jnp.ones(5))
    >>> [(record.kind, record.iterations, record.converged) for record in log]
    [('forward', 5, True), ('adjoint', 5, True)]
    """
    log = SolveLog()
    with _LOCK:
        _LOGS.append(log)
    try:
        # Metadata are part of what JAX compares to find a compiled function: none without reports is taken.
        with set_xla_metadata(tapeless_watch="solves"):
            yield log
    finally:
        jax.effects_barrier()
        with _LOCK:
            _LOGS[:] = [each for each in _LOGS if each is not log]


def watching() -> bool:
    """Whether anybody watches."""
    return bool(_LOGS)


def watch(kind: str, method: Any, status: Status, stats: dict[str, Any]) -> None:
    """Report a solve from inside the program that runs it, if anybody watches."""
    if not watching():
        return
    name = type(method).__name__
    unknown = jnp.asarray(jnp.nan)
    iterations, residual = (jnp.asarray(stats.get(key, unknown)) for key in ("iterations", "residual"))

    def record(code: Any, iterations: Any, residual: Any) -> None:
        counts = None if np.isnan(iterations) else int(iterations), None if np.isnan(residual) else float(residual)
        with _LOCK:
            for log in _LOGS:
                log.append(SolveRecord(kind, name, int(code), *counts))

    jax.debug.callback(record, jax.tree.leaves(status)[0], iterations, residual)
