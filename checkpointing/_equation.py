"""Running one of JAX's own loops by a rollout.

JAX's loop does the checks, the promotion of weak types and the hoisting of what a function closes over; its one equation
is then computed by a rollout. So errors and results are JAX's, and the function is traced once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

Run = Callable[[jex.JaxprEqn, Sequence[Any]], Sequence[Any]]


def replay_with(plain: Callable[..., Any], name: str, run: Run, *args: Any) -> Any:
    """`plain(*args)`, with `run(equation, inputs)` in place of its one equation called `name`."""
    closed, out, equation = traced_equation(plain, name, *args)
    flat = _evaluate(closed, equation, run, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), flat)


def traced_equation(plain: Callable[..., Any], name: str, *args: Any) -> tuple[jex.ClosedJaxpr, Any, jex.JaxprEqn]:
    """The jaxpr of `plain`, the structure of its result, and its one equation called `name`."""
    try:
        closed, out = jax.make_jaxpr(plain, return_shape=True)(*args)
    except (AssertionError, IndexError, TypeError, ValueError):
        plain(*args)  # for JAX's own error, which speaks of the caller's arguments
        raise
    (equation,) = (e for e in closed.jaxpr.eqns if e.primitive.name == name)
    return closed, out, equation


def _evaluate(closed: jex.ClosedJaxpr, equation: Any, run: Run, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with `run` in place of one of its equations."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn is equation:
            out = run(eqn, inputs)
        else:
            out = eqn.primitive.bind(*inputs, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]
