"""Calls compile themselves: one compilation for the same function with new numbers.

`call_compiled(implementation, args, **options)` runs `implementation(*args, **options)` under jit. Arrays and
numbers in `args` are traced; all else is static. Functions are compared by their code *and* by everything they
captured, so that a fresh lambda compiles nothing, and nothing that a rate reads can change behind a compilation.
"""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ._captures import Captured
from ._trace import define_by_run, partition
from ._watch import watching

FRESH_LIMIT = 10
_KEEP = 256

_COMPILED: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()
_FRESH: Counter[Any] = Counter()
# Places in a call's captures that tracing itself changes (a counter, a list appended to): they decide nothing.
_WRITTEN: dict[Any, set[tuple[int, ...]]] = {}


def call_compiled(implementation: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """`implementation(*args, **options)`, compiled once per static part and shapes of the arrays."""
    if define_by_run():
        return implementation(*args, **options)
    dynamic, static = partition(args)

    def run(dynamic: Any) -> Any:
        return implementation(*eqx.combine(dynamic, static), **options)

    run.__name__ = implementation.__name__.strip("_")
    leaves, tree = jax.tree.flatten((static, options))
    captured = Captured()
    tokens = captured.tokens(leaves)
    if captured.single:
        # Values being differentiated are among what the function captured: no later call may reuse the result.
        return jax.jit(run)(dynamic)
    call = (implementation, watching(), tree, tuple(getattr(leaf, "__code__", type(leaf)) for leaf in leaves))
    key = (call, _without(tokens, _WRITTEN.get(call, set())))
    if key in _COMPILED:
        _COMPILED.move_to_end(key)
        return _COMPILED[key][0](dynamic)
    _warn_of_changing_captures(call, leaves)
    jitted = jax.jit(run)
    result = jitted(dynamic)
    written = _differences(tokens, Captured().tokens(leaves))
    if written:
        _WRITTEN[call] = _WRITTEN.get(call, set()) | written
        key = (call, _without(tokens, _WRITTEN[call]))
    _COMPILED[key] = jitted, captured.kept
    if len(_COMPILED) > _KEEP:
        _COMPILED.popitem(last=False)
    return result


def _differences(a: Any, b: Any, path: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    """Paths at which two nested tuples differ."""
    if a == b:
        return set()
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return set().union(*(_differences(x, y, (*path, i)) for i, (x, y) in enumerate(zip(a, b, strict=True))))
    return {path}


def _without(token: Any, paths: set[tuple[int, ...]], path: tuple[int, ...] = ()) -> Any:
    """A nested tuple with the entries at `paths` blanked."""
    if path in paths:
        return "written"
    if not paths or not isinstance(token, tuple):
        return token
    return tuple(_without(x, paths, (*path, i)) for i, x in enumerate(token))


def _warn_of_changing_captures(call: Any, leaves: list[Any]) -> None:
    """Tell once that the same function is compiled again and again because of what it captures."""
    names = ", ".join(f"`{leaf.__qualname__}`" for leaf in leaves if hasattr(leaf, "__code__"))
    if not names:
        return
    count = (call, tuple(repr(leaf) for leaf in leaves if not callable(leaf)))
    _FRESH[count] += 1
    if _FRESH[count] == FRESH_LIMIT:
        message = (
            f"{names} was compiled {FRESH_LIMIT} times, since something that it captures changed each time. Pass "
            "changing numbers through `params`, or put the whole computation under `jax.jit`."
        )
        warnings.warn(message, stacklevel=5)
