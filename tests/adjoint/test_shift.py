"""A periodic shift as one equation: found where it is, nowhere else, with the derivatives of plain JAX."""

import functools
import itertools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, max_error
from jax import lax
from tapeless import checkpointing
from tapeless.adjoint._shift import shift, shift_p, with_shifts

X = jax.random.normal(jax.random.key(0), (4, 5))
XS = jnp.linspace(0.3, 1.0, 6)
W = jnp.sin(jnp.arange(4.0))[:, None]  # weighs the rows


def shifts(jaxpr: Any) -> list[tuple[int, int]]:
    """Axis and distance of all shifts in a jaxpr."""
    found = (e.params for e in equations(jaxpr) if e.primitive is shift_p)
    return [(int(params["axis"]), params["by"]) for params in found]


def names(jaxpr: Any) -> list[str]:
    return [e.primitive.name for e in equations(jaxpr)]


def identical(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# What is found

ROLLS = {
    "forward": (lambda x: jnp.roll(x, 1, 0), [(0, 1)]),
    "backward": (lambda x: jnp.roll(x, -1, 1), [(1, 4)]),
    "last axis": (lambda x: jnp.roll(x, 2, -1), [(1, 2)]),
    "far": (lambda x: jnp.roll(x, 1003, 1), [(1, 3)]),
    "far back": (lambda x: jnp.roll(x, -1003, 0), [(0, 1)]),
    "two axes": (lambda x: jnp.roll(x, (1, -2), (0, 1)), [(0, 1), (1, 3)]),
    "one axis twice": (lambda x: jnp.roll(x, (1, 2), (1, 1)), [(1, 1), (1, 2)]),
    "flat": (lambda x: jnp.roll(x, 7), [(0, 7)]),
    "by hand": (lambda x: jnp.concatenate([x[3:], x[:3]]), [(0, 1)]),
    "a third axis": (lambda x: jnp.roll(x[:, None], 2, 2), [(2, 2)]),
    "integers": (lambda x: jnp.roll(jnp.int32(10 * x), 1, 0), [(0, 1)]),
    "flags": (lambda x: jnp.roll(x > 0, 3, 1), [(1, 3)]),
    "complex": (lambda x: jnp.roll(x * (1 + 2j), 3, 1), [(1, 3)]),
    "bfloat16": (lambda x: jnp.roll(x.astype(jnp.bfloat16), 3, 1), [(1, 3)]),
    "keys": (lambda x: jax.random.key_data(jnp.roll(jax.random.split(jax.random.key(1), 5), 2)), [(0, 2)]),
    "jit": (jax.jit(lambda x: jnp.roll(x, 1, 0)), [(0, 1)]),
    "scan": (lambda x: lax.scan(lambda x, _: (jnp.roll(x, 1, 0), None), x, length=3)[0], [(0, 1)]),
    "while": (lambda x: lax.while_loop(lambda x: x[0, 0] < 2, lambda x: jnp.roll(x, 1, 0) + 1, x), [(0, 1)]),
    "condition": (lambda x: lax.while_loop(lambda x: jnp.roll(x, 1, 0)[0, 0] < 2, lambda x: x + 1, x), [(0, 1)]),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: jnp.roll(x, 1, 0), lambda x: jnp.roll(x, 2, 1), x), None),
}


@pytest.mark.parametrize("name", ROLLS)
def test_a_roll_is_one_equation(name: str) -> None:
    """Assert axis and distance of each shift, no concatenation left, and the values bit for bit."""
    f, expected = ROLLS[name]
    jaxpr = jax.make_jaxpr(f)(X)
    exchanged = with_shifts(jaxpr)
    assert sorted(shifts(exchanged)) == ([(0, 1), (1, 2)] if expected is None else sorted(expected))
    assert "concatenate" in names(jaxpr)
    assert "concatenate" not in names(exchanged)
    assert shifts(jaxpr) == []  # the original stays as it was
    (got,) = jex.jaxpr_as_fun(exchanged)(X)
    assert identical(got, f(X))


