"""A step's linearisation, split into recording its residuals and pulling cotangents back through them.

Of the residuals only what is private to a step is stored: constants are at hand, per-step data are read again, and
what depends on neither the state nor the data is computed once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import eval_jaxpr

from ..adjoint._inline import inlined

Flat = list[Any]
DiffStep = Callable[[Flat, Flat, Flat], tuple[Flat, Callable[..., Any]]]


class LinearisedStep:
    """`step(fixed, state, data) -> (new state, pull)`, traced once.

    `fixed` does not change from step to step; `data` can be read again when the step is reversed.
    """

    def __init__(self, step: DiffStep, fixed: Sequence[Any], state: Sequence[Any], data: Sequence[Any]):
        a, b = len(fixed), len(fixed) + len(state)
        self._tree: Any = None

        def flat(*args: Any) -> Flat:
            new, pull = step(list(args[:a]), list(args[a:b]), list(args[b:]))
            leaves, self._tree = jax.tree.flatten(pull)
            return [*new, *leaves]

        closed = inlined(jax.make_jaxpr(flat)(*fixed, *state, *data))
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        self._num_state = len(state)
        self._residuals = self._jaxpr.outvars[self._num_state :]
        private = depending(self._jaxpr, self._jaxpr.invars[a:])
        shared = [v for v in self._residuals if isinstance(v, jex.Var) and v not in private]
        self._shared = list(dict.fromkeys(shared))
        self._data = {v: i for i, v in enumerate(self._jaxpr.invars[b:])}
        kept = [v for v in self._residuals if isinstance(v, jex.Var) and v in private and v not in self._data]
        self._kept = list(dict.fromkeys(kept))

    @property
    def kept_avals(self) -> list[Any]:
        """Abstract values of what is stored of each step."""
        return [v.aval for v in self._kept]

    def shared(self, fixed: Flat, state: Flat, data: Flat) -> Flat:
        """Residuals that are the same for all steps; `state` and `data` lend their shapes only."""
        wanted: set[Any] = set(self._shared)
        eqns = []
        for eqn in reversed(self._jaxpr.eqns):
            if not wanted.isdisjoint(eqn.outvars):
                eqns.insert(0, eqn)
                wanted.update(v for v in eqn.invars if isinstance(v, jex.Var))
        unnamed = self._jaxpr.debug_info.with_unknown_names()
        part = self._jaxpr.replace(eqns=eqns, outvars=self._shared, effects=set(), debug_info=unnamed)
        return eval_jaxpr(part, self._consts, *fixed, *state, *data)

    def record(self, fixed: Flat, state: Flat, data: Flat) -> tuple[Flat, Flat]:
        """Evaluate a step; return the new state and what to store."""
        out = eval_jaxpr(self._jaxpr, self._consts, *fixed, *state, *data)
        return out[: self._num_state], [out[self._jaxpr.outvars.index(v)] for v in self._kept]

    def pull(self, shared: Flat, kept: Flat, data: Flat) -> Callable[..., Any]:
        """The function that pulls cotangents back through the step."""
        values = dict(zip(self._shared, shared, strict=True)) | dict(zip(self._kept, kept, strict=True))
        values |= {v: data[i] for v, i in self._data.items()}
        leaves = [v.val if isinstance(v, jex.Literal) else values[v] for v in self._residuals]
        return jax.tree.unflatten(self._tree, leaves)


def depending(jaxpr: jex.Jaxpr, on: Sequence[jex.Var]) -> set[jex.Var]:
    """Variables that depend on any of `on`, or that only running the step's side effects gives."""
    found = set(on)
    for eqn in jaxpr.eqns:
        if eqn.effects or any(isinstance(v, jex.Var) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def empty_buffers(avals: Sequence[Any], length: int) -> Flat:
    """Room for `length` values of each kind."""

    def empty(aval: Any) -> Any:
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            key = jax.random.key(0, impl=aval.dtype._impl.name)
            return jnp.broadcast_to(key, (length, *aval.shape))
        return jnp.zeros((length, *aval.shape), aval.dtype)

    return [empty(aval) for aval in avals]
