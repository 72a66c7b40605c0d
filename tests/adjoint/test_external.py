"""A user's own function as a node: every mode beside plain JAX, every missing or wrong rule told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from helpers import equations, max_error
from jax.sharding import AxisType, PartitionSpec
from tapeless import checkpointing, solvers
from tapeless.adjoint._external import node

X = jnp.array([0.3, -0.7, 1.9])
LIKE = {"like": lambda x, *_: x}


def sine(**options: Any) -> Any:
    rules = {
        "jvp": lambda args, out, dots: np.cos(args[0]) * dots[0],
        "vjp": lambda args, out, bar: (np.cos(args[0]) * bar,),
    }
    return node("sine", np.sin, **({**rules, **LIKE} | options))


def sine_jax(host: Any, rule: str) -> Any:
    """With one rule, a JAX function, that calls another node."""
    cosine = node(
        "cosine", np.cos, host="forward", vjp=lambda args, out, bar: (-jnp.sin(args[0]) * bar,), like=lambda x: x
    )
    rules = {
        "jvp": lambda args, out, dots: cosine(args[0]) * dots[0],
        "vjp": lambda args, out, bar: (cosine(args[0]) * bar,),
    }
    forward, like = (np.sin, LIKE) if host else (jnp.sin, {})
    return node("sine", forward, host=host, **{rule: rules[rule]}, **like)


def scalar(f: Any) -> Any:
    return lambda x: jnp.sum(jnp.sin(f(x)) * f(x))


def scanned(scan: Any, f: Any) -> Any:
    return scalar(lambda x: scan(lambda u, _: (1.2 * f(u), None), x, None, length=4)[0])


def checkpointed(f: Any, u: Any, xs: Any, length: int) -> Any:
    return checkpointing.scan(f, u, xs, length=length, checkpoint=2)


def jvp(f: Any) -> Any:
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]


FIRST = {"value": lambda f: f, "grad": jax.grad, "jvp": jvp, "jacfwd": jax.jacfwd}
SECOND = {
    "forward over reverse": lambda f: jvp(jax.grad(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "reverse over forward": lambda f: jax.grad(jvp(f)),
    "forward over forward": lambda f: jvp(jvp(f)),
}


@pytest.mark.parametrize("mode", FIRST)
def test_host_rules_in_first_order(mode: str) -> None:
    """Assert values and first derivatives equal to JAX's, eager, compiled, per lane, define-by-run and in float32."""
    f, g = FIRST[mode](scalar(sine())), jax.jit(FIRST[mode](scalar(jnp.sin)))
    expected = g(X)
    assert max_error(f(X), expected) < 1e-15
    assert max_error(jax.jit(f)(X), expected) < 1e-15
    with jax.disable_jit():
        assert max_error(f(X), expected) < 1e-15
    lanes = jnp.stack([X, 2 * X])
    for mapped in (jax.vmap(f), jax.jit(jax.vmap(f))):
        assert max_error(mapped(lanes), jnp.stack(list(map(g, lanes)))) < 1e-15
    single = f(X.astype(jnp.float32))
    assert single.dtype == jnp.float32
    assert max_error(single, g(X.astype(jnp.float32))) < 1e-6


@pytest.mark.parametrize("mode", SECOND)
@pytest.mark.parametrize(("host", "rule"), [("forward", "vjp"), ("forward", "jvp"), (False, "jvp"), (False, "vjp")])
def test_one_jax_rule_gives_every_order(host: Any, rule: str, mode: str) -> None:
    """Assert second derivatives in every order of modes from one rule that calls a node, and third for one of them."""
    f, expected = scalar(sine_jax(host, rule)), jax.jit(SECOND[mode](scalar(jnp.sin)))(X)
    assert max_error(SECOND[mode](f)(X), expected) < 1e-14
    assert max_error(jax.jit(SECOND[mode](f))(X), expected) < 1e-14
    if mode == "forward over reverse" and rule == "vjp" and host:
        third, expected = (jax.jit(jax.jacrev(SECOND[mode](h)))(X) for h in (f, scalar(jnp.sin)))
        assert max_error(third, expected) < 1e-14


