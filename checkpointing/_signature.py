"""Whether two traced steps are the same: one that closes over what is differentiated is traced for each gradient."""

from typing import Any

import jax.extend.core as jex
import numpy as np


def signature(closed: jex.ClosedJaxpr) -> Any:
    """A value that is equal for jaxprs of the same equations; it must not outlive the jaxpr."""
    consts = tuple(map(id, closed.consts))
    return consts, _of_jaxpr(closed.jaxpr)


def _of_jaxpr(jaxpr: jex.Jaxpr) -> Any:
    numbers: dict[Any, int] = {}

    def atom(v: Any) -> Any:
        if isinstance(v, jex.Literal):
            value = np.asarray(v.val)
            return str(v.aval), value.dtype.str, value.tobytes()
        return numbers.setdefault(v, len(numbers))

    inputs = tuple((atom(v), str(v.aval)) for v in (*jaxpr.constvars, *jaxpr.invars))
    eqns = tuple(
        (
            eqn.primitive.name,
            tuple(map(atom, eqn.invars)),
            tuple((name, _of_value(value)) for name, value in sorted(eqn.params.items())),
            tuple((atom(v), str(v.aval)) for v in eqn.outvars),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, eqns, tuple(map(atom, jaxpr.outvars))


def _of_value(value: Any) -> Any:
    if isinstance(value, jex.ClosedJaxpr):
        return signature(value)
    if isinstance(value, jex.Jaxpr):
        return _of_jaxpr(value)
    if isinstance(value, tuple | list):
        return tuple(map(_of_value, value))
    if isinstance(value, bool | int | float | complex | str | bytes | type(None) | np.dtype):
        return type(value), value
    return id(value) if callable(value) or not _hashable(value) else value


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
