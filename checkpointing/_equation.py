"""Running one of JAX's own loops by a rollout.

JAX's loop does the checks, the promotion of weak types and the hoisting of what a function closes over; its one
equation is then computed by a rollout. So errors and results are JAX's, and the function is traced once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ._rollout import Rollout

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
    values = _inputs(closed, args)
    before, after = _around(closed, equation)
    _extend(values, before)
    values.update(zip(equation.outvars, run(equation, _read(values, equation.invars)), strict=True))
    _extend(values, after)
    return _read(values, closed.jaxpr.outvars)


def equation_inputs(closed: jex.ClosedJaxpr, equation: Any, args: Sequence[Any]) -> list[Any]:
    """What one of a jaxpr's equations is given."""
    values = _inputs(closed, args)
    _extend(values, _around(closed, equation)[0])
    return _read(values, equation.invars)


def _inputs(closed: jex.ClosedJaxpr, args: Sequence[Any]) -> dict[Any, Any]:
    jaxpr = closed.jaxpr
    return dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))


def _around(closed: jex.ClosedJaxpr, equation: Any) -> tuple[list[Any], list[Any]]:
    eqns = list(closed.jaxpr.eqns)
    at = next(i for i, eqn in enumerate(eqns) if eqn is equation)
    return eqns[:at], eqns[at + 1 :]


def _read(values: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [atom.val if isinstance(atom, jex.Literal) else values[atom] for atom in atoms]


def _extend(values: dict[Any, Any], eqns: Sequence[Any]) -> None:
    for eqn in eqns:
        out = eqn.primitive.bind(*_read(values, eqn.invars), **eqn.params)
        values.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))


def split_arguments(params: dict[str, Any], args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Constants, carry and data of a scan equation with these parameters."""
    a, b = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(args[:a]), list(args[a:b]), list(args[b:])


def scan_rollout(params: dict[str, Any], body: jex.ClosedJaxpr, snapshots: int, leaf: int, **options: Any) -> Rollout:
    """The rollout that computes a scan equation with these parameters, whose step is `body`."""
    num_carry = params["num_carry"]

    def step(consts: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Any:
        out = jex.jaxpr_as_fun(body)(*consts, *carry, *x)
        return out[:num_carry], out[num_carry:]

    return Rollout(step, params["length"], snapshots, leaf=leaf, reverse=params["reverse"], **options)
