"""`checkpointing.scan`: `jax.lax.scan` whose reverse mode needs bounded memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..adjoint._shift import with_shifts
from ..adjoint._trace import define_by_run, own
from ._budget import Budget
from ._disk import Disk
from ._equation import replay_with, scan_rollout, split_arguments
from ._host_sweep import run_on_disk
from ._memory import bytes_of, residual_bytes, still_inputs
from ._plan import plan_step
from ._progress import Bar, bars, moving
from ._resolve import Checkpoint, resolve_known
from ._rollout import Rollout
from ._signature import signature
from .schedules import binomial, store_all


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    checkpoint: Checkpoint = None,
    progress: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` with the same results, whose gradient holds at most `checkpoint` states.

    Choose it in place of `jax.lax.scan` when the gradient of a long loop runs out of memory: change one import.

    The loop is  (u_{k+1}, y_k) = f(u_k, x_k),  k = 0, ..., n - 1.  Its gradient replays steps from snapshots that
    are placed by the binomial schedule: with s snapshots n + t(n, s) + 1 evaluations of f in all, the run that
    returns the result included. The gradient does not depend on the schedule.

    Parameters
    ----------
    f, init, xs, length, reverse, unroll
        As for `jax.lax.scan`. Arrays that `f` closes over get their gradients. `unroll` applies to loops that store
        everything; replays do not unroll.
    checkpoint
        The number of states held at once, the initial one included; or a schedule `binomial(n, snapshots)`. With
        nothing said, everything is stored while the residuals of all steps fit 256 MB; else the number of
        snapshots is near √(2n), with which no step is evaluated more than three times.

    Returns
    -------
    carry, ys
        The final state and the outputs of all steps, stacked along a leading axis.

    Raises
    ------
    TypeError, ValueError
        As `jax.lax.scan` does; `ValueError` for a number of snapshots below one, or a schedule of another length.

    Notes
    -----
    Two more states than `checkpoint` exist during the reverse sweep: the working one and its cotangent.

    Source: Griewank and Walther, ACM TOMS 26 (2000), doi:10.1145/347837.347846.

    Examples
    --------
    >>> import jax
    >>> from tapeless import checkpointing
    >>> def decay(rate):
    ...     def step(u, _):
    ...         return u - 0.001 * rate * u, None
    ...     return checkpointing.scan(step, 1.0, length=1000, checkpoint=10)[0]
    >>> round(float(jax.grad(decay)(0.5)), 3)
    -0.607
    """
    init, xs = jax.tree.map(own, (init, xs))
    if define_by_run():
        return lax.scan(f, init, xs, length, reverse, unroll)

    def plain(init: Any, xs: Any) -> Any:
        return lax.scan(f, init, xs, length, reverse, unroll)

    return replay_with(plain, "scan", lambda equation, args: _run(equation, args, checkpoint, progress), init, xs)


def _run(equation: jex.JaxprEqn, args: Sequence[Any], checkpoint: Checkpoint, progress: bool) -> Sequence[Any]:
    """What a `scan` equation computes, by a rollout; as JAX does if everything is to be stored."""
    params: dict[str, Any] = equation.params | {"jaxpr": with_shifts(equation.params["jaxpr"])}
    n, body, groups = params["length"], params["jaxpr"], (params["num_consts"], params["num_carry"])
    consts, init, data = split_arguments(params, args)

    bar = bars(n) if progress else None

    def run(snapshots: int, leaf: int) -> Rollout:
        return scan_rollout(params, body, snapshots, leaf, unroll=params["unroll"], progress=bar)

    def sizes() -> tuple[int, int]:
        return bytes_of(init), residual_bytes(body, *groups)

    def planned(budget: Budget) -> binomial | store_all:
        return plan_step(n, body, *groups, budget, still_inputs(args, *groups)).schedule

    level = checkpoint if isinstance(checkpoint, Disk) else None
    schedule = resolve_known(n, None if level else checkpoint, sizes, planned)
    if isinstance(checkpoint, Budget) and checkpoint.disk is not None and isinstance(schedule, binomial):
        level = Disk(checkpoint.disk, schedule.snapshots, leaf=schedule.leaf)
    if level is not None and n > 0:
        carry, ys = run_on_disk(run(level.snapshots, level.leaf), signature(body), level, consts, init, data)
    elif isinstance(schedule, store_all) or n == 0:
        return equation.primitive.bind(*args, **params) if bar is None else _with_bar(params, args, bar[0])
    else:
        carry, ys = run(schedule.snapshots, schedule.leaf)(consts, init, data)
    return [*carry, *ys]


def _with_bar(params: dict[str, Any], args: Sequence[Any], bar: Bar) -> Sequence[Any]:
    """JAX's scan, with a bar that its forward run moves."""
    n, num_carry = params["length"], params["num_carry"]
    consts, init, data = split_arguments(params, args)

    def step(state: Any, x: Any) -> Any:
        i, carry = state
        moving(bar, i, i + 1, n)
        out = jex.jaxpr_as_fun(params["jaxpr"])(*consts, *carry, *x)
        return (i + 1, out[:num_carry]), out[num_carry:]

    options = {"length": n, "reverse": params["reverse"], "unroll": params["unroll"]}
    (_, carry), ys = lax.scan(step, (jnp.int32(0), init), data, **options)
    return [*carry, *ys]