@pytest.mark.parametrize("by", [0, 4, -8], ids=["nothing", "once around", "twice back"])
@pytest.mark.parametrize("rows", [1, 4])
def test_rolls_that_change_nothing(by: int, rows: int) -> None:
    """Assert value and gradient of shifts by multiples of the length, and of arrays of length one."""
    x = X[:rows]
    exchanged = jex.jaxpr_as_fun(with_shifts(jax.make_jaxpr(lambda x: jnp.roll(x, by, 0))(x)))
    assert identical(exchanged(x)[0], x)
    assert identical(jax.grad(lambda x: jnp.sum(exchanged(x)[0] * jnp.sin(x)))(x), jnp.sin(x) + x * jnp.cos(x))
    assert identical(shift(x, 0, by), x)


ALIKE = {
    "two arrays": lambda x, y: jnp.concatenate([x[3:], y[:3]]),
    "a slice and an array": lambda x, y: jnp.concatenate([x[3:], y]),
    "overlapping": lambda x, y: jnp.concatenate([x[2:], x[:3]]),
    "overlapping in as many rows": lambda x, y: jnp.concatenate([x[1:3], x[:2]]),
    "with a gap": lambda x, y: jnp.concatenate([x[3:], x[:2]]),
    "from another start": lambda x, y: jnp.concatenate([x[3:], x[1:]]),
    "same order": lambda x, y: jnp.concatenate([x[:1], x[1:]]),
    "halves in the same order": lambda x, y: jnp.concatenate([x[:2], x[2:]]),
    "part of another axis": lambda x, y: jnp.concatenate([x[3:, :4], x[:3, :4]]),
    "moved along another axis": lambda x, y: jnp.concatenate([x[3:, 1:], x[:3, :4]]),
    "joined along another axis": lambda x, y: jnp.concatenate([x[2:], x[:2]], 1),
    "strides": lambda x, y: jnp.concatenate([x[1::2], x[::2]]),
    "strides within the length": lambda x, y: jnp.concatenate([x[:, 3:], lax.slice(x, (0, 0), (4, 5), (1, 2))], 1),
    "three pieces": lambda x, y: jnp.concatenate([x[3:], x[:1], x[1:3]]),
    "one piece": lambda x, y: jnp.concatenate([x[2:]]),
    "reversed": lambda x, y: x[::-1],
    "a distance that is not known": lambda x, y: jnp.roll(x, jnp.int32(y[0, 0]), 0),
    "the ends of two copies": lambda x, y: jnp.concatenate([(x + 0)[3:], x[:3]]),
    "nothing alike": lambda x, y: x + y,
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_no_shift_is_left_alone(name: str) -> None:
    """Assert that the very same jaxpr comes back, from inside a loop, too."""
    jaxpr = jax.make_jaxpr(ALIKE[name])(X, X + 1)
    assert with_shifts(jaxpr) is jaxpr
    looped = jax.make_jaxpr(lambda x, y: lax.fori_loop(0, 3, lambda _, c: c + jnp.sum(ALIKE[name](x, y)), 0.0))(X, X)
    assert with_shifts(looped) is looped


# Derivatives


def step(u: Any, x: Any) -> Any:
    """A stencil on two axes, with an output."""
    lap = jnp.roll(u, 1, 0) + 2 * jnp.roll(u, -3, 1) - jnp.roll(u, (1, 7), (1, 0))
    return u + 0.1 * jnp.sin(lap) * x, jnp.sum(jnp.roll(u, 2, 1) ** 2 * W, 0)


def run(scan: Any, u: Any, xs: Any = XS) -> Any:
    return scan(step, u, xs)


def loss(scan: Any, u: Any, xs: Any = XS) -> Any:
    u, ys = run(scan, u, xs)
    return jnp.sum(u**3) + jnp.sum(ys * jnp.arange(1.0, u.shape[1] + 1))


OURS = functools.partial(checkpointing.scan, checkpoint=2)
LEAF = functools.partial(checkpointing.scan, checkpoint=checkpointing.binomial(6, 2, leaf=2))


def check(transform: Any, f: Any, *args: Any, scan: Any = OURS) -> None:
    """The same to rounding as with JAX's loop, whose rolls are slices."""
    got, expected = (jax.jit(transform(functools.partial(f, scan)))(*args) for scan in (scan, lax.scan))
    assert max_error(got, expected) < 1e-14


def test_values_are_those_of_lax_scan() -> None:
    """Assert equal bits."""
    got, expected = jax.jit(functools.partial(run, OURS))(X), jax.jit(functools.partial(run, lax.scan))(X)
    assert all(itertools.starmap(identical, zip(got, expected, strict=True)))


@pytest.mark.parametrize("scan", [OURS, LEAF], ids=["one by one", "by leaves"])
def test_gradient(scan: Any) -> None:
    """Assert the gradient with respect to state and inputs."""
    check(lambda f: jax.grad(f, (0, 1)), loss, X, XS, scan=scan)


def test_gradients_hold_shifts_only() -> None:
    """Assert that no gradient concatenates or pads, as JAX's own does; and that each roll is one equation a sweep."""
    for scan in (OURS, LEAF):
        jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, scan)))(X)
        assert not {"concatenate", "pad"} & set(names(jaxpr))
        assert {(0, 1), (0, 3), (1, 2), (1, 3), (1, 1), (1, 4)} <= set(shifts(jaxpr))
    assert {"concatenate", "pad"} <= set(names(jax.make_jaxpr(jax.grad(functools.partial(loss, lax.scan)))(X)))
    value = jax.make_jaxpr(functools.partial(run, OURS))(X)
    assert sorted(shifts(value)) == [(0, 1), (0, 3), (1, 1), (1, 2), (1, 2)]


