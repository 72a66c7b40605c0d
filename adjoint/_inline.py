"""Nested `jit` calls of a traced function, opened: what depends on what is then seen equation by equation."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
from jax.sharding import Sharding


@functools.lru_cache(maxsize=256)
def inlined(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same function without calls of `jit`, save those that say where their arrays live."""
    if not any(_opens(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    names: dict[Any, Any] = {}
    eqns = _opened(closed.jaxpr.eqns, names)
    outvars = [_named(v, names) for v in closed.jaxpr.outvars]
    return jex.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts)


def _opens(eqn: jex.JaxprEqn) -> bool:
    if eqn.primitive.name not in ("jit", "pjit") or eqn.params["jaxpr"].consts:
        return False
    return not any(isinstance(s, Sharding) for s in (*eqn.params["in_shardings"], *eqn.params["out_shardings"]))


def _named(v: Any, names: dict[Any, Any]) -> Any:
    return names.get(v, v) if isinstance(v, jex.Var) else v


def _opened(eqns: Sequence[jex.JaxprEqn], names: dict[Any, Any]) -> list[jex.JaxprEqn]:
    """Equations in the outer function's names; a function that is called twice gets new names each time."""
    out: list[jex.JaxprEqn] = []
    for eqn in eqns:
        invars = [_named(v, names) for v in eqn.invars]
        if _opens(eqn):
            inner = eqn.params["jaxpr"].jaxpr
            inside = dict(zip(inner.invars, invars, strict=True))
            inside |= {v: jex.Var(v.aval) for e in inner.eqns for v in e.outvars if isinstance(v, jex.Var)}
            out += _opened(inner.eqns, inside)
            names.update(zip(eqn.outvars, (_named(v, inside) for v in inner.outvars), strict=True))
        else:
            out.append(eqn.replace(invars=invars, outvars=[_named(v, names) for v in eqn.outvars]))
    return out
