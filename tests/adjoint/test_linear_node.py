"""What the linear node promises beside right numbers: names, batching, tracing, ownership."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, equations, max_error
from tapeless import adjoint, checkpointing, sim, solvers


def rollout(theta: Any, u: Any, n: int = 50) -> Any:
    def step(u: Any, _: Any) -> Any:
        return jnp.tanh(theta @ u) + 0.1 * u, None

    return checkpointing.scan(step, u, length=n, checkpoint=4)[0]


THETA = jnp.array([[0.9, -0.2], [0.3, 0.7]])
U = jnp.array([0.4, -1.1])


def nodes_of(jaxpr: Any, name: str) -> list[Any]:
    return [e for e in equations(jaxpr) if e.primitive.name == "linear_node" and e.params["name"] == name]


def test_a_pullback_is_one_named_equation() -> None:
    """Assert that the gradient of a rollout holds one node, named, however many steps it has."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda u: jnp.sum(rollout(THETA, u))))(U)
    assert len(nodes_of(jaxpr, "rolloutᵀ")) == 1


def test_unbatched_residuals_stay_unbatched() -> None:
    """Assert that a batch of pullbacks keeps one copy of the snapshots: only cotangents carry the batch axis."""
    pullback = jax.vjp(lambda u: rollout(THETA, u), U)[1]
    jaxpr = jax.make_jaxpr(jax.vmap(pullback))(jnp.ones((28, 2)))
    (node,) = nodes_of(jaxpr, "rolloutᵀ")
    count = node.params["num_residuals"]
    shapes = [v.aval.shape for v in node.invars]
    assert all(28 not in shape for shape in shapes[:count])
    assert all(shape[0] == 28 for shape in shapes[count:])


def test_unbatched_factors_stay_unbatched() -> None:
    """Assert the same for the matrix of a linear solve."""
    pullback = jax.vjp(lambda b: solvers.linear_solve(lambda v: THETA @ v, b).value, U)[1]
    jaxpr = jax.make_jaxpr(jax.vmap(pullback))(jnp.ones((28, 2)))
    lu = [e for e in equations(jaxpr) if e.primitive.name == "lu"]
    assert lu
    assert all(e.invars[0].aval.shape == (2, 2) for e in lu)


@pytest.mark.parametrize("snapshots", [1, 7, 100])
def test_the_users_function_is_traced_once(snapshots: int) -> None:
    """Assert one trace of a step for value, gradient and Hessian product alike."""
    for transform in (lambda f: f, jax.grad, lambda f: lambda u: jax.jvp(jax.grad(f), (u,), (u,))[1]):
        counter = Counter()

        def step(u: Any, _: Any, counter: Counter = counter) -> Any:
            counter.traces += 1
            return jnp.sin(u), None

        jax.jit(
            transform(lambda u, step=step: jnp.sum(checkpointing.scan(step, u, length=20, checkpoint=snapshots)[0]))
        )(U)
        assert counter.traces == 1


def test_a_rate_and_a_residual_are_traced_once() -> None:
    """Assert one trace of a rate under a gradient through implicit steps, and of a root's residual."""
    counter = Counter()

    def rate(t: Any, y: Any, p: Any) -> Any:
        counter.traces += 1
        return -p * y

    def final(p: Any) -> Any:
        run = sim.simulate(sim.ODE(rate), 1.0, p, t0=0, t1=1, dt=0.1, method=sim.ImplicitMidpoint(), checkpoint=3)
        return run.y_final

    jax.grad(final)(0.7)
    assert counter.traces == 1

    def residual(u: Any, p: Any) -> Any:
        counter.traces += 1
        return u**2 - p

    jax.grad(lambda p: solvers.root_find(residual, 1.0, p).value)(2.0)
    assert counter.traces == 2


@pytest.mark.parametrize("entry", ["simulate", "root_find", "linear_solve", "scan"])
def test_changing_a_callers_buffer_changes_no_gradient(entry: str) -> None:
    """Assert that NumPy inputs are owned: overwritten or donated between forward and pullback, nothing changes."""

    def decay(t: Any, y: Any, p: Any) -> Any:
        return -p * y**2

    runs = {
        "simulate": lambda x: sim.simulate(decay, x, x, t0=0, t1=1, dt=0.25, method=sim.RK4()).y_final,
        "root_find": lambda x: solvers.root_find(lambda u, p: u**3 + u - p, np.ones(64), x).value,
        "linear_solve": lambda x: solvers.linear_solve(lambda v: v * (2 + jnp.asarray(x) ** 2), x).value,
        "scan": lambda x: checkpointing.scan(lambda u, _: (jnp.sin(u) * u, None), x, length=4, checkpoint=2)[0],
    }
    values = np.linspace(0.5, 1.5, 64)
    expected = jax.vjp(runs[entry], jnp.asarray(values))[1](jnp.ones(64))
    for spoil in (lambda x: x.fill(7.0), lambda x: jax.jit(lambda a: 2 * a, donate_argnums=0)(x)):
        mine = values.copy()
        pullback = jax.vjp(runs[entry], mine)[1]
        spoil(mine)
        mine[:] = np.nan
        assert max_error(pullback(jnp.ones(64)), expected) == 0


def test_closing_over_a_tracer_is_refused() -> None:
    """Assert that a node's function which hides a traced array says so, instead of losing its derivative."""

    def hidden(x: Any) -> Any:
        return adjoint.linear_node(lambda r, z: [x * z[0]], lambda r, c: [x * c[0]], [], [x], "hidden")[0]

    with pytest.raises(TypeError, match="pass it as a residual"):
        jax.jit(hidden)(1.0)


def test_third_derivatives() -> None:
    """Assert that reverse mode may be applied three times to a rollout, in bounded memory, to rounding."""

    def nest(run: Any) -> Any:
        inner = jax.grad(lambda u: jnp.sum(run(u) ** 2))
        middle = jax.grad(lambda u: jnp.sum(inner(u) ** 2))
        return jax.grad(lambda u: jnp.sum(middle(u) ** 2))

    def plain(u: Any) -> Any:
        for _ in range(6):
            u = jnp.tanh(THETA @ u) + 0.1 * u
        return u

    got = jax.jit(nest(lambda u: rollout(THETA, u, 6)))(U)
    assert max_error(got, jax.jit(nest(plain))(U)) < 1e-12


def test_debugging_by_run_sees_numbers() -> None:
    """Assert that a Python `if` on a value in the user's functions works under `disable_jit`."""
    seen = []

    def rate(t: Any, y: Any, p: Any) -> Any:
        seen.append(float(jax.lax.stop_gradient(y)))
        return -p * y if y > 0.5 else -2 * p * y

    def final(p: Any) -> Any:
        return sim.simulate(rate, 1.0, p, t0=0, t1=1, dt=0.25, method=sim.RK4(), checkpoint=2).y_final

    with jax.disable_jit():
        value, slope = jax.value_and_grad(final)(0.9)
        by_midpoint = jax.grad(
            lambda p: sim.simulate(rate, 1.0, p, t0=0, t1=1, dt=0.25, method=sim.ImplicitMidpoint()).y_final
        )(0.9)
    assert len(seen) >= 16
    assert 0.2 < float(value) < 0.5
    assert float(slope) < -0.3
    assert float(by_midpoint) == pytest.approx(float(slope), rel=0.2)