@pytest.mark.parametrize("mode", SECOND)
def test_second_order_of_host_rules_is_an_error(mode: str) -> None:
    """Assert that no derivative of a rule on the host is taken for zero, eager, compiled, per lane or in a loop."""
    f = SECOND[mode](scalar(sine()))
    looped = SECOND[mode](scanned(jax.lax.scan, sine()))
    for run in (f, jax.jit(f), lambda x: jax.vmap(f)(x[None]), looped):
        with pytest.raises(TypeError, match=r'second derivative.*host="forward"'):
            run(X)


@pytest.mark.parametrize(
    ("rules", "mode", "says"),
    [
        ({"jvp": None}, jax.jacfwd, "forward mode needs `jvp`, and only `vjp`"),
        ({"vjp": None}, jax.grad, "reverse mode needs `vjp`, and only `jvp`"),
        ({"jvp": None, "vjp": None}, jax.grad, "no rules.*`jvp=`.*`vjp=`"),
        ({"jvp": None, "vjp": None}, jax.jacfwd, "no rules.*`jvp=`.*`vjp=`"),
    ],
)
def test_a_missing_rule_is_named(rules: Any, mode: Any, says: str) -> None:
    """Assert that a derivative without its rule says what to give, and that the other mode works."""
    f = sine(**rules)
    for run in (mode(scalar(f)), jax.jit(mode(scalar(f))), lambda x: jax.vmap(mode(scalar(f)))(x[None])):
        with pytest.raises(TypeError, match=says):
            run(X)
    assert max_error(f(X), jnp.sin(X)) == 0
    if len(rules) == 1:
        other = jax.grad if "jvp" in rules else jax.jacfwd
        assert max_error(jax.jit(other(scalar(f)))(X), other(scalar(jnp.sin))(X)) < 1e-15


def windows(rows: Any, before: int, after: int) -> Any:
    padded = jnp.pad(rows, ((0, 0), (before, after)))
    return jnp.stack([row[k : k + rows.shape[1]] for k, row in enumerate(padded)])


def banded_pullback(args: Any, x: Any, x_bar: Any) -> Any:
    (lower, upper), ab, _ = args
    w = banded((upper, lower), windows(ab[::-1], lower, upper), x_bar)
    return None, -x * windows(jnp.tile(w, (len(ab), 1)), upper, lower), w


banded = node("banded", scipy.linalg.solve_banded, vjp=banded_pullback, host="forward", like=lambda lu, ab, b: b)
LU = (1, 2)
AB = np.random.default_rng(0).standard_normal((4, 5)) + np.array([0, 0, 5, 0])[:, None]
B = np.random.default_rng(1).standard_normal(5)


def by_banded(ab: Any, b: Any) -> Any:
    return jnp.sum(jnp.sin(banded(LU, ab, b)))


def by_dense(ab: Any, b: Any) -> Any:
    i, j = np.indices((5, 5))
    band = (i - j <= LU[0]) & (j - i <= LU[1])
    return jnp.sum(jnp.sin(jnp.linalg.solve(jnp.where(band, ab[np.where(band, LU[1] + i - j, 0), j], 0.0), b)))


@pytest.mark.parametrize("mode", ["grad", "jacfwd", "hessian", "jacrev of grad"])
def test_solve_banded(mode: str) -> None:
    """Assert that SciPy's banded solve has first and second derivatives in bands and right-hand side to rounding."""
    transform = {
        "grad": lambda f: jax.grad(f, (0, 1)),
        "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
        "hessian": lambda f: jax.hessian(f, (0, 1)),
        "jacrev of grad": lambda f: jax.jacrev(jax.grad(f, (0, 1)), (0, 1)),
    }[mode]
    got, expected = jax.jit(transform(by_banded))(AB, B), jax.jit(transform(by_dense))(AB, B)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected)) > 0.03
    assert max_error(got, expected) < 1e-15
    if mode == "grad":
        assert banded.check(LU, AB, B).passed