def test_tangent() -> None:
    """Assert forward mode."""
    direction = jnp.cos(3 * X)
    check(lambda f: lambda x: jax.jvp(f, (x,), (direction,)), run, X)


def test_hessian() -> None:
    """Assert second derivatives, of a shift within a nonlinear step."""

    def f(scan: Any, u: Any) -> Any:
        return jnp.sum(scan(lambda u, x: (jnp.sin(jnp.roll(u, -2)) * x + u, None), u, XS)[0] ** 3)

    check(jax.hessian, f, X[0])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap(axis: int) -> None:
    """Assert values and gradients of lanes along any axis."""
    lanes = jnp.moveaxis(jnp.stack([X, 2 * X, X - 1]), 0, axis)
    check(lambda f: jax.vmap(jax.value_and_grad(f), axis, (0, axis)), loss, lanes)


@pytest.mark.parametrize("axes", [(0, 0), (1, 2), (2, 1), (2, 0)], ids=str)
def test_vmap_of_a_shift(axes: tuple[int, int]) -> None:
    """Assert one shift and its transpose whatever the place of the lanes, before and after; and of lanes of lanes."""
    lanes = jnp.moveaxis(jnp.stack([X, 2 * X, X - 1]), 0, axes[0])
    ours, plain = lambda x: shift(shift(x, 0, 1), 1, -2), lambda x: jnp.roll(x, (1, -2), (0, 1))
    got, expected = (jax.vmap(f, *axes)(lanes) for f in (ours, plain))
    assert identical(got, expected)
    weighted = [lambda x, f=f: jnp.sum(f(x) * jnp.sin(X)) for f in (ours, plain)]
    got, expected = (jax.vmap(jax.grad(f), *axes)(lanes) for f in weighted)
    assert identical(got, expected)
    twice = jnp.stack([lanes, 3 * lanes], 2)
    got, expected = (jax.vmap(jax.vmap(f, axes[0]), 2)(twice) for f in (ours, plain))
    assert identical(got, expected)


