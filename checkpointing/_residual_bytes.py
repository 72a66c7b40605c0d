"""Bytes that reverse mode would keep of one step."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..adjoint._trace import replaced


def residual_bytes(step: jex.ClosedJaxpr) -> int:
    """Bytes of the residuals of one evaluation of `step`, by abstract evaluation.

    Counted are values computed by the step; its inputs (parameters) are not private to it.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in step.in_avals]
    active = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def residuals(*args: jax.Array) -> list[jax.Array]:
        def of_active(*values: jax.Array) -> list[jax.Array]:
            out = jex.jaxpr_as_fun(step)(*replaced(args, active, values))
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.tree.leaves(jax.vjp(of_active, *(args[i] for i in active))[1])

    jaxpr = jax.make_jaxpr(residuals)(*avals).jaxpr
    inputs = set(jaxpr.invars)
    private: dict[Any, Any] = {v: v.aval for v in jaxpr.outvars if isinstance(v, jex.Var) and v not in inputs}
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in private.values())
