"""`checkpointing.while_loop` against `jax.lax`: results, errors, derivatives of every kind, counts, lanes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, equations, max_error
from jax import lax
from tapeless import checkpointing
from tapeless.checkpointing import binomial, online

MATRIX = jnp.array([[0.5, 0.3], [-0.2, 0.7]])
STATE = jnp.array([0.3, 0.4])
LIMIT = 1.1


def cond(carry: Any) -> Any:
    return carry["u"][0] < LIMIT


def body(matrix: Any) -> Any:
    """A step with an integer and a growing step size."""

    def step(carry: Any) -> Any:
        u = carry["u"] + 0.05 * carry["h"] * (jnp.sin(matrix @ carry["u"]) + 0.3)
        return {"u": u, "h": 1.01 * carry["h"], "i": carry["i"] + 1}

    return step


def start(u: Any) -> Any:
    return {"u": u, "h": 1.0, "i": 0}


def final(matrix: Any, u: Any, checkpoint: Any = None) -> Any:
    end = checkpointing.while_loop(cond, body(matrix), start(u), checkpoint=checkpoint)
    return jnp.sum(jnp.cos(end["u"])) * end["h"] + end["i"]


def steps(u: Any = STATE) -> int:
    return int(lax.while_loop(cond, body(MATRIX), start(u))["i"])


STEPS = steps()


def reference(matrix: Any, u: Any) -> Any:
    """The same with JAX's own scan over the number of steps."""
    end = lax.scan(lambda c, _: (body(matrix)(c), None), start(u), length=STEPS)[0]
    return jnp.sum(jnp.cos(end["u"])) * end["h"] + end["i"]


SCHEDULES = [None, 1, 2, 3, 5, 64, online(1, leaf=3), online(4, leaf=3), online(3, leaf=100)]


@pytest.mark.parametrize("checkpoint", SCHEDULES, ids=repr)
def test_value_and_gradient(checkpoint: Any) -> None:
    """Assert JAX's values, and the gradient of the scan with as many steps."""
    got = jax.jit(jax.value_and_grad(lambda *a: final(*a, checkpoint), (0, 1)))(MATRIX, STATE)
    expected = jax.jit(jax.value_and_grad(reference, (0, 1)))(MATRIX, STATE)
    assert 10 < STEPS < 40
    assert max_error(got, expected) < 1e-14


def test_random_keys_and_integers_are_carried() -> None:
    """Assert the gradient of a loop that draws random numbers, with a key and a count in its state."""

    def step(c: Any) -> Any:
        key, mine = jax.random.split(c[2])
        return c[0] + 1, jnp.sin(c[1]) * (1.1 + 0.1 * jax.random.normal(mine)), key

    def run(x: Any, loop: Any) -> Any:
        return loop(lambda c: c[0] < 5, step, (0, x, jax.random.key(3)))[1]

    def scan(_: Any, step: Any, init: Any) -> Any:
        return lax.scan(lambda c, _: (step(c), None), init, length=5)[0]

    got = jax.jit(jax.grad(lambda x: run(x, lambda *a: checkpointing.while_loop(*a, checkpoint=online(2, leaf=2)))))(
        0.7
    )
    assert max_error(got, jax.jit(jax.grad(lambda x: run(x, scan)))(0.7)) < 1e-15


SECOND = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f, 1), 1),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, 1), 0),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f, 0), 1),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, 1), 1),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("checkpoint", [pytest.param(2, marks=pytest.mark.slow), online(3, leaf=4)], ids=repr)
def test_second_derivatives(name: str, checkpoint: Any) -> None:
    """Assert all four second derivatives."""
    transform = SECOND[name]
    got = jax.jit(transform(lambda m, u: final(m, u, checkpoint)))(MATRIX, STATE)
    assert max_error(got, jax.jit(transform(reference))(MATRIX, STATE)) < 1e-13


LANES = jnp.stack([STATE, 1.5 * STATE, jnp.array([1.6, 0.2]), 0.8 * STATE])  # the third does no step at all


@pytest.mark.parametrize(
    "order", ["vmap(grad)", "grad(vmap)", "vmap(vmap(grad))", pytest.param("vmap(hessian)", marks=pytest.mark.slow)]
)
def test_lanes_of_different_lengths(order: str) -> None:
    """Assert each lane's own derivative, in every order."""
    f = lambda m, u: final(m, u, 3)
    matrices = MATRIX * jnp.array([1.0, 1.1, 0.9, 1.05])[:, None, None]
    assert len({steps(u) for u in LANES}) == 4
    if order == "vmap(hessian)":
        one = jax.jit(jax.hessian(f, 1))
        got = jax.jit(jax.vmap(jax.hessian(f, 1), (None, 0)))(MATRIX, LANES)
        expected = jnp.stack([one(MATRIX, u) for u in LANES])
    elif order == "vmap(vmap(grad))":
        got = jax.jit(jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None)))(matrices, LANES)
        one = jax.jit(jax.grad(f))
        expected = jnp.stack([jnp.stack([one(m, u) for u in LANES]) for m in matrices])
    else:
        one = jax.jit(jax.grad(f, (0, 1)))
        expected = jax.tree.map(lambda *x: jnp.stack(x), *(one(m, u) for m, u in zip(matrices, LANES, strict=True)))
        batched = jax.vmap(jax.grad(f, (0, 1))) if order == "vmap(grad)" else None
        summed = jax.grad(lambda m, u: jnp.sum(jax.vmap(f)(m, u)), (0, 1))
        got = jax.jit(batched or summed)(matrices, LANES)
    assert max_error(got, expected) < 1e-13


