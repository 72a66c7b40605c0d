"""Tracing a user's function once, and the kinds of leaves it may be given.

Kinds of leaves: floating-point and complex arrays carry derivatives; integer, boolean and key arrays are
carried along; everything else (callables, strings, static fields of modules) is static and compared by `==`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from ._loops import vary, varying_axes


class Traced(NamedTuple):
    """A user's function as a jaxpr: `evaluate(consts, flat_args) -> flat outputs`.

    `consts` are the arrays that the function closes over. They are inputs like any other, so they get their
    gradients.
    """

    jaxpr: jex.Jaxpr
    consts: list[Any]
    out_tree: Any
    out_avals: list[Any]

    def evaluate(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Run the traced computation on flat lists."""
        return eval_jaxpr(self.jaxpr, list(consts), *args)


def trace(fun: Callable[..., Any], *args: Any) -> Traced:
    """Trace `fun` at pytrees of arrays (or abstract values), hoisting what it closes over."""
    closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
    return Traced(closed.jaxpr, list(map(_private, closed.consts)), jax.tree.structure(out), list(closed.out_avals))


def _private(const: Any) -> Any:
    """A copy of a captured array: its NumPy buffer may be changed before a pullback reads it."""
    if isinstance(const, Tracer) or jnp.issubdtype(const.dtype, jax.dtypes.extended):
        return const
    with jax.ensure_compile_time_eval():
        return jnp.array(const, copy=True)


def trace_unknown(fun: Callable[..., Any], unknown: Any, *args: Any) -> tuple[Traced, Any]:
    """Trace `fun(unknown, *args)`, whose result will take the place of `unknown`; return it with `unknown`.

    Inside `shard_map`, an unknown that starts equal on all devices but whose equations differ is marked as varying.
    """
    traced = trace(fun, unknown, *args)
    axes = varying_axes([unknown, *args, *traced.consts])
    if axes == varying_axes(unknown):
        return traced, unknown
    unknown = jax.tree.map(lambda x: vary(x, axes), unknown)
    return trace(fun, unknown, *args), unknown


def differentiable(x: Any) -> bool:
    """Whether a leaf carries derivatives: floating point or complex."""
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def define_by_run() -> bool:
    """Whether `jax.disable_jit()` is in force: nothing is to be traced then."""
    return bool(getattr(jax.config, "jax_disable_jit"))  # noqa: B009 (the attribute is made at run time)


def replaced(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """The list `values` with new entries at some positions: how a function of its active arguments is made."""
    out = list(values)
    for i, value in zip(positions, new, strict=True):
        out[i] = value
    return out


def zero_tangent(x: Any) -> SymbolicZero:
    """The tangent of a value that has none to speak of: a count, a status, a snapshot."""
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def instantiated(tangent: Any) -> Any:
    """A tangent as an array: zeros for a symbolic zero."""
    if isinstance(tangent, SymbolicZero):
        aval: Any = tangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return tangent


def known_value(x: Any) -> Any:
    """The value of `x` if it is known now (the primal value under an eager derivative), else None."""
    if isinstance(x, Tracer):
        x = jax.lax.stop_gradient(x)
    return None if isinstance(x, Tracer) else x


def own(x: Any) -> Any:
    """A leaf that no later change of a caller's NumPy buffer can reach.

    JAX may alias a NumPy array without a copy and keep the alias as a residual: changing the array between a
    forward pass and its pullback would change the gradient.
    """
    if isinstance(x, np.ndarray | np.generic):
        return jnp.array(x, copy=True)
    if isinstance(x, Tracer) and known_value(x) is not None and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.array(x, copy=True)
    return x


def is_array_like(x: Any) -> bool:
    """Whether a leaf of a user's pytree is a number or an array."""
    number = isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)
    return number and not isinstance(x, bool)  # a flag decides in Python, and so is static


def partition(tree: Any) -> tuple[Any, Any]:
    """Split a pytree into numbers and arrays, and everything else."""
    return eqx.partition(tree, is_array_like)


def as_unknowns(tree: Any) -> Any:
    """A state or a guess: every leaf an owned floating-point or complex array; integers become the default float."""
    return jax.tree.map(_as_unknown, tree)


def _as_unknown(x: Any) -> jax.Array:
    if not is_array_like(x) and not isinstance(x, bool):
        message = f"a state's leaves must be numbers or arrays, got {x!r} ({type(x).__name__}); move it to `params`."
        raise TypeError(message)
    x = _strong(jnp.asarray(own(x)))
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def as_parameters(tree: Any, dtype: Any) -> Any:
    """Parameters: numbers become owned arrays (Python floats of the state's `dtype`), all else stays as it is.

    A weakly typed argument would compile a second time; a Python float taken for float64 would promote a float32
    state.
    """

    def convert(x: Any) -> Any:
        if not is_array_like(x):
            return x
        if isinstance(x, float):
            return jnp.asarray(x, jnp.finfo(dtype).dtype)
        return _strong(jnp.asarray(own(x)))

    return jax.tree.map(convert, tree)


def _strong(x: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def state_dtype(tree: Any) -> Any:
    """The common dtype of a state's leaves (the default float for an empty one)."""
    leaves = jax.tree.leaves(tree)
    return jnp.result_type(*leaves) if leaves else jnp.result_type(float)
