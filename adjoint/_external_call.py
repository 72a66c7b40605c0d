"""A function that a program calls as one equation, evaluated on the host or traced only when it is needed.

`call_p` holds a Python function. On numbers it calls that function then and there, so that the function's own
exceptions come out; in a compiled program it becomes a callback of the host (`HostCall`) or is traced when the program
is lowered (`TracedCall`). A rule that no derivative asks for is thus never run, traced, or missed.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.interpreters import ad, batching, mlir

from ._captures import contents
from ._loops import vary, varying_axes
from ._trace import differentiable, replaced

Aval = jax.ShapeDtypeStruct
Flat = Callable[..., Sequence[Any]]

call_p = jex.Primitive("external_call")
call_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a user's function is to return: `avals`, at `places` among the leaves of `structure`."""

    what: str
    next_step: str
    structure: Any
    places: Sequence[int]
    avals: Sequence[Aval]
    none_is_zero: bool = False

    def leaves(self, found: Any) -> list[Any]:
        """The leaves of what a function returned; a leaf may be a list of numbers."""
        return self._leaves(found, self.structure)

    def leaves_each(self, found: Any) -> list[Any]:
        """The same for a tuple, in which None stands for all leaves of an entry."""
        parts = self.structure.children()
        if not isinstance(found, tuple | list) or len(found) != len(parts):
            got = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, tuple | list) else "")
            message = (
                f"{self.what}: expected a tuple of {len(parts)}, one for each argument, got {got}. {self.next_step}"
            )
            raise ValueError(message)
        pairs = zip(found, parts, strict=True)
        return [x for f, part in pairs for x in ([None] * part.num_leaves if f is None else self._leaves(f, part))]

    def _leaves(self, found: Any, structure: Any) -> list[Any]:
        try:
            return structure.flatten_up_to(found)
        except (TypeError, ValueError):
            got = jax.tree.structure(found)
            message = f"{self.what}: expected the structure {structure}, got {got}. {self.next_step}"
            raise ValueError(message) from None

    def fitted(self, leaves: Sequence[Any], xp: Any, lanes: tuple[int, ...] = ()) -> list[Any]:
        """Those leaves as arrays of the expected shapes and dtypes, or an error."""
        places = zip(self.places, self.avals, strict=True)
        return [self._fitted(leaves[i], aval, xp, lanes, i) for i, aval in places]

    def _path(self, place: int) -> str:
        paths = jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        )
        path = jax.tree_util.keystr(paths[place][0])
        return f" at {path}" if path else ""

    def _fitted(self, found: Any, aval: Aval, xp: Any, lanes: tuple[int, ...], place: int) -> Any:
        shape = (*lanes, *aval.shape)
        if found is None and self.none_is_zero:
            return xp.zeros(shape, aval.dtype)
        try:
            x = xp.asarray(found)
        except (TypeError, ValueError):
            x = np.array(None)
        if x.shape != shape or not np.can_cast(x.dtype, aval.dtype, "same_kind"):
            got = type(found).__name__ if x.dtype == object else f"{x.dtype}{list(x.shape)}"
            message = f"{self.what}{self._path(place)}: expected {aval.dtype}{list(shape)}, got {got}. {self.next_step}"
            raise ValueError(message)
        return x.astype(aval.dtype, copy=False)


