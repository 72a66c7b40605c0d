"""`checkpointing.while_loop`: `jax.lax.while_loop` with a derivative in reverse mode, in bounded memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from ..adjoint._shift import with_shifts
from ..adjoint._trace import define_by_run, own
from ._equation import replay_with
from ._memory import bytes_of
from ._progress import bars
from ._resolve import Checkpoint, resolve_unknown
from ._rollout import Rollout


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    checkpoint: Checkpoint = None,
    progress: bool = False,
) -> Any:
    """`jax.lax.while_loop` with the same results, and a gradient that holds at most `checkpoint` states.

    Choose it for loops whose number of steps shows only when they end (adaptive steps, convergence), where JAX has no
    reverse mode at all.

    The loop is  u ← body(u)  while cond(u). Snapshots are placed while it runs; then its steps are reversed by binomial
    checkpointing from them. Derivatives hold the number of steps fixed, as those of any program that branches.

    Parameters
    ----------
    cond_fun, body_fun, init_val
        As for `jax.lax.while_loop`. Arrays that `body_fun` closes over get their gradients.
    checkpoint
        The number of states held at once, the initial one included; or a schedule `online(snapshots, leaf=...)`. With
        nothing said it is as many as fit 1 MB, at least 64 and at most 1,024.

    Returns
    -------
    The final state.

    Raises
    ------
    TypeError, ValueError
        As `jax.lax.while_loop` does; `ValueError` for a number of snapshots below one, or a schedule that needs the
        number of steps.

    Notes
    -----
    Under `vmap` one schedule serves all lanes: the loop runs until the last lane has ended, and the states of the
    others stand still.

    Source: Wang, Moin and Iaccarino, SIAM J. Sci. Comput. 31 (2009), doi:10.1137/080727890.

    Examples
    --------
    >>> import jax
    >>> from tapeless import checkpointing
    >>> def root(x):  # Heron's iteration
    ...     return checkpointing.while_loop(lambda u: abs(u * u - x) > 1e-6, lambda u: (u + x / u) / 2, x)
    >>> round(float(jax.grad(root)(2.0)), 4)
    0.3536
    """
    init_val = jax.tree.map(own, init_val)
    if define_by_run():
        return lax.while_loop(cond_fun, body_fun, init_val)

    def plain(init_val: Any) -> Any:
        return lax.while_loop(cond_fun, body_fun, init_val)

    def run(equation: jex.JaxprEqn, args: Sequence[Any]) -> list[Any]:
        return _run(equation.params, args, checkpoint, progress)

    return replay_with(plain, "while", run, init_val)


def _run(params: dict[str, Any], args: Sequence[Any], checkpoint: Checkpoint, progress: bool) -> list[Any]:
    """What a `while` equation computes, by a rollout."""
    a = params["cond_nconsts"]
    b = a + params["body_nconsts"]
    cond, body = params["cond_jaxpr"], with_shifts(params["body_jaxpr"])

    def step(consts: Sequence[Any], carry: Sequence[Any], _: Sequence[Any]) -> Any:
        return list(jex.jaxpr_as_fun(body)(*consts, *carry)), []

    def condition(aux: Sequence[Any], carry: Sequence[Any]) -> Any:
        return jex.jaxpr_as_fun(cond)(*aux, *carry)[0]

    schedule = resolve_unknown(checkpoint, bytes_of(list(args[b:])))
    bar = bars(None) if progress else None
    rollout = Rollout(step, None, schedule.snapshots, leaf=schedule.leaf, cond=condition, progress=bar)
    aux = [lax.stop_gradient(x) for x in args[:a]]
    return rollout(list(args[a:b]), list(args[b:]), [], aux=aux)[0]