def test_transpose_is_the_opposite_shift() -> None:
    """Assert ⟨S u, v⟩ = ⟨u, Sᵀ v⟩ in integers, and that the transpose is one shift."""
    u, v = jnp.arange(20.0).reshape(4, 5) ** 2, jnp.arange(20.0).reshape(4, 5)[::-1] + 3
    S = lambda u: shift(u, 1, 2)
    S_T = lambda v: jax.linear_transpose(S, u)(v)[0]
    assert jnp.sum(S(u) * v) == jnp.sum(u * S_T(v))
    assert shifts(jax.make_jaxpr(S_T)(v)) == [(1, 3)]


INSIDE = {
    "jit": lambda u: jax.jit(lambda u: jnp.roll(u, 1, 0) * 1.1)(u),
    "inner scan": lambda u: lax.scan(lambda u, x: (jnp.roll(u, 1, 0) * x, None), u, jnp.array([1.1, 0.9]))[0],
    "inner checkpointed scan": lambda u: OURS(lambda u, x: (jnp.roll(u, 1, 0) * x, None), u, jnp.array([1.1, 0.9]))[0],
    "fori_loop": lambda u: lax.fori_loop(0, 2, lambda i, u: jnp.roll(u, 1, 0) * 1.1, u),
    "cond": lambda u: lax.cond(u[0, 0] > 0, lambda u: jnp.roll(u, 1, 0) * 1.1, lambda u: u * 0.9, u),
    "switch": lambda u: lax.switch(
        jnp.int32(5 * u[0, 0]), [lambda u: u, lambda u: jnp.roll(u, 1, 0), lambda u: jnp.roll(u, 1, 0) * 1.1], u
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_rolls_inside_other_equations(name: str) -> None:
    """Assert value and gradient of rolls in a step's own jit, loops and branches, with no concatenation left."""
    inside = INSIDE[name]

    def f(scan: Any, u: Any) -> Any:
        return jnp.sum(scan(lambda u, x: (jnp.sin(inside(u)) + x * u, None), u, XS)[0] ** 2)

    check(jax.value_and_grad, f, X)
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(f, OURS)))(X)
    assert {(0, 1), (0, 3)} <= set(shifts(jaxpr))
    assert "concatenate" not in names(jaxpr)


def test_rolls_in_loops_that_carry_no_derivative() -> None:
    """Assert a permutation of integers, rolled in a while loop of the step, that picks the entries of the state."""

    def f(scan: Any, u: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            u, order = carry
            order = lax.while_loop(
                lambda order: order[0] % 2 == 1, lambda order: jnp.roll(order, 1), jnp.roll(order, -1)
            )
            return (u[:, order] * x + u, order), jnp.roll(order, 2)

        (u, order), orders = scan(step, (u, jnp.array([2, 1, 3, 0, 4])), XS)
        return jnp.sum(u[:, 0] ** 2), (order, orders)

    check(lambda f: jax.value_and_grad(f, has_aux=True), f, X)


def test_a_while_loop_of_rolls() -> None:
    """Assert the gradient through `checkpointing.while_loop`, by shifts only, against the unrolled loop."""

    def f(u: Any) -> Any:
        end = checkpointing.while_loop(
            lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.sin(1.1 * c[1] + 0.3 * jnp.roll(c[1], -1, 1))), (0, u)
        )
        return jnp.sum(end[1] ** 3)

    def unrolled(u: Any) -> Any:
        for _ in range(4):
            u = jnp.sin(1.1 * u + 0.3 * jnp.roll(u, -1, 1))
        return jnp.sum(u**3)

    assert max_error(jax.jit(jax.grad(f))(X), jax.jit(jax.grad(unrolled))(X)) < 1e-14
    jaxpr = jax.make_jaxpr(jax.grad(f))(X)
    assert {(1, 4), (1, 1)} <= set(shifts(jaxpr))
    assert not {"concatenate", "pad"} & set(names(jaxpr))
