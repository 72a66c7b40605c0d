"""Calls of a node's functions: how often, on which arrays, where exceptions go, and what may not be hidden in them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tapeless.adjoint._external import node

X = jnp.array([0.3, -0.7, 1.9])
LIKE = {"like": lambda x, *_: x}


def sine(**options: Any) -> Any:
    rules = {
        "jvp": lambda args, out, dots: np.cos(args[0]) * dots[0],
        "vjp": lambda args, out, bar: (np.cos(args[0]) * bar,),
    }
    return node("sine", np.sin, **({**rules, **LIKE} | options))


def scalar(f: Any) -> Any:
    return lambda x: jnp.sum(jnp.sin(f(x)) * f(x))


def jvp(f: Any) -> Any:
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]


def test_exceptions_come_out() -> None:
    """Assert that the user's exception is raised from eager calls and derivatives, and told by compiled ones."""

    class Singular(Exception):
        pass

    def fail(*_: Any) -> Any:
        raise Singular("the matrix has no inverse")

    f = node("mine", fail, vjp=lambda *_: (X,), like=lambda x: x)
    g = sine(vjp=fail)
    for run in (f, jax.grad(scalar(f)), jax.grad(scalar(g)), lambda x: jax.vmap(f)(x[None])):
        with pytest.raises(Singular, match="no inverse") as caught:
            run(X)
        assert any("host function of node" in note for note in caught.value.__notes__)
    for run in (f, jax.grad(scalar(g))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Singular: the matrix has no inverse"):
            jax.block_until_ready(jax.jit(run)(X))


def test_a_hidden_traced_array_is_refused() -> None:
    """Assert that a rule which closes over a traced array says so, instead of losing its derivative."""

    def hidden(scale: Any) -> Any:
        f = node("hidden", jnp.sin, jvp=lambda args, out, dots: scale * jnp.cos(args[0]) * dots[0], host=False)
        return jnp.sum(jax.grad(scalar(f))(X))

    for run in (jax.grad(hidden), jax.jit(hidden)):
        with pytest.raises(TypeError, match=r"closes over a traced array.*argument of the node"):
            run(2.0)


class Scaled:
    """A callable that holds its factor."""

    def __init__(self, factor: Any) -> None:
        self.factor, self.odd = factor, {1: "keys", "of no": "order"}

    def __call__(self, x: Any) -> Any:
        return self.factor * x


def test_a_hidden_traced_array_is_found_wherever_it_is() -> None:
    """Assert that a host function's hidden array gives no derivative of zero: compiled, its call would be dropped."""
    makes = {
        "cell": lambda a: lambda x: a * x,
        "helper": lambda a: (lambda helper: lambda x: helper(x))(lambda x: a * x),
        "list": lambda a: (lambda held: lambda x: held[0] * x)([a]),
        "default": lambda a: lambda x, a=a: a * x,
        "partial": lambda a: partial(np.multiply, a),
        "jit": lambda a: jax.jit(lambda x: a * x),
        "object": Scaled,
        "method": lambda a: Scaled(a).__call__,
    }
    for make in makes.values():

        def total(a: Any, make: Any = make) -> Any:
            return jnp.sum(node("hidden", make(a), vjp=lambda args, out, bar: (bar,), **LIKE)(X))

        assert max_error(total(2.0), jnp.sum(2 * X)) < 1e-15
        with pytest.raises(TypeError, match=r"node 'hidden'.*closes over a traced array"):
            jax.jit(jax.grad(total))(2.0)
    by_argument = node("apply", lambda x, f: f(x), vjp=lambda args, out, bar: (bar, None), **LIKE)
    with pytest.raises(TypeError, match="closes over a traced array"):
        jax.jit(jax.grad(lambda a: jnp.sum(by_argument(X, lambda x: a * x))))(2.0)


def test_a_name_that_is_bound_later_is_no_traced_array() -> None:
    """Assert that a function with an empty cell is taken."""

    def rule(args: Any, out: Any, dots: Any) -> Any:
        return dots[0] if args else later(args)

    assert float(jax.grad(node("identity", jnp.positive, jvp=rule, host=False))(2.0)) == 1

    def later(args: Any) -> Any:
        return args


def test_arrays_sharded_over_devices() -> None:
    """Assert values and gradients of sharded arrays under jit, where the results' sharding is said."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    over_i = NamedSharding(mesh, PartitionSpec("i"))
    x = jax.device_put(jnp.linspace(-1, 2, 4), over_i)
    value = jax.jit(sine(), out_shardings=over_i)(x)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(sine()(x) ** 2)), out_shardings=over_i)(x)
    assert value.sharding == slope.sharding == over_i
    assert max_error((value, slope), (jnp.sin(x), jnp.sin(2 * x))) < 1e-15


def test_counts_of_calls() -> None:
    """Assert one call of `forward` and one of a rule for each lane of a derivative, eager and compiled."""
    calls = {"forward": 0, "jvp": 0, "vjp": 0}

    def counted(role: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[role] += 1
            return function(*args)

        return call

    plain = sine()
    f = node("sine", counted("forward", np.sin), jvp=counted("jvp", plain.jvp), vjp=counted("vjp", plain.vjp), **LIKE)
    lanes = jnp.stack([X, 2 * X])
    for transform, expected in (
        (lambda f: f, (1, 0, 0)),
        (jax.grad, (1, 0, 1)),
        (jvp, (1, 1, 0)),
        (jax.jacfwd, (1, 3, 0)),
    ):
        run = transform(lambda x: jnp.sum(f(x)))
        for go, at, count in ((run, X, 1), (jax.jit(run), X, 1), (jax.jit(jax.vmap(run)), lanes, 2)):
            calls.update(dict.fromkeys(calls, 0))
            jax.block_until_ready(go(at))
            assert tuple(calls.values()) == tuple(count * n for n in expected)


def test_batched_functions_are_called_once() -> None:
    """Assert that `batched=True` hands all lanes over in one call, unbatched arguments among them."""
    shapes = []

    def forward(x: Any, y: Any) -> Any:
        assert x.flags.c_contiguous
        assert y.flags.c_contiguous
        shapes.append((x.shape, y.shape))
        return x * np.sum(y, -1, keepdims=True)

    def cotangent(args: Any, out: Any, bar: Any) -> Any:
        x, y = args
        return bar * np.sum(y, -1, keepdims=True), np.sum(bar * x, -1, keepdims=True) * np.ones_like(y)

    f = node("outer", forward, vjp=cotangent, like=lambda x, y: x, batched=True)
    xs, y = jnp.stack([X, 2 * X]), X[:2]
    gradient = jax.jit(jax.vmap(jax.grad(lambda x, y: jnp.sum(f(x, y) ** 2), (0, 1)), (0, None)))
    expected = jax.vmap(jax.grad(lambda x, y: jnp.sum((x * jnp.sum(y)) ** 2), (0, 1)), (0, None))
    assert max_error(gradient(xs, y), expected(xs, y)) < 1e-15
    assert shapes == [((2, 3), (2, 2))]
    twice = jax.vmap(jax.vmap(f, (0, None)), (None, 0))(xs, jnp.stack([y, 3 * y, -y]))
    assert max_error(twice, xs * jnp.sum(y) * jnp.array([1, 3, -1])[:, None, None]) < 1e-15
    assert shapes[1:] == [((3, 2, 3), (3, 2, 2))]


def test_arrays_belong_to_the_function() -> None:
    """Assert that a function may write into its arguments and return the same workspace at each call."""
    buffer = np.zeros(16)
    offset = -buffer.ctypes.data % 64 // 8  # JAX keeps NumPy's memory without a copy if it is so aligned
    workspace = buffer[offset : offset + 3]

    def forward(x: Any) -> Any:
        workspace[:] = np.sin(x)
        x.fill(7.0)
        return workspace

    f = node("library", forward, like=lambda x: x)
    lanes = jnp.stack([X, 2 * X])
    first = f(X)
    second, compiled = f(2 * X), jax.jit(lambda x: f(x) + x)(X)
    assert max_error((first, second), (jnp.sin(X), jnp.sin(2 * X))) == 0
    assert max_error(compiled, jnp.sin(X) + X) == 0
    assert max_error(jax.vmap(f)(lanes), jnp.sin(lanes)) == 0
    assert max_error(lanes[0], X) == 0
