"""Snapshots on disk, as a value."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .schedules import multistage
from .schedules._schedule import checked

_SHARE = 0.9  # of the free space, at most


@dataclasses.dataclass(frozen=True)
class Disk:
    """Snapshots in memory and on disk, for a gradient whose states do not fit in memory.

    Choose it for long runs of large states, where `snapshots` states in memory would cost many evaluations. The
    schedule is the optimal one for the measured cost of a step and of an access (`multistage`); a disk that is too slow
    to help is not used. The sweep is driven from the host: it cannot be part of a larger `jit` or `vmap`, and has no
    second derivatives.

    Parameters
    ----------
    path
        A folder. Each run makes a folder of its own in it, and removes it when the gradient has been computed; what a
        killed run left there is removed by the next. Several runs may share it.
    snapshots
        Number of states held in memory.
    disk
        Most states on disk at once; None for as many as nine tenths of the free space hold.
    leaf
        Number of consecutive steps that are reversed at once from their residuals.
    write_cost, read_cost
        Cost of writing and reading a state in evaluations of a step; None to measure them.

    Raises
    ------
    ValueError
        On use under `jit`, `vmap` or a second derivative.
    SnapshotError
        The disk is full, or a snapshot is not what was written.

    Source: Herrmann and Pallez, "H-Revolve", ACM TOMS 46 (2020), doi:10.1145/3378672.

    Examples
    --------
    >>> import tempfile, jax, jax.numpy as jnp
    >>> from tapeless import checkpointing
    >>> level = checkpointing.Disk(tempfile.mkdtemp(), snapshots=3)
    >>> step = lambda u, _: (u - 0.01 * u**2, None)
    >>> f = lambda u: checkpointing.scan(step, u, length=100, checkpoint=level)[0]
    >>> round(float(jax.grad(f)(1.0)), 4)
    0.247
    """

    path: str | os.PathLike[str]
    snapshots: int
    disk: int | None = None
    leaf: int = 1
    write_cost: float | None = None
    read_cost: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        object.__setattr__(self, "path", os.fspath(self.path))
        checked("snapshots", self.snapshots, 1)
        checked("leaf", self.leaf, 1)
        if self.disk is not None:
            checked("disk", self.disk, 0)

    def costing(self, measure: Callable[[], tuple[float, float]]) -> "Disk":
        """The same with all costs known; `measure()` gives those of writing and of reading."""
        if self.write_cost is not None and self.read_cost is not None:
            return self
        write, read = measure()
        write = write if self.write_cost is None else self.write_cost
        read = read if self.read_cost is None else self.read_cost
        return dataclasses.replace(self, write_cost=write, read_cost=read)

    def schedule(self, n: int, state_bytes: int) -> multistage:
        """The optimal schedule for n steps; costs that are not known count as one evaluation."""
        write, read = (1.0 if cost is None else cost for cost in (self.write_cost, self.read_cost))
        most = self.disk
        if most is None:
            most = int(_SHARE * shutil.disk_usage(_existing(Path(self.path))).free) // max(state_bytes, 1)
        return multistage(n, self.snapshots, min(most, max(n // self.leaf, 1)), write, read, self.leaf)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
