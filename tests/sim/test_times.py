"""`simulate`: the time grid, what is saved, and derivatives with respect to times."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import decay, run
from tapeless import sim

RK4 = sim.RK4()
DP8 = sim.DormandPrince8()


# The time grid


def test_s01_empty_span() -> None:
    """Assert case S01: no steps, every save is y0, finite gradients; and a lone save time."""
    trajectory = run(lambda t, y, p: y, jnp.ones(1), t1=0.0, save_at=[0.0, 0.0])
    assert trajectory.stats["steps"] == 0
    assert np.array_equal(trajectory.y, np.ones((2, 1)))
    total = lambda y0: jnp.sum(run(lambda t, y, p: y, y0, t1=0.0, save_at=[0.0, 0.0]).y)
    assert float(jax.grad(total)(jnp.ones(1))[0]) == 2.0
    lone = lambda y0: run(lambda t, y, p: -y, y0, t1=2.0, dt=0.01, save_at=[2.0]).y[0]
    assert float(lone(1.0)) == pytest.approx(0.135335283236613, abs=1e-9)
    assert float(jax.grad(lone)(1.0)) == pytest.approx(0.135335283236613, abs=1e-9)


def test_s02_repeated_saves_have_cotangents_of_their_own() -> None:
    """Assert case S02: loss and gradients of a fit with replicate measurements."""
    data = jnp.array([0.9, 0.8, 0.7, 0.9, 0.5])

    def loss(p: Any, y0: Any, checkpoint: Any) -> Any:
        times = np.array([0.25, 0.25, 0.5, 0.5, 1.0])
        return jnp.sum((run(decay, y0, p, dt=0.0125, method=DP8, save_at=times, checkpoint=checkpoint).y - data) ** 2)

    for checkpoint in (None, 3):
        value, gradient = jax.value_and_grad(loss, argnums=(0, 1))(0.5, 1.0, checkpoint)
        assert float(value) == pytest.approx(0.0393596924107655, abs=1e-13)
        assert np.allclose(gradient, (-0.124886705015769, 0.177902019150284), rtol=0, atol=1e-12)


def test_s03_backward_in_time() -> None:
    """Assert case S03: decreasing saves, and the gradient of a run backwards."""
    times = np.arange(8, 0, -1) / 9
    trajectory = run(lambda t, y, p: -2 * y, 1.0, t0=1.0, t1=0.0, dt=-1 / 90, method=DP8, save_at=times)
    assert np.allclose(trajectory.y, np.exp(2 * (1 - times)), rtol=1e-12)
    assert float(trajectory.y_final) == pytest.approx(7.38905609893065, rel=1e-12)
    grow = lambda p, u1: run(lambda t, u, p: p * u, u1, p, t0=1.0, t1=0.0, dt=-0.02, method=DP8).y_final
    value, gradient = jax.value_and_grad(grow, argnums=(0, 1))(1.01, 0.1)
    assert float(value) == pytest.approx(0.0364218979571523, abs=1e-13)
    assert np.allclose(gradient, (-0.0364218979571523, 0.364218979571523), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"`dt` must be nonzero with the sign of t1 - t0. Expected a negative"):
        run(decay, 1.0, 1.0, t0=1.0, t1=0.0, dt=0.1)


def test_s04_rounding_adds_no_step() -> None:
    """Assert case S04: 11, 10 and 10 steps, each landing on t1 exactly."""
    first = run(lambda t, y, p: jnp.sin(y), 1.0, t1=0.05, dt=0.05 / 11)
    assert first.stats["steps"] == 11
    assert float(first.t_final) == 0.05
    assert float(first.y_final) == pytest.approx(1.04263417791626, abs=1e-13)
    second = run(lambda t, y, p: jnp.ones_like(y), 0.0)
    assert (second.stats["steps"], float(second.y_final)) == (10, pytest.approx(1.0, abs=1e-15))
    assert run(decay, 1.0, 1.0, t1=3.0, dt=0.3).stats["steps"] == 10


def test_s05_a_remainder_shortens_the_last_step() -> None:
    """Assert case S05 for a step that does not divide the span, with its exact derivatives in dt and t1."""

    def of_dt(dt: Any) -> Any:
        return run(lambda t, y, p: -y, 1.0, dt=dt, method=sim.ImplicitMidpoint()).y_final

    def factor(h: Any) -> Any:
        return (1 - h / 2) / (1 + h / 2)

    def closed(h: Any) -> Any:
        return factor(h) ** 3 * factor(1 - 3 * h)

    assert run(lambda t, y, p: -y, 1.0, dt=0.3).stats["steps"] == 4
    assert float(of_dt(0.3)) == pytest.approx(float(closed(0.3)), abs=1e-14)
    assert float(jax.grad(of_dt)(0.3)) == pytest.approx(float(jax.grad(closed)(0.3)), abs=1e-13)
    ramp = lambda t1, dt: run(lambda t, y, p: jnp.ones_like(y), 0.0, t1=t1, dt=dt).y_final
    assert np.allclose(jax.grad(ramp, argnums=(0, 1))(1.0, 0.3), (1.0, 0.0), rtol=0, atol=1e-14)


def test_s06_a_float32_clock_neither_drifts_nor_sticks() -> None:
    """Assert case S06: ten steps of 150 s after 390 days; and an error where the clock cannot resolve dt."""
    y0 = jnp.zeros((), jnp.float32)
    start = 33_696_000.0
    trajectory = run(lambda t, y, p: jnp.ones_like(y), y0, t0=start, t1=start + 1500, dt=150.0)
    assert trajectory.y_final.dtype == jnp.float32
    assert (float(trajectory.y_final), trajectory.stats["steps"]) == (1500.0, 10)
    with pytest.raises(ValueError, match="`dt` must be resolved by the clock at t=1e"):
        run(decay, 1.0, 1.0, t0=1e16, t1=1e16 + 10, dt=1.0)


def test_s07_nothing_is_evaluated_outside_the_span() -> None:
    """Assert case S07: a rate that is NaN at time zero and beyond the end is never asked there."""
    inside = lambda t, y, p: jnp.where((t >= 1) & (t <= 2), y / t, jnp.nan)
    assert float(run(inside, 1.0, t0=1.0, t1=2.0, dt=0.01).y_final) == pytest.approx(2.0, abs=1e-9)


def test_s12_s13_steps_are_asked_for_and_times_are_right() -> None:
    """Assert that dt is required, and that implicit midpoint uses the middle of the step (case S13)."""
    with pytest.raises(TypeError, match="dt"):
        sim.simulate(decay, 1.0, 1.0, t0=0.0, t1=1.0, method=RK4)  # pyright: ignore[reportCallIssue]
    ramp = run(lambda t, y, p: 2 * t * jnp.ones_like(y), 0.0, dt=0.5, method=sim.ImplicitMidpoint())
    assert float(ramp.y_final) == pytest.approx(1.0, abs=1e-14)


# Derivatives with respect to times


def test_s17_all_four_derivatives() -> None:
    """Assert case S17: q0, p, t0 and t1, in reverse and forward mode, with and without checkpoints."""

    def q(q0: Any, p: Any, t0: Any, t1: Any, checkpoint: Any = None) -> Any:
        return run(
            lambda t, q, p: q / p * t**2, q0, p, t0=t0, t1=t1, dt=0.02, method=DP8, checkpoint=checkpoint
        ).y_final

    at = (7.1, 2.0, 0.7, 2.3)
    expected = (7.17545853317667, -50.1985511702996, -12.4817101184608, 134.751523523791)
    assert float(q(*at)) == pytest.approx(50.9457555855544, rel=1e-12)
    for derivative in (jax.grad(q, argnums=(0, 1, 2, 3)), jax.jacfwd(q, argnums=(0, 1, 2, 3))):
        assert np.allclose(derivative(*at), expected, rtol=1e-11)
    assert np.allclose(jax.grad(q, argnums=(0, 1, 2, 3))(*at, 5), expected, rtol=1e-11)


def test_s18_start_and_save_times() -> None:
    """Assert case S18: derivatives with respect to t0 and to save times, on and between grid points."""

    def y(t0: Any, times: Any, a: Any) -> Any:
        rate = lambda t, y, a: jnp.cos(a * t)
        return run(rate, 0.0, a, t0=t0, t1=1.2, dt=0.1, method=DP8, save_at=times).y

    times = jnp.array([0.45, 1.1])
    assert np.allclose(y(0.0, times, 1.5), (0.4165982111518, 0.664576685635946), rtol=0, atol=1e-12)
    by_t0, by_times, by_a = jax.jacrev(y, argnums=(0, 1, 2))(0.0, times, 1.5)
    assert np.allclose(by_t0, -1, rtol=0, atol=1e-12)
    assert np.allclose(by_times, np.diag([0.780706951132447, -0.079120888806734]), rtol=0, atol=1e-10)
    assert np.allclose(by_a, (-0.0435200554281, -0.501073108882235), rtol=0, atol=1e-11)


# What is saved


@pytest.mark.parametrize("times", [[], [1.0], [0.0], [0.3, 0.1, 0.1, 1.0, 0.0], [0.55, 0.123]])
def test_saves_in_any_order(times: list[float]) -> None:
    """Assert states at save times, sorted or not, repeated, at the ends, between steps, or none at all."""
    y0 = {"a": jnp.array([1.0, 2.0]), "b": 0.5}
    rate = lambda t, y, k: jax.tree.map(lambda x: -k * x, y)
    trajectory = run(rate, y0, 0.7, method=DP8, save_at=np.array(times))
    assert trajectory.y["a"].shape == (len(times), 2)
    assert trajectory.y["b"].shape == (len(times),)
    assert np.allclose(trajectory.y["b"], 0.5 * np.exp(-0.7 * np.array(times)), rtol=0, atol=1e-13)
    assert np.allclose(trajectory.t, times)


def test_saves_between_steps_have_full_order() -> None:
    """Assert that a save between grid points is as accurate as one on them: order 8, no interpolation error."""
    for dt, tolerance in ((0.25, 1e-10), (0.125, 1e-12)):
        y = run(lambda t, y, p: y * jnp.cos(t), 1.0, dt=dt, method=DP8, save_at=[0.3337]).y
        assert float(y[0]) == pytest.approx(np.exp(np.sin(0.3337)), abs=tolerance)


def test_without_save_at_the_final_state_alone() -> None:
    """Assert the leading axis of one, and the final state without it."""
    trajectory = run(decay, jnp.ones(3), 0.5)
    assert (trajectory.y.shape, trajectory.y_final.shape, trajectory.t.shape) == ((1, 3), (3,), (1,))
    assert np.array_equal(trajectory.y[0], trajectory.y_final)
    assert "10 steps" in str(trajectory)
    assert "Converged" in str(trajectory)


def test_saves_are_not_snapped_to_the_grid() -> None:
    """Assert a save 5e-5 beyond a grid point of a long run, and the same value when its time is differentiated."""
    f = lambda times: run(lambda t, y, p: jnp.ones_like(y), 0.0, t1=1e5, dt=1.0, save_at=times).y
    times = jnp.array([10.00005, 99_999.5])
    assert np.allclose(f(times), times, rtol=0, atol=1e-9)
    assert np.allclose(jax.jacrev(f)(times), np.eye(2), rtol=0, atol=1e-12)


def test_the_end_of_an_empty_span_has_a_derivative() -> None:
    """Assert d/dt1 and d/dt0 of y at t1 = t0: the rate, with either sign."""
    f = lambda t0, t1: run(lambda t, y, p: -3 * y, 2.0, t0=t0, t1=t1).y_final
    assert np.allclose(jax.grad(f, argnums=(0, 1))(0.5, 0.5), (6.0, -6.0), rtol=0, atol=1e-12)
