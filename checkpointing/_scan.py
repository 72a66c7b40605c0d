"""`checkpointing.scan`: `jax.lax.scan` whose reverse mode needs bounded memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from ..adjoint._shift import with_shifts
from ..adjoint._trace import define_by_run, own
from ._disk import Disk, run_on_disk
from ._equation import replay_with
from ._memory import bytes_of, residual_bytes
from ._plan import plan_equation
from ._resolve import Checkpoint, resolve_known
from ._rollout import Rollout
from .schedules import store_all


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    checkpoint: Checkpoint = None,
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

    return replay_with(plain, "scan", lambda equation, args: _run(equation, args, checkpoint), init, xs)


def _run(equation: jex.JaxprEqn, args: Sequence[Any], checkpoint: Checkpoint) -> Sequence[Any]:
    """What a `scan` equation computes, by a rollout; as JAX does if everything is to be stored."""
    params = equation.params
    n, body = params["length"], with_shifts(params["jaxpr"])
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    init = list(args[num_consts : num_consts + num_carry])
    data = list(args[num_consts + num_carry :])

    def step(consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Any:
        out = jex.jaxpr_as_fun(body)(*consts, *carry, *x)
        return out[:num_carry], out[num_carry:]

    def sizes() -> tuple[int, int]:
        return bytes_of(init), residual_bytes(body, num_consts, num_carry)

    if isinstance(checkpoint, Disk) and n > 0:
        rollout = Rollout(step, n, checkpoint.snapshots, leaf=checkpoint.leaf, reverse=params["reverse"])
        carry, ys = run_on_disk(rollout, body, checkpoint, list(args[:num_consts]), init, data)
        return [*carry, *ys]
    schedule = resolve_known(n, checkpoint, sizes, lambda budget: plan_equation(equation, body, budget).schedule)
    if isinstance(schedule, store_all) or n == 0:
        return equation.primitive.bind(*args, **params)

    rollout = Rollout(step, n, schedule.snapshots, leaf=schedule.leaf, reverse=params["reverse"])
    carry, ys = rollout(list(args[:num_consts]), init, data)
    return [*carry, *ys]
