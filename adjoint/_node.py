"""The linear node: one equation of a jaxpr that knows its transpose.

Every derivative in tapeless is an application of this one primitive. It binds a function
`fun(residuals, linear)`, linear in its second group of arguments, together with that function's
transpose, so that neither forward nor reverse mode ever looks inside an iteration or a loop.

Rules, each the mathematics of a map  out = A(r) l  with residuals r and linear arguments l:

- JVP:        d out = A(r) dl  +  (∂A/∂r · dr) l
- transpose:  l̄ = A(r)ᵀ ōut, which is a linear node again, with the two functions swapped
- batching:   residuals that carry no batch axis keep none; only linear arguments are broadcast
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir

from ._trace import replaced

Arrays = list[jax.Array]
Linear = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

linear_node_p = jex.Primitive("linear_node")
linear_node_p.multiple_results = True


def linear_node(
    fun: Linear,
    transpose: Linear,
    residuals: Sequence[Any],
    linear: Sequence[Any],
    name: str,
    *,
    on_host: bool = False,
) -> Arrays:
    """Apply `fun(residuals, linear)` as one node whose transpose is `transpose`.

    Choose it when a linear map is computed by something that iterates (a solve, a loop), whose
    transpose is known mathematically.

    Parameters
    ----------
    fun
        `fun(residuals, linear) -> out`, linear in `linear`. It must be differentiable with respect
        to the residuals by JAX (build it from other nodes), or second derivatives fail.
    transpose
        `transpose(residuals, cotangents) -> cotangents of linear`, with the same requirement.
        It is traced only when reverse mode asks for it.
    residuals
        Flat list of arrays of any dtype, on which the map depends.
    linear
        Flat list of floating-point or complex arrays.
    name
        Shown in the jaxpr: ``linear_node[name=...]``.
    on_host
        Whether `transpose` works on concrete arrays (it reads files, say): it is then called as it is, not traced.

    Returns
    -------
    out
        Flat list of arrays.

    Notes
    -----
    `fun` and `transpose` must not close over traced arrays: pass those as residuals.
    """
    jaxpr = _trace(fun, residuals, linear)
    return linear_node_p.bind(
        *residuals, *linear, jaxpr=jaxpr, transpose=transpose, num_residuals=len(residuals), name=name, on_host=on_host
    )


def _trace(fun: Linear, residuals: Sequence[Any], linear: Sequence[Any]) -> jex.ClosedJaxpr:
    n = len(residuals)
    jaxpr = jax.make_jaxpr(lambda *args: list(fun(args[:n], args[n:])))(*residuals, *linear)
    if any(isinstance(const, Tracer) for const in jaxpr.consts):
        message = "a linear node's function closes over a traced array; pass it as a residual"
        raise TypeError(message)
    return jaxpr


def _evaluate(*args: Any, jaxpr: jex.ClosedJaxpr, **_: Any) -> Arrays:
    return jex.jaxpr_as_fun(jaxpr)(*args)


@linear_node_p.def_impl
def _impl(*args: Any, jaxpr: jex.ClosedJaxpr, **_: Any) -> Arrays:
    return jax.jit(jex.jaxpr_as_fun(jaxpr))(*args)


@linear_node_p.def_abstract_eval
def _abstract_eval(*_: Any, jaxpr: jex.ClosedJaxpr, **__: Any) -> list[Any]:
    # The jaxpr's own avals: a fresh ShapedArray would drop what shard_map keeps in them.
    return list(jaxpr.out_avals)


mlir.register_lowering(linear_node_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Arrays, list[Any]]:
    n = params["num_residuals"]
    residuals, linear = primals[:n], primals[n:]
    out = linear_node_p.bind(*primals, **params)
    out_dot = [ad.Zero(aval.to_tangent_aval()) for aval in params["jaxpr"].out_avals]
    if any(not isinstance(t, ad.Zero) for t in tangents[n:]):
        out_dot = linear_node_p.bind(*residuals, *map(ad.instantiate_zeros, tangents[n:]), **params)
    active = [i for i, t in enumerate(tangents[:n]) if not isinstance(t, ad.Zero)]
    if active:
        fun = jex.jaxpr_as_fun(params["jaxpr"])

        def of_residuals(*values: Any) -> Arrays:
            return fun(*replaced(residuals, active, values), *linear)

        dots = jax.jvp(of_residuals, [residuals[i] for i in active], [tangents[i] for i in active])[1]
        out_dot = list(map(ad.add_tangents, out_dot, dots))
    return out, out_dot


def _transpose_rule(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    n = params["num_residuals"]
    residuals, linear = args[:n], args[n:]
    if all(isinstance(ct, ad.Zero) for ct in cotangents):
        return [None] * n + [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear]
    cts = list(map(ad.instantiate_zeros, cotangents))
    if params["on_host"]:
        out = params["transpose"](residuals, cts)
        return [None] * n + [ct if ad.is_undefined_primal(x) else None for x, ct in zip(linear, out, strict=True)]
    out = linear_node(params["transpose"], _Forward(params["jaxpr"]), residuals, cts, _swapped(params["name"]))
    return [None] * n + [ct if ad.is_undefined_primal(x) else None for x, ct in zip(linear, out, strict=True)]


def _swapped(name: str) -> str:
    return name.removesuffix("ᵀ") if name.endswith("ᵀ") else name + "ᵀ"


class _Forward:
    """The forward function of a node, as the transpose of its transpose."""

    def __init__(self, jaxpr: jex.ClosedJaxpr):
        self.jaxpr = jaxpr

    def __call__(self, residuals: Sequence[Any], linear: Sequence[Any]) -> Arrays:
        return jex.jaxpr_as_fun(self.jaxpr)(*residuals, *linear)


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Arrays, list[int]]:
    n = params["num_residuals"]
    (size, *_) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    residuals = list(args[:n])  # with their batch axes where they are: moving one would copy all snapshots
    linear = [batching.bdim_at_front(x, d, size) for x, d in zip(args[n:], dims[n:], strict=True)]
    axes = list(dims[:n])
    fun, transpose = _vmap(_Forward(params["jaxpr"]), axes), _vmap(params["transpose"], axes)
    out = linear_node(fun, transpose, residuals, linear, params["name"], on_host=params["on_host"])
    return out, [0] * len(out)


def _vmap(fun: Linear, axes: list[int | None]) -> Linear:
    mapped = jax.vmap(lambda residuals, linear: list(fun(residuals, linear)), in_axes=(axes, 0))
    return lambda residuals, linear: mapped(list(residuals), list(linear))


ad.primitive_jvps[linear_node_p] = _jvp
ad.primitive_transposes[linear_node_p] = _transpose_rule
batching.primitive_batchers[linear_node_p] = _batch
