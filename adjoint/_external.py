"""A function from outside JAX, or with a better rule than JAX's own, as a node with its own derivative rules."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from ._external_call import Aval, Call, HostCall, Outputs, TracedCall, bind, hidden_tracers
from ._loops import vary, vary_together, varying_axes
from ._node import linear_node
from ._rule_check import RuleReport, check_rules
from ._tie import tie
from ._trace import as_parameters, differentiable, is_array_like, replaced, state_dtype, zero_tangent

Forward = Callable[..., Any]
Rule = Callable[[Any, Any, Any], Any]

# Nodes whose missing `vjp` is being derived from `jvp`.
_deriving: ContextVar[tuple[Any, ...]] = ContextVar("deriving", default=())
_TANGENT = "A tangent is like the result, real for a real one; None stands for zero."
_COTANGENT = "A cotangent is like its argument, real for a real one; None stands for zero."


class node:  # noqa: N801 (a transformation of functions, named like `jax.custom_jvp`)
    """Turn your own function into a node: `f = node(name, forward, jvp=..., vjp=...)`, called as `f(*args)`.

    Choose it for code that JAX cannot look into (a SciPy routine, a C or Fortran library, a subprocess), and for JAX
    functions whose derivative you know better. For a solver of equations `implicit_root` needs no rules.

    The equations, for out = f(args):  d out = f′(args) d args  (`jvp`),  args̄ = f′(args)ᵀ ōut  (`vjp`).

    Parameters
    ----------
    name
        Shown in errors, and in the jaxpr (``linear_node[name=...]``).
    forward
        `forward(*args) -> out`, on pytrees. It must be pure: a compiled program may call it more than once, or drop
        the call.
    jvp
        `jvp(args, out, tangents) -> out_tangent`, linear in `tangents`: a tuple like `args`, with zeros for arguments
        that are held fixed.
    vjp
        `vjp(args, out, cotangent) -> cotangents`, linear in `cotangent`: a tuple with one entry for each argument, of
        its structure; None where there is no derivative. Complex numbers as in JAX: transposed, not conjugated.
    host
        Where the functions run. ``True``: on the host, all of them, on NumPy arrays of their own. ``"forward"``:
        `forward` on the host, the rules as JAX functions, which may call nodes, this one too: derivatives of every
        order. ``False``: all are JAX functions.
    like
        What `forward` returns on the host: arrays or `jax.ShapeDtypeStruct`, as a pytree, or `like(*args)`, a function
        that returns such a pytree. Only shapes and dtypes are read. Results of a higher precision are rounded to it.
    batched
        Whether functions on the host take any number of leading axes, the same for all arrays. Otherwise `vmap` calls
        them lane by lane.

    Raises
    ------
    TypeError
        A derivative was asked for that the rules given do not determine: the error says which rule to give.
    ValueError
        A function returned other shapes, dtypes or structures than expected.

    Notes
    -----
    Leaves of `args`: floating-point and complex arrays and Python floats carry derivatives. Integer and boolean arrays
    are passed on. Everything else (Python integers and flags, strings, None, functions) is passed on as it is. Leaves
    without a derivative are None in tangents and cotangents.

    A missing rule that is a JAX function follows from the other one by transposition. On the host each serves one
    mode only, and derivatives of rules are an error.

    An exception in a function on the host comes out as it is from an eager call. A compiled program raises
    `jax.errors.JaxRuntimeError`, which ends with its traceback.

    Arrays that a function closes over must be concrete: pass what is traced as an argument.

    References
    ----------
    Griewank and Walther, *Evaluating Derivatives*, SIAM 2008, Sections 3.1 and 3.2, doi:10.1137/1.9780898717761.

    Examples
    --------
    >>> import jax, numpy as np
    >>> from tapeless import adjoint
    >>> def slope(args, out, dots):
    ...     return np.exp(args[0]) * dots[0] / (1 + np.exp(args[0]))
    >>> softplus = adjoint.node(
    ...     "softplus",
    ...     lambda x: np.logaddexp(0, x),
    ...     jvp=slope,
    ...     vjp=lambda args, out, bar: (slope(args, out, (bar,)),),
    ...     like=lambda x: x,
    ... )
    >>> print(f"{jax.grad(softplus)(1.5):.4f}")
    0.8176
    >>> softplus.check(1.5).verdict
    'right'
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        *,
        jvp: Rule | None = None,
        vjp: Rule | None = None,
        host: bool | str = True,
        like: Any = None,
        batched: bool = False,
    ):
        if host not in (True, False, "forward"):
            message = f'`host` must be True, False or "forward", got {host!r}. See `help(adjoint.node)`.'
            raise ValueError(message)
        if bool(host) == (like is None):
            message = (
                f"node {name!r}: `like` says what a function on the host returns. Expected it with `host=True` or "
                f'`host="forward"` only, got host={host!r} and like={like!r}. Give, say, `like=lambda x: x` for '
                "an output like the first argument; a JAX function needs none."
            )
            raise ValueError(message)
        for role, function in (("forward", forward), ("jvp", jvp), ("vjp", vjp)):
            if not callable(function) and (role == "forward" or function is not None):
                message = f"node {name!r}: `{role}` must be a function, got {function!r}."
                raise TypeError(message)
        self.name, self.forward, self.jvp, self.vjp = name, forward, jvp, vjp
        self.host, self.like, self.batched = host, like, batched

    def __call__(self, *args: Any) -> Any:
        """The value of `forward(*args)`."""
        call = _Application(self, args)
        return call.value(call.arrays)

    def check(self, *args: Any, seed: int = 0) -> RuleReport:
        """Check the rules at `args`, a generic point, argument by argument along random directions.

        `jvp` is compared with central differences of `forward`, and `vjp` with `jvp` by the dot test
        ⟨w, jvp(v)⟩ = ⟨vjp(w), v⟩ (with the differences if there is no `jvp`). Print the report.
        """
        if self.jvp is None and self.vjp is None:
            raise TypeError(_missing(self.name))
        on_host = self.host is True
        modes = self.jvp is not None or not on_host, self.vjp is not None or not on_host
        return check_rules(self, args, f"node {self.name!r}", *modes, seed=seed)


