"""`checkpointing.scan` against `jax.lax.scan`, and its counts against the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import REVOLVE_TABLE, Counter, equations, max_error
from jax import lax
from tapeless import adjoint, checkpointing
from tapeless.checkpointing._rollout import Rollout

W = jnp.array([[0.5, -0.3, 0.1], [0.2, 0.4, -0.6], [0.7, 0.1, 0.3]])


def loss(scan: Any, theta: Any, u: Any, xs: Any, **options: Any) -> Any:
    """A loop with everything: a pytree with an integer and a key, inputs, outputs, a closure."""

    def step(carry: Any, x: Any) -> Any:
        u, count, key = carry["u"], carry["count"], carry["key"]
        key, mine = jax.random.split(key)
        noise = jax.random.normal(mine, u.shape)
        u = 0.9 * jnp.tanh(theta @ u + W[0]) + x["a"] * jnp.sin(u + 0.01 * count) + 0.01 * noise
        return {"u": u, "count": count + x["i"], "key": key}, (u[:2] * x["a"], count)

    init = {"u": u, "count": jnp.int32(1), "key": jax.random.key(0)}
    n = xs.shape[0]
    carry, (ys, counts) = scan(step, init, {"a": xs, "i": jnp.arange(n, dtype=jnp.int32)}, n, **options)
    return jnp.sum(carry["u"] ** 2) + jnp.sum(ys * jnp.cos(counts + jnp.arange(n))[:, None])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("n", "snapshots"), [(1, 1), (2, 1), (7, 1), (6, 2), (7, 2), (10, 3), (11, 3), (5, 9)])
def test_gradients_equal_those_of_lax_scan(n: int, snapshots: int, reverse: bool) -> None:
    """Assert values and gradients with respect to closure, state and inputs; n around β(s, r) and below s."""
    args = (W, jnp.array([0.3, -0.2, 0.5]), jnp.linspace(0.1, 0.8, n))
    got = jax.jit(
        jax.value_and_grad(lambda *a: loss(checkpointing.scan, *a, reverse=reverse, checkpoint=snapshots), (0, 1, 2))
    )
    expected = jax.jit(jax.value_and_grad(lambda *a: loss(lax.scan, *a, reverse=reverse), (0, 1, 2)))
    assert max_error(got(*args), expected(*args)) < 1e-14


@pytest.mark.parametrize("checkpoint", [None, 2, checkpointing.binomial(4, 2)])
@pytest.mark.parametrize(
    ("f", "init", "xs", "length"),
    [
        (lambda c, _: (c * 2, None), 1.0, None, 4),
        (lambda c, x: (c + x, c), 1.0, np.arange(4.0), None),
        (lambda c, x: (None, x), None, jnp.arange(4), None),
        (
            lambda c, x: ((c[0] + 1, {"b": c[1]["b"] * x}), (x, None)),
            (0, {"b": jnp.ones(2)}),
            jnp.ones((4, 2)),
            4,
        ),
        (lambda c, x: (c * x, c), jnp.float32(1), jnp.ones(4, jnp.float32), None),
    ],
    ids=["no xs", "weak types and NumPy", "no carry", "pytrees", "float32"],
)
def test_results_are_those_of_lax_scan(f: Any, init: Any, xs: Any, length: Any, checkpoint: Any) -> None:
    """Assert equal results, structures, shapes and dtypes."""
    got = checkpointing.scan(f, init, xs, length, checkpoint=checkpoint)
    expected = lax.scan(f, init, xs, length)
    assert max_error(got, expected) == 0
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize("checkpoint", [None, 1, 3])
def test_a_loop_of_no_steps_is_the_identity(checkpoint: Any) -> None:
    """Assert the initial state, empty outputs, and the gradient of the identity."""
    carry, ys = checkpointing.scan(lambda u, x: (u * x, u), 2.0, jnp.zeros(0), checkpoint=checkpoint)
    assert (float(carry), ys.shape) == (2.0, (0,))
    f = lambda u: checkpointing.scan(lambda u, x: (u * x, u), u, jnp.zeros(0), checkpoint=checkpoint)[0]
    assert float(jax.grad(f)(2.0)) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda scan: scan(lambda c, x: (jnp.stack([c, c]), x), 1.0, jnp.ones(3)),
        lambda scan: scan(lambda c, x: (c, x), 1.0, (jnp.ones(3), jnp.ones(4))),
        lambda scan: scan(lambda c, x: (c, x), 1.0, jnp.ones(3), 4),
        lambda scan: scan(lambda c, x: (c, x), 1.0),
        lambda scan: scan(lambda c, x: c, 1.0, jnp.ones(3)),
    ],
)
def test_errors_are_those_of_lax_scan(call: Any) -> None:
    """Assert the same exception with the same text."""
    with pytest.raises((TypeError, ValueError)) as expected:
        call(lax.scan)
    with pytest.raises(expected.type) as got:
        call(lambda *a: checkpointing.scan(*a, checkpoint=2))
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_misuse_of_checkpoint_is_one_error() -> None:
    """Assert expected, got and next step for a wrong number, kind or length."""
    for wrong in (0, -3, 2.5, True, "five"):
        with pytest.raises(
            ValueError, match="number of snapshots of at least 1, a schedule, a Budget, a Disk, or None; got"
        ):
            checkpointing.scan(lambda u, x: (u, None), 1.0, length=4, checkpoint=wrong)  # pyright: ignore
    with pytest.raises(ValueError, match=r"schedule of the loop's 4 steps, got binomial\(n=5.*Use binomial\(4"):
        checkpointing.scan(lambda u, x: (u, None), 1.0, length=4, checkpoint=checkpointing.binomial(5, 2))


def counted_evaluations(n: int, snapshots: int) -> int:
    counter = Counter()

    def step(u: Any, x: Any) -> Any:
        counter.tick()
        return 0.99 * u + jnp.sin(x * u), None

    xs = jnp.linspace(0, 1, n)
    f = jax.jit(jax.value_and_grad(lambda u: checkpointing.scan(step, u, xs, checkpoint=snapshots)[0]))
    jax.block_until_ready(f(0.5))
    assert counter.traces == 1
    return counter.settle()


ROWS = [row for row in REVOLVE_TABLE if row["n"] <= 1000 and row["s"] <= row["n"]]
FEW = [row for row in ROWS if (row["n"], row["s"]) in {(1, 1), (2, 1), (10, 2), (21, 3), (57, 5), (165, 8), (1000, 20)}]


@pytest.mark.parametrize("row", FEW, ids=lambda r: f"{r['n']}-{r['s']}")
def test_evaluations_counted_inside_the_step(row: dict[str, int]) -> None:
    """Assert n + t(n, s) + 1 evaluations for a value and gradient, never above the table's no-turn column."""
    counted = counted_evaluations(row["n"], row["s"])
    assert counted == row["n"] + row["A_untaped_advances"] + 1 <= row["B_no_turn"]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['n']}-{r['s']}")