@dataclasses.dataclass(frozen=True, eq=False)
class HostCall:
    """`function(*arrays) -> arrays` on NumPy arrays, lane by lane where arguments have more axes than `ranks`."""

    function: Flat
    ranks: tuple[int, ...]
    outputs: Outputs
    name: str
    batched: bool
    no_derivative: str

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results as JAX arrays, now or when the compiled program runs."""
        if any(isinstance(x, Tracer) for x in arrays):
            avals = [Aval((*self._lanes(arrays), *a.shape), a.dtype) for a in self.outputs.avals]
            return jax.pure_callback(self._run, avals, *arrays)
        # Copies, here and below: a library may return the same workspace each time, or write into its arguments.
        return [jnp.array(x, copy=True) for x in self._run(*arrays)]

    def __repr__(self) -> str:
        return f"{self.name} (host)"

    def _lanes(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        return np.broadcast_shapes(*(x.shape[: x.ndim - r] for x, r in zip(arrays, self.ranks, strict=True)))

    def _run(self, *arrays: Any) -> list[np.ndarray]:
        arrays = tuple(map(np.asarray, arrays))
        lanes = self._lanes(arrays)
        if not lanes:
            return self._called(arrays)
        each = [np.broadcast_to(x, (*lanes, *x.shape[x.ndim - r :])) for x, r in zip(arrays, self.ranks, strict=True)]
        if self.batched:
            return self._called(each, lanes)
        found = [np.empty((*lanes, *a.shape), a.dtype) for a in self.outputs.avals]
        for lane in np.ndindex(*lanes):
            for out, x in zip(found, self._called([x[lane] for x in each]), strict=True):
                out[lane] = x
        return found

    def _called(self, arrays: Sequence[np.ndarray], lanes: tuple[int, ...] = ()) -> list[np.ndarray]:
        try:
            return self.outputs.fitted(self.function(*(np.array(x, order="C") for x in arrays)), np, lanes)
        except Exception as error:
            error.add_note(f"(raised in a host function of node {self.name!r})")
            raise

    def mapped(self, args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], "HostCall"]:
        """The call for all lanes: their axis is the first one."""
        lanes = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        return lanes, self


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """`function(*arrays) -> arrays`, a JAX function."""

    function: Flat
    name: str
    no_derivative: str | None = None

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arrays: Any) -> list[Any]:
        """Evaluate it."""
        return list(self.function(*arrays))

    def mapped(self, args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], "TracedCall"]:
        """The function for all lanes."""
        function = jax.vmap(lambda *arrays: list(self.function(*arrays)), in_axes=tuple(dims))
        return list(args), dataclasses.replace(self, function=function)


Call = HostCall | TracedCall


def bind(call: Call, outputs: Sequence[Aval], *args: Any) -> list[Any]:
    """The call as one equation whose results have the shapes and dtypes of `outputs`."""
    axes = varying_axes(list(args))
    avals = [ShapedArray(a.shape, a.dtype) for a in outputs]
    if axes:  # inside shard_map
        avals = [jax.typeof(vary(jnp.zeros(a.shape, a.dtype), axes)) for a in avals]
    return call_p.bind(*args, call=call, avals=tuple(avals))


def _evaluate(*args: Any, call: Call, avals: Any) -> list[Any]:
    del avals
    return call(*args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, avals: Any) -> tuple[list[Any], list[Any]]:
    del avals
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and differentiable(primals[i])]
    if call.no_derivative is not None and moving:
        raise TypeError(call.no_derivative)
    at, dots = ([values[i] for i in moving] for values in (primals, tangents))
    return jax.jvp(lambda *values: call(*replaced(primals, moving, values)), at, dots)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: Call, avals: Any) -> tuple[list[Any], list[int]]:
    (size, *_) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    args, call = call.mapped(args, dims)
    out = bind(call, [Aval((size, *a.shape), a.dtype) for a in avals], *args)
    return out, [0] * len(out)


call_p.def_impl(_evaluate)
call_p.def_abstract_eval(lambda *_, call, avals: list(avals))  # noqa: ARG005 (the names of the parameters)
mlir.register_lowering(call_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[call_p] = _jvp
batching.primitive_batchers[call_p] = _batch


def hidden_tracers(functions: Sequence[Any]) -> list[Tracer]:
    """Traced arrays that functions close over: in cells, defaults, bound objects, and functions among these."""
    found, seen, rest = [], set(), list(functions)
    while rest:
        x = rest.pop()
        if isinstance(x, Tracer):
            found.append(x)
        elif callable(x) and id(x) not in seen:
            seen.add(id(x))
            rest += [leaf for held in _held(x) for leaf in _leaves(held)]
    return found


def _held(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, types.MethodType):
        return [function.__func__, *_attributes(function.__self__)]
    if isinstance(function, types.FunctionType):
        return [function.__defaults__, function.__kwdefaults__, *map(contents, function.__closure__ or ())]
    return [getattr(function, "__wrapped__", None), *_attributes(function)]


def _attributes(x: Any) -> list[Any]:
    return [] if isinstance(x, type | types.ModuleType) else list(getattr(x, "__dict__", {}).values())


def _leaves(x: Any) -> list[Any]:
    try:
        return jax.tree.leaves(x)
    except (TypeError, ValueError):  # a dictionary whose keys have no order
        return []