def test_inside_other_nodes() -> None:
    """Assert derivatives through loops, checkpointed loops, `jax.checkpoint` and a root that call a node."""

    def root(f: Any) -> Any:
        return lambda p: jnp.sum(solvers.root_find(lambda u, p: u + 0.5 * f(u) - p, X, p).value ** 2)

    def derivatives(f: Any, g: Any, scan: Any) -> Any:
        first = [scanned(jax.lax.scan, f), scanned(scan, f), jax.checkpoint(scalar(f)), root(f)]
        second = [scanned(scan, g), root(g)]
        return jax.jit(lambda x: ([jax.grad(h)(x) for h in first], [jvp(jax.grad(h))(x) for h in second]))

    got = derivatives(sine(), sine_jax("forward", "vjp"), checkpointed)(X)
    assert max_error(got, derivatives(jnp.sin, jnp.sin, jax.lax.scan)(X)) < 1e-13


def test_inside_shard_map() -> None:
    """Assert the gradient and the second derivative in a parameter that all devices share."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (PartitionSpec(), PartitionSpec("i")), "out_specs": PartitionSpec()}

    def cotangent(args: Any, out: Any, bar: Any) -> Any:
        p, x = args
        slope = jnp.cos(p * x) * bar
        return jnp.sum(x * slope), p * slope

    f = node("wave", lambda p, x: np.sin(p * x), vjp=cotangent, host="forward", like=lambda p, x: x)

    def total(f: Any) -> Any:
        return lambda p: jax.shard_map(lambda p, x: jax.lax.psum(jnp.sum(f(p, x) ** 2), "i"), **specs)(p, X[:2])

    for transform in (jax.grad, lambda f: jvp(jax.grad(f))):
        got, expected = (jax.jit(transform(total(g)))(0.8) for g in (f, lambda p, x: jnp.sin(p * x)))
        assert max_error(got, expected) < 1e-15


def test_all_kinds_of_leaves() -> None:
    """Assert that integers, flags, strings and None pass through, in arguments and results, without a derivative."""
    seen = []

    def forward(d: Any, n: Any, flag: Any, label: Any, nothing: Any) -> Any:
        seen.append((n, flag, label, nothing, d["k"].dtype))
        return {"y": d["a"] * d["k"] * n, "count": d["k"] + 1}

    def tangent(args: Any, out: Any, dots: Any) -> Any:
        assert dots[0]["k"] is dots[1] is dots[2] is dots[3] is dots[4] is None
        return {"y": dots[0]["a"] * args[0]["k"] * args[1], "count": None}

    def cotangent(args: Any, out: Any, bar: Any) -> Any:
        assert bar["count"] is None
        return {"a": bar["y"] * args[0]["k"] * args[1], "k": None}, None, None, None, None

    f = node("leaves", forward, jvp=tangent, vjp=cotangent, like=lambda d, *_: {"y": d["a"], "count": d["k"]})
    k = jnp.array([2, 3, 5], jnp.int32)

    def run(a: Any) -> Any:
        return f({"a": a, "k": k}, 3, True, "label", None)

    out, dot = jax.jvp(run, (X,), (X,))
    assert set(seen) == {(3, True, "label", None, np.dtype("int32"))}
    assert max_error((out["y"], dot["y"]), (3 * k * X, 3 * k * X)) < 1e-15
    assert out["count"].dtype == jnp.int32
    assert max_error(jax.jit(jax.grad(lambda a: jnp.sum(run(a)["y"])))(X), 3.0 * k) == 0
    assert f.check({"a": X, "k": k}, 3, True, "label", None).passed


def test_complex_convention() -> None:
    """Assert JAX's convention: cotangents are transposed, not conjugated, also where a function is not holomorphic."""
    z = jnp.array([1 + 0.5j, 0.3 - 2j])
    square = node("square", lambda z: 1j * z * z, vjp=lambda args, out, bar: (2j * args[0] * bar,), **LIKE)
    modulus = node(
        "modulus",
        lambda z: np.abs(z) ** 2,
        jvp=lambda args, out, dots: 2 * (np.conj(args[0]) * dots[0]).real,
        vjp=lambda args, out, bar: (2 * np.conj(args[0]) * bar,),
        like=lambda z: z.real,
    )
    got = jax.grad(lambda z: jnp.sum(modulus(square(z)) ** 2))(z)
    assert max_error(got, jax.grad(lambda z: jnp.sum(jnp.abs(1j * z * z) ** 4))(z)) < 1e-14
    assert square.check(z).passed
    assert modulus.check(z).passed