def test_evaluations_of_every_row(row: dict[str, int]) -> None:
    """Assert the same for every row of the table up to 1,000 steps."""
    assert counted_evaluations(row["n"], row["s"]) <= row["B_no_turn"]


def test_a_run_without_gradient_keeps_nothing() -> None:
    """Assert that temporaries of a plain run do not grow with the number of steps, nor those of a gradient."""

    def bytes_of(n: int, transform: Any) -> int:
        f = lambda u: jnp.sum(checkpointing.scan(lambda u, _: (jnp.sin(u), None), u, length=n, checkpoint=8)[0])
        return jax.jit(transform(f)).lower(jnp.ones(4096)).compile().memory_analysis().temp_size_in_bytes

    state = 4096 * 8
    assert bytes_of(100_000, lambda f: f) <= bytes_of(100, lambda f: f) + 1024 < 4 * state
    assert bytes_of(100_000, jax.grad) <= bytes_of(100, jax.grad) + 1024 < (8 + 6) * state


def test_the_graph_does_not_grow() -> None:
    """Assert as many equations in a gradient for 100 steps as for 100,000."""

    def count(n: int) -> int:
        f = lambda u: checkpointing.scan(lambda u, _: (jnp.sin(u), None), u, length=n, checkpoint=8)[0]
        return sum(1 for _ in equations(jax.make_jaxpr(jax.grad(f))(1.0)))

    assert count(100) == count(100_000)


