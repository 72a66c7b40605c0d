"""Calls compile themselves: one compilation for the same function with new numbers.

`call_compiled(implementation, args, **options)` runs `implementation(*args, **options)` under jit. Arrays and
numbers in `args` are traced; all else is static. Functions are keyed by identity *and* by what they captured, so
that changing a global constant that a rate reads is never answered from a stale compilation.
"""

import dataclasses
import functools
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from ._trace import define_by_run, partition

FRESH_LIMIT = 10

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_IGNORED = (types.ModuleType, types.BuiltinFunctionType, type)
_JITTED: dict[Any, Any] = {}
_KEYS: set["_Key"] = set()
_FRESH: Counter[Any] = Counter()


class _Key:
    """The static part of a call, compared by value.

    Two functions are the same if their code is and if all they captured is: a fresh lambda compiles nothing.
    """

    def __init__(self, static: Any):
        self.static = static
        leaves, tree = jax.tree.flatten(static)
        self.captured = [c for leaf in leaves for c in captures(leaf)]
        self.codes = [leaf.__code__ for leaf in leaves if isinstance(leaf, types.FunctionType)]
        self.call = (tree, tuple(map(_token, leaves)))
        self._value = (*self.call, tuple(map(_token, self.captured)))

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value


def _token(value: Any) -> Any:
    # Type and value for what can change under the same name (True == 1 == 1.0 in Python), identity for the
    # rest. The key keeps the objects alive, so an identity is never reused.
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, types.MethodType):
        return value.__func__.__code__, id(value.__self__)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, list | tuple | dict):
        leaves, tree = jax.tree.flatten(value)
        return tree, tuple(map(_token, leaves))
    return value if _is_value(value) else id(value)


def _is_value(x: Any) -> bool:
    """Whether an object is compared by its contents (a method's settings), not by where it lives."""
    return isinstance(x, eqx.Module) or (dataclasses.is_dataclass(x) and type(x).__hash__ is not object.__hash__)


def captures(fun: Any, seen: set[int] | None = None) -> list[Any]:
    """Everything a Python callable reads from its closure, globals, defaults and `self`, functions included."""
    seen = set() if seen is None else seen
    if isinstance(fun, functools.partial):
        return [*fun.args, *fun.keywords.values(), fun.func, *captures(fun.func, seen)]
    if isinstance(fun, types.MethodType):
        return [*getattr(fun.__self__, "__dict__", {}).values(), *captures(fun.__func__, seen)]
    if not isinstance(fun, types.FunctionType) or id(fun) in seen:
        return []
    seen.add(id(fun))
    found = [*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()]
    for cell in fun.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a name that is bound later
            continue
    found += [fun.__globals__[name] for name in _names(fun.__code__) if name in fun.__globals__]
    found = [x for x in found if not isinstance(x, _IGNORED)]
    return found + [c for x in found for c in captures(x, seen)]


def _names(code: types.CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted(set(code.co_names).union(*map(_names, inner)))


def call_compiled(implementation: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """`implementation(*args, **options)`, compiled once per static part and shapes of the arrays."""
    if define_by_run():
        return implementation(*args, **options)
    dynamic, static = partition(args)
    key = _Key((static, options))
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(key.captured)):
        # A function that closes over values being differentiated belongs to this one call.
        return jax.jit(lambda dynamic: implementation(*eqx.combine(dynamic, static), **options))(dynamic)
    _warn_of_fresh_functions(key)
    return _jitted(implementation)(key, dynamic)


def _jitted(implementation: Callable[..., Any]) -> Any:
    def run(key: _Key, dynamic: Any) -> Any:
        static, options = key.static
        return implementation(*eqx.combine(dynamic, static), **options)

    if implementation not in _JITTED:
        run.__name__ = implementation.__name__.strip("_")
        _JITTED[implementation] = jax.jit(run, static_argnums=0)
    return _JITTED[implementation]


def _warn_of_fresh_functions(key: _Key) -> None:
    if key in _KEYS:
        return
    _KEYS.add(key)
    _FRESH[key.call] += 1
    if _FRESH[key.call] == FRESH_LIMIT:
        names = ", ".join(f"`{code.co_qualname}`" for code in key.codes)
        message = (
            f"{names} was compiled {FRESH_LIMIT} times, since something that it captures changed each time. Pass "
            "changing numbers through `params`, or put the whole computation under `jax.jit`."
        )
        warnings.warn(message, stacklevel=4)