@pytest.mark.parametrize(
    ("forward", "like", "says"),
    [
        (lambda x: x[:2], None, r"expected float64\[3\], got float64\[2\].*`like`"),
        (lambda x: 1j * x, None, r"expected float64\[3\], got complex128\[3\]"),
        (lambda x: None, None, r"expected float64\[3\], got NoneType"),
        (lambda x: x, lambda x: jnp.zeros(3, int), r"expected int64\[3\], got float64\[3\]"),
        (lambda x: (x, x), lambda x: {"a": x}, r"expected the structure .*'a'.*, got .*\(\*, \*\)"),
        (
            lambda x: {"a": x, "b": 1.0},
            lambda x: {"a": x, "b": x},
            r"at \['b'\]: expected float64\[3\], got float64\[\]",
        ),
    ],
)
def test_the_declaration_is_checked(forward: Any, like: Any, says: str) -> None:
    """Assert one error with expected, got and next step, eager and compiled."""
    f = node("mine", forward, like=like or (lambda x: x))
    with pytest.raises(ValueError, match=says):
        f(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(jax.jit(f)(X))


def test_results_may_be_anything_array_like() -> None:
    """Assert that lists and higher precisions are taken, and that a declaration may be a plain tree."""
    f = node("lists", lambda x: {"a": [1, 2.5], "b": 3}, like={"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": 0.0})
    for out in (f(X), jax.jit(f)(X)):
        assert out["a"].dtype == jnp.float32
        assert max_error(out, {"a": jnp.array([1, 2.5]), "b": jnp.array(3.0)}) == 0


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda args, out, bar: bar, "expected a tuple of 1"),
        (lambda args, out, bar: (bar, bar), "expected a tuple of 1.*got a tuple of 2"),
        (lambda args, out, bar: (bar[:1],), r"at \[0\]: expected float64\[3\], got float64\[1\]"),
        (lambda args, out, bar: (1j * bar,), r"expected float64\[3\], got complex128\[3\].*real for a real one"),
    ],
)
def test_what_rules_return_is_checked(rule: Any, says: str, host: bool) -> None:
    """Assert that a cotangent unlike its argument is an error."""
    f = node("mine", np.sin, vjp=rule, **LIKE) if host else node("mine", jnp.sin, vjp=rule, host=False)
    with pytest.raises(ValueError, match=says):
        jax.grad(scalar(f))(X)


def test_a_jvp_that_needs_its_own_transpose() -> None:
    """Assert that forward mode of a solve by its `jvp` works to second order, and reverse mode asks for `vjp`."""
    A = jnp.array([[2.0, 0.3], [-0.4, 1.5]])

    def solve_dot(args: Any, x: Any, dots: Any) -> Any:
        return solve(args[0], dots[1] - dots[0] @ x)

    solve = node("solve", np.linalg.solve, jvp=solve_dot, host="forward", like=lambda A, b: b)
    got, expected = (jvp(jvp(lambda A, f=f: f(A, X[:2])))(A) for f in (solve, jnp.linalg.solve))
    assert max_error(got, expected) < 1e-14
    for run in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(TypeError, match=r"calls the node itself.*`vjp=`"):
            run(lambda A: jnp.sum(solve(A, X[:2])))(A)


def test_a_derivative_is_one_named_equation() -> None:
    """Assert that the jaxpr of a gradient holds one linear node with the node's name."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(sine()(x))))(X)
    assert [e.params["name"] for e in equations(jaxpr) if e.primitive.name == "linear_node"] == ["sineᵀ"]


def test_misuse_is_told() -> None:
    """Assert one clear error for each wrong way to make or check a node."""
    for options, error, says in (
        ({"like": None}, ValueError, "`like` says what a function on the host returns"),
        ({"host": False}, ValueError, "with `host=True` or"),
        ({"host": "device"}, ValueError, '`host` must be True, False or "forward"'),
        ({"jvp": 3}, TypeError, "`jvp` must be a function, got 3"),
    ):
        with pytest.raises(error, match=says):
            sine(**options)
    with pytest.raises(TypeError, match="no rules"):
        sine(jvp=None, vjp=None).check(X)
    with pytest.raises(ValueError, match=r"pass 2\.0 for 2"):
        sine().check(2)