def test_large_residuals_are_not_all_stored_by_default() -> None:
    """Assert the fixed rule: everything while it fits 256 MB, then √(2n) snapshots and as many bytes for a leaf."""

    def bytes_of(n: int) -> int:
        f = lambda u: jnp.sum(checkpointing.scan(lambda u, _: (jnp.sin(u) * u, None), u, length=n)[0])
        return jax.jit(jax.grad(f)).lower(jnp.ones(10_000)).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(1000) > 1000 * 80_000
    assert 1.9 * 200 * 80_000 < bytes_of(20_000) < 2.1 * 200 * 80_000


def test_a_step_with_its_own_pullback_is_not_replayed() -> None:
    """Assert t(n, s) + 1 evaluations in all for a step whose adjoint follows from its two end states."""
    counter = Counter()

    class Halving(adjoint.Step):
        """x⁺ = x - inputs x³, with an adjoint that reads both ends."""

        def advance(self, x: Any, inputs: Any) -> Any:
            counter.tick()
            return [x[0] - inputs[0][0] * x[0] ** 3]

        def pullback(self, x: Any, x_next: Any, inputs: Any, cotangent: Any) -> Any:
            (k,) = inputs[0]
            cube = (x[0] - x_next[0]) / k
            return [cotangent[0] * (1 - 3 * k * cube / x[0])], ([-cotangent[0] * cube], [None])

    step = Halving()

    def final(k: Any, n: int, s: int) -> Any:
        rollout = Rollout(
            lambda consts, carry, xs: (step.advance(carry, (consts, xs)), []),
            n,
            s,
            pullback=lambda c, u, x, u_next, u_bar, _: _reordered(step.pullback(u, u_next, (c, x), u_bar)),
        )
        return rollout([k], [jnp.asarray(0.8)], [jnp.arange(n)])[0][0]

    def _reordered(bars: Any) -> Any:
        x_bar, (consts_bar, xs_bar) = bars
        return consts_bar, x_bar, xs_bar

    for n, s in ((10, 3), (57, 5)):
        got = jax.jit(jax.grad(final), static_argnums=(1, 2))(0.1, n, s)
        assert counter.settle() == checkpointing.binomial(n, s).advances + 1
        x = lambda k, n=n: lax.fori_loop(0, n, lambda _, x: x - k * x**3, 0.8)
        assert float(got) == pytest.approx(float(jax.jvp(x, (0.1,), (1.0,))[1]), rel=1e-13)


LOOPS = {
    "constant state": lambda scan, p, **k: scan(lambda c, x: (jnp.round(c * p), c), 1.0, None, length=3, **k)[0] * p**3,
    "empty leaf": lambda scan, p, **k: scan(lambda c, x: ((c[0] * p, c[1]), None), (p, jnp.zeros(0)), None, 3, **k)[0][
        0
    ],
    "outputs only": lambda scan, p, **k: jnp.sum(scan(lambda c, x: (c, x * p), 1.0, jnp.arange(3.0), **k)[1]) * p**2,
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_states_that_do_not_depend_on_what_is_batched(loop: str) -> None:
    """Assert second and third derivatives where some states or outputs carry no batch axis of their own."""
    f = lambda p: LOOPS[loop](checkpointing.scan, p, checkpoint=2)
    g = lambda p: LOOPS[loop](lax.scan, p)
    for transform in (
        jax.hessian,
        lambda f: jax.jacrev(jax.jacrev(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: jax.grad(jax.grad(jax.grad(f))),
        lambda f: lambda p: jax.vmap(jax.hessian(f))(jnp.stack([p, 2 * p])),
    ):
        assert max_error(transform(f)(0.7), transform(g)(0.7)) < 1e-12


def test_scan_without_a_leading_axis_has_jaxs_error() -> None:
    """Assert JAX's own message for inputs that cannot be scanned over."""
    with pytest.raises(ValueError, match="no leading axis to scan over"):
        checkpointing.scan(lambda c, x: (c, x), 1.0, 1.0, checkpoint=2)
