"""Equations of a traced function whose inputs are known, evaluated while tracing: indices become numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import Tracer, eval_jaxpr


def evaluate_folded(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, opening calls of `jit`; whatever follows from known values alone stays known."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        if not any(isinstance(x, Tracer) for x in inputs):
            with jax.ensure_compile_time_eval():
                outputs = _alone(jaxpr, eqn, values)
        elif eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            outputs = evaluate_folded(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = _alone(jaxpr, eqn, values)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _alone(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: dict[Any, Any]) -> list[Any]:
    read = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, jex.Var)))
    single = jaxpr.replace(constvars=read, invars=[], outvars=eqn.outvars, eqns=[eqn])
    return eval_jaxpr(single, [values[v] for v in read])