class _Application:
    """A call of a node, flat: `arrays` are those leaves of the arguments that are arrays."""

    def __init__(self, owner: node, args: tuple[Any, ...]):
        leaves, self.tree = jax.tree.flatten(args, is_leaf=lambda x: x is None)
        self.owner = owner
        self.places = [i for i, x in enumerate(leaves) if is_array_like(x) and not isinstance(x, int)]
        arrays = [leaves[i] for i in self.places]
        dtype = state_dtype([x for x in arrays if not isinstance(x, float) and differentiable(x)])
        self.arrays = vary_together(as_parameters(arrays, dtype))
        self.statics = replaced(leaves, self.places, [None] * len(arrays))
        _refuse_hidden(owner.name, [owner.forward, owner.jvp, owner.vjp, *self.statics])
        self.declared = self._declared() if owner.host else None
        self.value = jax.custom_jvp(self._value)
        self.value.defjvp(self._tangent, symbolic_zeros=True)

    def args(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, replaced(self.statics, self.places, arrays))

    def like_args(self, values: dict[int, Any]) -> Any:
        """A tuple like the arguments, with `values` for some of the arrays and None for all else."""
        nothing = [None] * self.tree.num_leaves
        return jax.tree.unflatten(self.tree, replaced(nothing, [self.places[i] for i in values], list(values.values())))

    def _declared(self) -> Any:
        like = self.owner.like
        return jax.tree.map(_declared, like(*self.args(self.arrays)) if callable(like) else like)

    def _value(self, arrays: list[Any]) -> Any:
        forward = self.owner.forward
        if not self.owner.host:
            return tie(jax.tree.map(jnp.asarray, forward(*self.args(arrays))), arrays)
        avals, structure = jax.tree.flatten(self.declared)
        what = f"node {self.owner.name!r}, what `forward` returned"
        next_step = "Correct `like`, which says what to expect, or `forward`."
        outputs = Outputs(what, next_step, structure, range(len(avals)), avals)
        call = self.host_call(lambda *arrays: outputs.leaves(forward(*self.args(arrays))), arrays, outputs)
        return jax.tree.unflatten(structure, bind(call, avals, *arrays))

    def host_call(self, function: Callable[..., Any], arrays: Sequence[Any], outputs: Outputs) -> HostCall:
        name = self.owner.name
        no_derivative = (
            f"node {name!r}: a derivative of its rules was asked for (a second derivative), and rules that run on the "
            'host have none. Give rules that are JAX functions, with `host="forward"`; they may call nodes, this one '
            "too."
        )
        return HostCall(function, tuple(map(jnp.ndim, arrays)), outputs, name, self.owner.batched, no_derivative)

    def _tangent(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        (arrays,), (dots,) = primals, tangents
        out = self.value(arrays)
        leaves, structure = jax.tree.flatten(out)
        active = [i for i, t in enumerate(dots) if not isinstance(t, SymbolicZero) and differentiable(arrays[i])]
        moving = [i for i, x in enumerate(leaves) if differentiable(x)]
        out_dots = list(map(zero_tangent, leaves))
        if active and moving:
            rules = _Rules(self, arrays, out, active, moving)
            found = rules.tangent([*arrays, *leaves], [dots[i] for i in active])
            out_dots = replaced(out_dots, moving, found)
        return out, jax.tree.unflatten(structure, out_dots)


class _Rules:
    """The rules at one call, on flat lists.

    Residuals are the arguments' arrays and the results. Tangents are those of the `active` arrays and of the `moving`
    results.
    """

    def __init__(self, call: _Application, arrays: list[Any], out: Any, active: list[int], moving: list[int]):
        self.call, self.owner, self.active, self.moving = call, call.owner, active, moving
        leaves, self.structure = jax.tree.flatten(out)
        self.arrays, self.leaves = list(map(_aval, arrays)), list(map(_aval, leaves))
        self.out_dots, self.bars = [self.leaves[i] for i in moving], [self.arrays[i] for i in active]
        self.on_host = self.owner.host is True
        self.xp = np if self.on_host else jnp
        if self.owner.jvp is None and self.owner.vjp is None:
            raise TypeError(_missing(self.owner.name))

    def tangent(self, residuals: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        """`jvp` as a linear node, whose transpose is `vjp`."""
        return _applied(self._jvp(), self.out_dots, self.cotangent, residuals, dots, self.owner.name)

    def cotangent(self, residuals: Sequence[Any], bars: Sequence[Any]) -> list[Any]:
        """`vjp` as a linear node, whose transpose is `jvp`."""
        if self.owner.vjp is None:
            return self._transposed_jvp(residuals, bars)
        return _applied(self._vjp(), self.bars, self.tangent, residuals, bars, self.owner.name + "ᵀ")

    def _jvp(self) -> Call:
        name, jvp = self.owner.name, self.owner.jvp
        if jvp is None:
            return TracedCall(self._no_jvp if self.on_host else self._transposed_vjp, name)

        outputs = Outputs(
            f"node {name!r}, what `jvp` returned", _TANGENT, self.structure, self.moving, self.out_dots, True
        )

        def rule(*flat: Any) -> list[Any]:
            args, out, dots = self._split(flat)
            zeros = {i: self.xp.zeros_like(flat[i]) for i, a in enumerate(self.arrays) if differentiable(a)}
            tangents = self.call.like_args(zeros | dict(zip(self.active, dots, strict=True)))
            return outputs.leaves(jvp(args, out, tangents))

        return self._rule(rule, outputs, self.bars)

    def _vjp(self) -> Call:
        name, vjp = self.owner.name, self.owner.vjp
        assert vjp is not None
        places = [self.call.places[i] for i in self.active]
        outputs = Outputs(f"node {name!r}, what `vjp` returned", _COTANGENT, self.call.tree, places, self.bars, True)

        def rule(*flat: Any) -> list[Any]:
            args, out, bars = self._split(flat)
            cotangent = replaced([None] * len(self.leaves), self.moving, bars)
            return outputs.leaves_each(vjp(args, out, jax.tree.unflatten(self.structure, cotangent)))

        return self._rule(rule, outputs, self.out_dots)

    def _rule(self, rule: Callable[..., Any], outputs: Outputs, linear: Sequence[Any]) -> Call:
        if self.on_host:
            return self.call.host_call(rule, [*self.arrays, *self.leaves, *linear], outputs)
        return TracedCall(lambda *flat: outputs.fitted(rule(*flat), jnp), self.owner.name)

    def _split(self, flat: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        m, n = len(self.arrays), len(self.arrays) + len(self.leaves)
        return self.call.args(flat[:m]), jax.tree.unflatten(self.structure, flat[m:n]), list(flat[n:])

    def _no_jvp(self, *_: Any) -> Any:
        raise TypeError(_missing(self.owner.name, "jvp", "forward", "vjp", "reverse"))

    def _transposed_vjp(self, *flat: Any) -> list[Any]:
        n = len(self.arrays) + len(self.leaves)
        at = _zeros(self.out_dots, flat)
        return jax.vjp(lambda bars: self._vjp()(*flat[:n], *bars), at)[1](list(flat[n:]))[0]

    def _transposed_jvp(self, residuals: Sequence[Any], bars: Sequence[Any]) -> list[Any]:
        if self.on_host:
            raise TypeError(_missing(self.owner.name, "vjp", "reverse", "jvp", "forward"))
        if self.owner in _deriving.get():
            message = (
                f"node {self.owner.name!r}: its `jvp` calls the node itself, and the transpose of that call is not "
                "known. Give `vjp=` too."
            )
            raise TypeError(message)
        at = _zeros(self.bars, residuals)
        token = _deriving.set((*_deriving.get(), self.owner))
        try:
            return jax.vjp(lambda dots: self._jvp()(*residuals, *dots), at)[1](list(bars))[0]
        finally:
            _deriving.reset(token)


def _applied(
    rule: Call, outputs: Sequence[Aval], transpose: Any, residuals: Sequence[Any], linear: Sequence[Any], name: str
) -> list[Any]:
    if not any(isinstance(x, Tracer) for x in (*residuals, *linear)):
        return rule(*residuals, *linear)  # on numbers, without compiling
    return linear_node(
        lambda r, x: bind(rule, outputs, *r, *x), transpose, list(residuals), list(linear), name, on_host=True
    )


def _zeros(avals: Sequence[Aval], like: Sequence[Any]) -> list[Any]:
    axes = varying_axes(list(like))
    return [vary(jnp.zeros(a.shape, a.dtype), axes) for a in avals]


def _aval(x: Any) -> Aval:
    return Aval(x.shape, x.dtype)


def _declared(x: Any) -> Aval:
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return Aval(np.shape(x), jax.dtypes.canonicalize_dtype(dtype))


def _refuse_hidden(name: str, functions: Sequence[Any]) -> None:
    """Refuse a traced array that a function hides: its derivative would be lost, and no error would tell."""
    hidden = hidden_tracers(functions)
    if hidden:
        message = (
            f"node {name!r}: one of its functions closes over a traced array. Expected concrete arrays, got "
            f"{hidden[0]}. Pass it as an argument of the node."
        )
        raise TypeError(message)


def _missing(name: str, rule: str = "", mode: str = "", other: str = "", other_mode: str = "") -> str:
    if not rule:
        return (
            f"node {name!r}: a derivative was asked for, and the node has no rules. Give `jvp=` for forward mode and "
            "`vjp=` for reverse mode."
        )
    return (
        f"node {name!r}: {mode} mode needs `{rule}`, and only `{other}` was given. On the host one does not give the "
        f"other: give `{rule}=` too, or use {other_mode} mode."
    )
