"""Loops under everything at once: transformations, nesting, devices, and every schedule with the same gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import Counter, max_error
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tapeless import checkpointing
from tapeless.checkpointing import Budget, binomial, online, store_all

N = 23
MATRIX = jnp.array([[0.5, -0.3, 0.1], [0.2, 0.4, -0.6], [0.7, 0.1, 0.3]])
STATE = jnp.array([0.3, -0.2, 0.5])
DATA = jnp.linspace(0.1, 0.8, N)


def loss(scan: Any, matrix: Any, u: Any, xs: Any, **options: Any) -> Any:
    """A loop with a closure, per-step data and outputs, and an index in the carry."""

    def step(carry: Any, x: Any) -> Any:
        u, i = carry
        u = 0.9 * jnp.tanh(matrix @ u) + x * jnp.sin(u + 0.01 * i)
        return (u, i + 1), u[:2] * x

    (u, _), ys = scan(step, (u, 0), xs, **options)
    return jnp.sum(u**2) + jnp.sum(jnp.cos(ys))


def ours(checkpoint: Any) -> Any:
    return lambda *args: loss(checkpointing.scan, *args, checkpoint=checkpoint)


def plain(*args: Any) -> Any:
    return loss(lax.scan, *args)


SCHEDULES = [
    None,
    store_all(),
    *(1, 4, N, N + 3),
    *(binomial(N, s, leaf=leaf) for s, leaf in ((1, 2), (1, 7), (2, 3), (3, 5), (2, N), (5, 2 * N))),
    Budget("3 kB"),
    Budget("1 MB"),
]


@pytest.mark.parametrize("checkpoint", SCHEDULES, ids=repr)
def test_gradients_do_not_depend_on_the_schedule(checkpoint: Any) -> None:
    """Assert value and gradient to 1e-14; bit for bit among schedules that run the same compiled step."""
    args = (MATRIX, STATE, DATA)
    got = jax.jit(jax.value_and_grad(ours(checkpoint), (0, 1, 2)))(*args)
    assert max_error(got, jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*args)) < 1e-14
    leaf = {int: 1, binomial: getattr(checkpoint, "leaf", 1)}.get(type(checkpoint))
    if leaf is not None:  # one by one, and from recorded residuals, are two compiled steps
        again = jax.jit(jax.value_and_grad(ours(binomial(N, 2, leaf=1 if leaf == 1 else 4)), (0, 1, 2)))(*args)
        assert max_error(got, again) == 0.0


TRANSFORMS = {
    "jvp": lambda f: lambda *a: jax.jvp(f, a, (a[0] * 0.3, a[1] + 0.1, a[2] * a[2])),
    "jacfwd of grad": lambda f: jax.jacfwd(jax.grad(f, 1), 0),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, 2), 1),
    "grad of grad": lambda f: jax.jacrev(jax.grad(f, 0), 2),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f, 1), 2),
    "vmap of grad": lambda f: (
        lambda m, u, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0, None))(m, jnp.stack([u, 2 * u]), x)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda m, u, x: jnp.sum(jax.vmap(f, (None, 0, None))(m, jnp.stack([u, 2 * u]), x)), (0, 1, 2)
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "checkpoint", [pytest.param(3, marks=pytest.mark.slow, id="3"), pytest.param(binomial(N, 2, leaf=4), id="leaf")]
)
def test_transformations(name: str, checkpoint: Any) -> None:
    """Assert the results of plain JAX under every transformation."""
    got = jax.jit(TRANSFORMS[name](ours(checkpoint)))(MATRIX, STATE, DATA)
    assert max_error(got, jax.jit(TRANSFORMS[name](plain))(MATRIX, STATE, DATA)) < 1e-13


def nested(outer: Any, inner: Any, p: Any, u: Any) -> Any:
    """A loop in a loop; both close over the parameter."""

    def within(c: Any) -> Any:
        return c[0] + 1, jnp.sin(p * c[1]) + 0.3

    def step(u: Any, x: Any) -> Any:
        return inner(lambda c: c[0] < 5, within, (0, u * x))[1], None

    return jnp.sum(outer(step, u, jnp.linspace(0.5, 1.2, 6))[0] ** 2)


def fixed(_: Any, step: Any, init: Any) -> Any:
    return lax.scan(lambda c, _: (step(c), None), init, length=5)[0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [2, online(2, leaf=2)], ids=repr)
def test_loops_inside_one_another(checkpoint: Any) -> None:
    """Assert gradient and Hessian of a while loop in a scan, and a scan in a while loop."""
    scan = lambda *a: checkpointing.scan(*a, checkpoint=2)
    inner = lambda *a: checkpointing.while_loop(*a, checkpoint=checkpoint)
    for transform in (jax.grad, jax.hessian):
        got = jax.jit(transform(lambda p: nested(scan, inner, p, STATE)))(0.7)
        assert max_error(got, jax.jit(transform(lambda p: nested(lax.scan, fixed, p, STATE)))(0.7)) < 1e-13

    def turned(loop: Any, scan: Any, p: Any) -> Any:
        step = lambda u, x: (jnp.sin(p * u) + x, None)
        return jnp.sum(loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, scan(step, c[1], DATA[:4])[0]), (0, STATE))[1])

    got = jax.jit(jax.grad(lambda p: turned(inner, scan, p)))(0.7)
    assert max_error(got, jax.jit(jax.grad(lambda p: turned(fixed, lax.scan, p)))(0.7)) < 1e-13


@pytest.mark.parametrize("kind", ["scan", "leaf", "while"])
@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_sharded_states(kind: str, how: str) -> None:
    """Assert the gradient of a state spread over two devices, under jit and inside shard_map."""
    mesh = Mesh(jax.devices()[:2], ("x",))
    u = jnp.linspace(0.1, 0.9, 6)

    def run(u: Any, p: Any, psum: Any) -> Any:
        step = lambda u: jnp.sin(p * u) + 0.1 * psum(u)
        if kind == "while":
            end = checkpointing.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, step(c[1])), (0, u), checkpoint=2)[
                1
            ]
        else:
            schedule = 2 if kind == "scan" else binomial(9, 2, leaf=3)
            end = checkpointing.scan(lambda u, _: (step(u), None), u, length=9, checkpoint=schedule)[0]
        return psum(end**2)

    whole = lambda u, p: run(u, p, jnp.sum)
    expected = jax.jit(jax.grad(whole, (0, 1)))(u, 0.7)
    if how == "jit":
        sharded = jax.device_put(u, NamedSharding(mesh, PartitionSpec("x")))
        got = jax.jit(jax.grad(whole, (0, 1)))(sharded, 0.7)
    else:
        total = lambda u: lax.psum(jnp.sum(u), "x")
        spread = jax.shard_map(
            lambda u, p: run(u, p, total),
            mesh=mesh,
            in_specs=(PartitionSpec("x"), PartitionSpec()),
            out_specs=PartitionSpec(),
        )
        got = jax.jit(jax.grad(spread, (0, 1)))(u, 0.7)
    assert max_error(jax.tree.map(jnp.asarray, got), expected) < 1e-13


@pytest.mark.parametrize(("n", "s", "leaf"), [(1, 1, 3), (30, 1, 7), (24, 2, 5), (57, 3, 2), (100, 40, 2), (9, 2, 100)])
def test_evaluations_with_leaves(n: int, s: int, leaf: int) -> None:
    """Assert n + t(n, s) + L evaluations, the run that returns the value included, and one trace."""
    counter = Counter()

    def step(u: Any, x: Any) -> Any:
        counter.tick()
        return 0.99 * u + jnp.sin(x * u), None

    schedule = binomial(n, s, leaf=leaf)
    f = jax.jit(jax.grad(lambda u: checkpointing.scan(step, u, jnp.linspace(0, 1, n), checkpoint=schedule)[0]))
    jax.block_until_ready(f(0.5))
    assert counter.traces == 1
    assert counter.settle() == n + schedule.advances + min(leaf, n)


def test_leaves_at_equal_bytes() -> None:
    """Assert at most 2.3 n evaluations for 10,000 steps with memory for 620 states, 12.3 of them a step's residuals."""
    n, states, residuals = 10_000, 620, 12.3
    assert binomial(n, states).advances + n + 1 > 2.9 * n
    best = min(n + binomial(n, int(states - residuals * leaf), leaf=leaf).advances + leaf for leaf in range(2, 40))
    assert best <= 2.3 * n


@pytest.mark.parametrize("unroll", [3, True])
def test_unrolling_changes_nothing(unroll: Any) -> None:
    """Assert value and gradient with `unroll`."""
    f = lambda *a: loss(checkpointing.scan, *a, checkpoint=4, unroll=unroll)
    args = (MATRIX, STATE, DATA)
    assert max_error(jax.jit(f)(*args), jax.jit(plain)(*args)) < 1e-14
    assert max_error(jax.jit(jax.grad(f, 1))(*args), jax.jit(jax.grad(plain, 1))(*args)) < 1e-14


def test_float32_stays_float32() -> None:
    """Assert that no float64 appears in the gradient of a float32 loop, whatever the schedule."""
    args = tuple(x.astype(jnp.float32) for x in (MATRIX, STATE, DATA))
    for checkpoint in (4, binomial(N, 2, leaf=4), Budget("1 MB")):
        got = jax.jit(jax.grad(ours(checkpoint), (0, 1, 2)))(*args)
        assert all(g.dtype == jnp.float32 for g in got)
        assert max_error(got, jax.jit(jax.grad(plain, (0, 1, 2)))(*args)) < 1e-6