def test_lanes_share_one_schedule() -> None:
    """Assert that no select in a batched gradient has the shape of the snapshots."""
    lanes, slots, size = 5, 16, 7

    def run(u: Any, rate: Any) -> Any:
        step = lambda c: (c[0] + 0.1 * jnp.sin(rate * c[0]), c[1] + 1)
        return jnp.sum(checkpointing.while_loop(lambda c: c[0][0] < 1.0, step, (u, 0), checkpoint=slots)[0])

    us = jnp.linspace(0.2, 0.6, lanes)[:, None] * jnp.linspace(1.0, 0.7, size)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(run), (0, None)))(us, 0.9)
    selects = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "select_n"]
    assert selects
    assert all(slots not in v.aval.shape for eqn in selects for v in eqn.outvars if v.aval.ndim > 1)


def test_equal_lengths_need_no_lanes() -> None:
    """Assert that a predicate that no batched value reaches keeps one count, and so no select of states."""

    def run(u: Any) -> Any:
        step = lambda c: (jnp.sin(c[0]) + 0.3, c[1] + 1)
        return jnp.sum(checkpointing.while_loop(lambda c: c[1] < 9, step, (u, 0), checkpoint=3)[0])

    us = jnp.linspace(0.2, 0.6, 12).reshape(4, 3)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(run)))(us)
    assert not [e for e in equations(jaxpr) if e.primitive.name == "select_n" and e.outvars[0].aval.shape == (4, 3)]
    assert max_error(jax.vmap(jax.grad(run))(us), jnp.stack([jax.grad(run)(u) for u in us])) < 1e-15


@pytest.mark.parametrize(("n", "s"), [(1, 1), (2, 1), (9, 1), (6, 2), (10, 3), (11, 3), (57, 5), (200, 16), (500, 8)])
def test_evaluations(n: int, s: int) -> None:
    """Assert as many evaluations as the online schedule says, traced once, at most 1.31 times the optimum."""
    counter = Counter()

    def step(carry: Any) -> Any:
        counter.tick()
        return carry[0] + 1, 0.99 * carry[1] + jnp.sin(carry[1])

    f = jax.jit(jax.grad(lambda u: checkpointing.while_loop(lambda c: c[0] < n, step, (0, u), checkpoint=s)[1]))
    jax.block_until_ready(f(0.5))
    assert counter.traces == 1
    counted = counter.settle()
    assert counted == n + online(s, n=n).advances + 1
    assert online(s, n=n).advances + n <= 1.31 * (binomial(n, s).advances + n)


CALLS = {
    "no steps": lambda loop: loop(lambda c: c > 2.0, lambda c: c / 2, 1.5),
    "weak types": lambda loop: loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, np.float32(1.0))),
    "NumPy": lambda loop: loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + np.ones(2)), (np.int32(0), np.zeros(2))),
    "None": lambda loop: loop(lambda c: c["a"] < 3, lambda c: {"a": c["a"] + 1, "b": None}, {"a": 0, "b": None}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_lax(name: str) -> None:
    """Assert equal results, structures and dtypes."""
    got, expected = CALLS[name](checkpointing.while_loop), CALLS[name](lax.while_loop)
    assert max_error(got, expected) == 0
    assert [jax.typeof(x) for x in jax.tree.leaves(got)] == [jax.typeof(x) for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop(lambda c: c, lambda c: c, 1.0),
        lambda loop: loop(lambda c: c < 1, lambda c: (c, c), 1.0),
        lambda loop: loop(lambda c: c < 1, lambda c: jnp.stack([c, c]), 1.0),
        lambda loop: loop(lambda c: jnp.array([True, False]), lambda c: c, 1.0),
    ],
)
def test_errors_are_those_of_lax(call: Any) -> None:
    """Assert the same exception with the same text."""
    with pytest.raises((TypeError, ValueError)) as expected:
        call(lax.while_loop)
    with pytest.raises(expected.type) as got:
        call(checkpointing.while_loop)
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_misuse_of_checkpoint() -> None:
    """Assert expected, got and next step."""
    for wrong in (0, -1, True, 2.5, "five"):
        with pytest.raises(ValueError, match="number of snapshots of at least 1, a schedule"):
            checkpointing.while_loop(lambda c: c < 1, lambda c: c + 1, 0.0, checkpoint=wrong)  # pyright: ignore
    for wrong in (binomial(5, 2), checkpointing.store_all(), checkpointing.Budget("1 MB")):
        with pytest.raises(ValueError, match=r"number of steps is not known before the loop has ended\. Use online"):
            checkpointing.while_loop(lambda c: c < 1, lambda c: c + 1, 0.0, checkpoint=wrong)


def test_without_jit_the_loop_is_python() -> None:
    """Assert that under `jax.disable_jit` the body sees numbers, and the gradient is the same."""
    seen = []

    def run(x: Any) -> Any:
        def step(u: Any) -> Any:
            seen.append(float(lax.stop_gradient(u)))
            return (u + x / u) / 2

        return checkpointing.while_loop(lambda u: abs(u * u - x) > 1e-12, step, x, checkpoint=2)

    with jax.disable_jit():
        got = jax.grad(run)(2.0)
    assert len(seen) > 3
    assert float(got) == pytest.approx(0.5 / 2**0.5, rel=1e-12)


def test_a_run_without_gradient_keeps_nothing() -> None:
    """Assert that a plain run has no slots, and that those of a gradient do not grow with the steps taken."""

    def bytes_of(transform: Any) -> int:
        f = lambda u: jnp.sum(
            checkpointing.while_loop(lambda c: c[0] < 10**5, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, u), checkpoint=8)[
                1
            ]
        )
        return jax.jit(transform(f)).lower(jnp.ones(4096)).compile().memory_analysis().temp_size_in_bytes

    state = 4096 * 8
    assert bytes_of(lambda f: f) < 4 * state
    assert bytes_of(jax.grad) < (8 + 8) * state
