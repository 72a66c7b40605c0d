"""What a function reads beside its arguments, as a value that can be compared.

Two calls may share a compilation only if nothing that the traced Python would read has changed in between: closures,
globals, defaults, attributes of captured objects and of their classes, elements of captured containers. `token` walks
all of it. What belongs to JAX, NumPy and other libraries is taken as fixed, but functions they wrap are followed.
"""

import functools
import hashlib
import sys
import types
from collections import deque
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_FIXED = {"jax", "jaxlib", "numpy", "scipy", "equinox", "jaxtyping", "matplotlib", "tapeless", *sys.stdlib_module_names}
_FIXED -= {"__main__"}
_SMALL = 4096
_WALK_LIMIT = 50_000


class Captured:
    """Walks captured values.

    `kept` are the objects whose identity was used. `single` says that the function belongs to this one call: it
    captured a traced value, or more than is worth walking.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.tracers: list[Tracer] = []
        self.single = False
        self._count = 0
        self._open: set[int] = set()

    def tokens(self, values: list[Any]) -> tuple[Any, ...]:
        """The tokens of several values."""
        return tuple(map(self.token, values))

    def token(self, value: Any) -> Any:
        """A hashable stand-in: equal tokens mean that the traced Python would read the same."""
        if isinstance(value, _CONSTANTS):
            return type(value), value  # True == 1 == 1.0 in Python
        self._count += 1
        if isinstance(value, Tracer):
            self.tracers.append(value)
        if isinstance(value, Tracer) or self._count > _WALK_LIMIT:
            self.single = True
            return id(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value))
        if isinstance(value, jax.Array) or _is_fixed(value):
            return self._identity(value)
        if id(value) in self._open:  # a cycle: the outer visit compares it
            return "cycle"
        self._open.add(id(value))
        try:
            return self._inside(value)
        finally:
            self._open.discard(id(value))

    def _identity(self, value: Any) -> Any:
        self.kept.append(value)  # kept alive, so that the identity is never reused
        wrapped = [getattr(value, name, None) for name in ("__wrapped__", "fun", "func")]
        closure = getattr(value, "__closure__", None) or () if isinstance(value, types.FunctionType) else ()
        inner = [w for w in wrapped if callable(w)] + [c for c in map(contents, closure) if not _is_fixed(c)]
        if not inner or id(value) in self._open:
            return id(value)
        self._open.add(id(value))
        try:
            # A library's wrapper is made anew around the same function: what it wraps is what counts.
            return type(value), getattr(value, "__qualname__", None), tuple(map(self.token, inner))
        finally:
            self._open.discard(id(value))

    def _array(self, value: np.ndarray) -> Any:
        if value.dtype == object:
            return tuple(map(self.token, value.ravel().tolist()))
        data = np.ascontiguousarray(value)
        content = data.tobytes() if data.nbytes <= _SMALL else hashlib.blake2b(data.view(np.uint8).data).digest()
        return value.shape, value.dtype.str, content

    def _inside(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self.token(value.__func__), self.token(value.__self__)
        if isinstance(value, functools.partial):
            return self.token(value.func), self.token(value.args), self.token(value.keywords)
        if isinstance(value, dict):
            return type(value), tuple((self.token(k), self.token(v)) for k, v in value.items())
        if isinstance(value, list | tuple | deque):
            return type(value), tuple(map(self.token, value))
        if isinstance(value, set | frozenset):
            return type(value), frozenset(map(self.token, value))
        return self._object(value)

    def _function(self, fun: types.FunctionType) -> Any:
        read = [self.token(fun.__defaults__), self.token(fun.__kwdefaults__)]
        read += [self.token(contents(cell)) for cell in fun.__closure__ or ()]
        names = _names(fun.__code__)
        for name in names:
            if name in fun.__globals__:
                read.append(self._global(fun.__globals__[name], names))
        return fun.__code__, tuple(read)

    def _global(self, value: Any, names: list[str]) -> Any:
        if isinstance(value, types.ModuleType):
            if _is_fixed(value):
                return value.__name__
            return value.__name__, tuple(self.token(vars(value)[n]) for n in names if n in vars(value))
        return self.token(value)

    def _object(self, value: Any) -> Any:
        """Attributes of an object or a class, and of the classes it inherits from."""
        self.kept.append(value)
        cls = value if isinstance(value, type) else type(value)
        attributes: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            if not _is_fixed(base):
                attributes |= {k: v for k, v in vars(base).items() if not (k.startswith("__") and k != "__call__")}
        attributes |= {k: getattr(value, k) for b in cls.__mro__ for k in _slots(b) if hasattr(value, k)}
        own = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
        if not attributes and not own:
            return id(value)
        return cls, tuple((k, self.token(v)) for k, v in {**attributes, **own}.items())


def contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return None


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _names(code: types.CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted(set(code.co_names).union(*map(_names, inner)))


def _is_fixed(value: Any) -> bool:
    """Whether something belongs to a library, and is not a user's object of a library's class."""
    if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.GetSetDescriptorType):
        return True
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _FIXED
    if isinstance(value, functools.partial | list | tuple | dict | set | frozenset | deque | types.MethodType):
        return False
    if isinstance(value, types.FunctionType | type):
        return (value.__module__ or "").partition(".")[0] in _FIXED
    module = type(value).__module__.partition(".")[0]
    # Nodes and methods are ours, but the functions that they hold are the user's.
    return module in _FIXED - {"tapeless"} and type(value) is not types.SimpleNamespace
