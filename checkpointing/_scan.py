"""`checkpointing.scan`: `jax.lax.scan` whose reverse mode needs bounded memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from ..adjoint._trace import define_by_run, own
from .schedules import binomial
from ._residual_bytes import residual_bytes
from ._rollout import Rollout
from ._snapshots import resolve_snapshots


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    checkpoint: int | binomial | None = None,
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

    # JAX's own scan does the checks, the promotion of weak types and the hoisting of what f closes over; its one
    # equation is then run by a rollout. So errors and results are JAX's, and f is traced once.
    try:
        closed, out = jax.make_jaxpr(plain, return_shape=True)(init, xs)
    except (AssertionError, IndexError, TypeError, ValueError):
        plain(init, xs)  # for JAX's own error, which speaks of the caller's arguments
        raise
    (equation,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    params = equation.params
    run = _rollout_of(params, checkpoint)
    if run is None:
        run = _store_all(equation)
    flat = _evaluate_around(closed, equation, run, jax.tree.leaves((init, xs)))
    return jax.tree.unflatten(jax.tree.structure(out), flat)


def _rollout_of(params: dict[str, Any], checkpoint: int | binomial | None) -> Any:
    """The rollout that replaces a scan equation, as a function of the equation's inputs; None to store all."""
    n, body = params["length"], params["jaxpr"]
    snapshots = resolve_snapshots(n, checkpoint, lambda: residual_bytes(body))
    if snapshots is None:
        return None
    num_consts, num_carry = params["num_consts"], params["num_carry"]

    def step(consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Any:
        out = jex.jaxpr_as_fun(body)(*consts, *carry, *x)
        return out[:num_carry], out[num_carry:]

    rollout = Rollout(step, n, snapshots, reverse=params["reverse"])

    def run(*args: Any) -> list[Any]:
        consts, init = list(args[:num_consts]), list(args[num_consts : num_consts + num_carry])
        carry, ys = rollout(consts, init, list(args[num_consts + num_carry :]))
        return [*carry, *ys]

    return run


def _store_all(equation: Any) -> Any:
    return lambda *args: equation.primitive.bind(*args, **equation.params)


def _evaluate_around(closed: jex.ClosedJaxpr, equation: Any, run: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with `run` in place of one of its equations."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn is equation:
            out = run(*inputs)
        else:
            out = eqn.primitive.bind(*inputs, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]
