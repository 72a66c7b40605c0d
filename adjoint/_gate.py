"""Gates around a solve: a derivative that turns NaN between them is an error where it can be one.

An adjoint solve that misses its tolerance gives NaN. In an eager derivative its cotangents are numbers when they leave
the solve, and can be looked at: NaN where none came in is raised as `SolveError`. Inside jit, and where the solve
itself is under vmap, they stay.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from ._captures import Captured
from ._status import SolveError
from ._trace import define_by_run, differentiable, known_value, own

gate_p = jex.Primitive("gate")


class Gates:
    """The gates of one solve, on its inputs and on its outputs."""

    def __init__(self, what: str):
        self._what = what
        self._entered: dict[Any, bool] = {}

    def inputs(self, tree: Any) -> Any:
        """Gates on what goes in, where cotangents come out."""
        return self._on(tree, "in")

    def outputs(self, tree: Any) -> Any:
        """Gates on what comes out, where cotangents go in."""
        return self._on(tree, "out")

    def _on(self, tree: Any, side: str) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        gated = [_gated(x, self, side, i) if _eager(x) else x for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, gated)

    def passes(self, x: Any, side: str, place: int, entering: bool) -> Any:
        """Look at a number that enters or leaves the solve."""
        if isinstance(x, Tracer):
            return x
        finite = bool(jnp.all(jnp.isfinite(x)))
        if entering:
            self._entered[side, place] = finite
        elif not finite and self._entered and all(self._entered.values()):
            message = (
                f"{self._what}: a derivative came out of the solve that is not a number, though none went in. The "
                "linear solve of the derivative missed its tolerance, or no finite derivative exists there. "
                "`adjoint.watch_solves()` shows its iterations and residual; give it another method or a looser "
                "tolerance by `adjoint=`, or `throw=False` to get NaN."
            )
            raise SolveError(message)
        return x


def _eager(x: Any) -> bool:
    return isinstance(x, Tracer) and differentiable(x) and known_value(x) is not None


def _gated(x: Any, gates: Gates, side: str, place: int) -> Any:
    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (dot,) = tangents
        if not isinstance(dot, SymbolicZero):
            dot = gate_p.bind(dot, gates=gates, side=side, place=place, transposed=False)
        return primals[0], dot

    identity.defjvp(rule, symbolic_zeros=True)
    return identity(x)


def _impl(x: Any, *, gates: Gates, side: str, place: int, transposed: bool) -> Any:
    return gates.passes(x, side, place, entering=(side == "in") != transposed)


def _transpose(ct: Any, x: Any, *, gates: Gates, side: str, place: int, transposed: bool) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ct if ad.is_undefined_primal(x) else None]
    return [gate_p.bind(ct, gates=gates, side=side, place=place, transposed=not transposed)]


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    # A Jacobian by rows, whose cotangents are numbers with a batch axis, is looked at as a whole.
    return gate_p.bind(args[0], **params), dims[0]


gate_p.def_impl(_impl)
gate_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(gate_p, mlir.lower_fun(lambda x, **_: x, multiple_results=False))
ad.deflinear2(gate_p, _transpose)
batching.primitive_batchers[gate_p] = _batch


def hoisted_if_differentiated(function: Any, *like: Any) -> Any:
    """A function that closes over values of an eager derivative, with them as leaves; any other one as it is."""
    if define_by_run() or not callable(function):
        return function
    captured = Captured()
    captured.token(function)
    if not any(map(_eager, captured.tracers)):
        return function
    convert: Callable[..., Any] = eqx.filter_closure_convert
    return jax.tree.map(own, convert(function, *like))
