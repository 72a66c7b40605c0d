"""`simulate`: the time grid, what is saved, what is differentiated, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, max_error
from tapeless import adjoint, sim

RK4 = sim.RK4()
DP8 = sim.DormandPrince8()


def run(rate: Any, y0: Any, params: Any = None, *, t0: Any = 0.0, t1: Any = 1.0, dt: Any = 0.1, **options: Any) -> Any:
    return sim.simulate(rate, y0, params, t0=t0, t1=t1, dt=dt, **({"method": RK4} | options))


def decay(t: Any, y: Any, k: Any) -> Any:
    return -k * y


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


# Kinds of states and parameters


def test_s48_integer_and_none_leaves() -> None:
    """Assert case S48: floats get gradients, integers and None get none, without an error."""
    params = {"a": 0.2, "b": 1, "none": None, "index": np.array([0, 1]), "name": "decay"}

    def y1(a: Any) -> Any:
        rate = lambda t, y, p: -p["a"] * y[p["index"]] + p["b"]
        return run(rate, jnp.array([2.0, 3.0]), params | {"a": a}, method=DP8).y_final

    assert np.allclose(y1(0.2), (2.54380774076605, 3.36253849384404), rtol=0, atol=1e-13)
    assert np.allclose(jax.jacrev(y1)(0.2), (-2.07553891381651, -2.89426966689449), rtol=0, atol=1e-12)


@pytest.mark.parametrize("y0", [(1, 0), (1, 0.0), (np.int32(1), np.float64(0))], ids=str)
def test_s49_integer_states_become_floats(y0: Any) -> None:
    """Assert case S49: the same numbers for every spelling of the initial state."""
    rate = lambda t, y, p: (y[1], -jnp.pi * y[0] - 0.5 * y[1])
    x, v = run(rate, y0, t1=5.0, dt=0.05, method=DP8).y_final
    assert np.allclose((x, v), (-0.203150956137928, -0.310878567521218), rtol=0, atol=1e-12)


def test_s50_complex_states() -> None:
    """Assert case S50: a complex state with a real time derivative, explicit and implicit."""
    for method, tolerance in ((DP8, 1e-12), (sim.ImplicitMidpoint(), 1e-4)):

        def real_part(t1: Any, method: Any = method) -> Any:
            return run(lambda t, y, p: -1j * y, jnp.array([1.0, 1.0j]), t1=t1, dt=0.01, method=method).y_final

        expected = np.exp(-1j) * np.array([1, 1j])
        assert np.allclose(real_part(1.0), expected, rtol=0, atol=tolerance)
        slope = jax.grad(lambda t1: real_part(t1)[0].real)(1.0)
        assert float(slope) == pytest.approx(-0.841470984807897, abs=tolerance)


def test_s51_states_without_entries() -> None:
    """Assert case S51: empty states and empty leaves."""
    assert run(lambda t, y, p: y, jnp.zeros(0), save_at=np.linspace(0, 1, 50)).y.shape == (50, 0)
    assert jax.grad(lambda y0: jnp.sum(run(lambda t, y, p: y, y0).y_final))(jnp.zeros(0)).shape == (0,)
    mixed = run(lambda t, y, p: {"e": y["e"], "x": -y["x"]}, {"e": jnp.zeros(0), "x": 1.0}, method=DP8)
    assert float(mixed.y_final["x"]) == pytest.approx(np.exp(-1), abs=1e-12)


def test_s52_wrong_shapes_are_one_error() -> None:
    """Assert case S52: expected and received, nothing broadcast, and the user's own exception first."""
    cases = [
        (
            lambda t, y, p: jnp.ones(1),
            1.0,
            r"shapes of `y`. Expected \['float64\[\]'\], got \['float64\[1\]'\]",
        ),
        (lambda t, y, p: jnp.float64(1), jnp.ones(3), r"Expected \['float64\[3\]'\], got \['float64\[\]'\]"),
        (lambda t, y, p: (y["q"], y["p"]), {"q": 1.0, "p": 1.0}, "structure of `y`. Expected PyTreeDef"),
        (lambda t, y, p: 1j * y, 1.0, "real values for a real state"),
    ]
    for rate, y0, message in cases:
        with pytest.raises(ValueError, match=message):
            run(rate, y0)
    with pytest.raises(NameError, match="misspelt"):
        run(lambda t, y, p: misspelt * y, 1.0)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    with pytest.raises(ValueError, match=r"`t0` must be a real number.*shape \(1,\)"):
        run(decay, 1.0, 1.0, t0=jnp.zeros(1))
    with pytest.raises(TypeError, match="a state's leaves must be numbers or arrays"):
        run(decay, "one", 1.0)


def test_s53_second_derivatives_and_forward_mode() -> None:
    """Assert case S53 in every mixture of the modes."""
    y = lambda z: run(lambda t, y, z: -z * y, 2.0, z, dt=0.02, method=DP8, checkpoint=4).y_final
    assert float(y(2.3)) == pytest.approx(0.200517687445607, abs=1e-13)
    for first in (jax.grad, jax.jacfwd):
        assert float(first(y)(2.3)) == pytest.approx(-0.200517687445607, abs=1e-12)
        for second in (jax.grad, jax.jacfwd):
            assert float(second(first(y))(2.3)) == pytest.approx(0.200517687445607, abs=1e-11)


def test_s54_a_failed_lane_stays_alone() -> None:
    """Assert case S54: good lanes unchanged with finite gradients, the lane that blows up flagged."""

    def final(y0: Any) -> Any:
        trajectory = run(lambda t, y, p: y**2, y0, t1=1.5, dt=0.005, method=DP8, throw=False)
        return trajectory.y_final, trajectory.status

    y0 = jnp.array([0.1, 0.5, 1.0])
    values, status = jax.vmap(final)(y0)
    assert np.allclose(values[:2], (0.117647058823529, 2.0), rtol=1e-10)
    assert (status == adjoint.Status.converged).tolist() == [True, True, False]
    gradient = jax.vmap(jax.grad(lambda y: final(y)[0]))(y0)
    assert np.allclose(gradient[:2], (1.38408304498270, 16.0), rtol=1e-9)
    assert np.isnan(gradient[2])


# What is refused, and what fails


def test_bad_input_is_one_error() -> None:
    """Assert expected, got and next step for numbers that cannot be right."""
    with pytest.raises(ValueError, match=r"`y0` must be finite, but \['b'\] holds NaN"):
        run(decay, {"a": 1.0, "b": jnp.nan}, 1.0)
    with pytest.raises(ValueError, match="`dt` must be finite"):
        run(decay, 1.0, 1.0, dt=jnp.nan)
    with pytest.raises(ValueError, match="`dt` must be nonzero"):
        run(decay, 1.0, 1.0, dt=0.0)
    with pytest.raises(ValueError, match=r"`save_at` must lie between t0=0 and t1=1, got \[1.5\]"):
        run(decay, 1.0, 1.0, save_at=[0.5, 1.5])
    with pytest.raises(ValueError, match="`save_at` must be a one-dimensional array"):
        run(decay, 1.0, 1.0, save_at=0.5)
    with pytest.raises(ValueError, match="`t1` must be known when the program is traced"):
        jax.jit(lambda t1: run(decay, 1.0, 1.0, t1=t1).y_final)(1.0)
    from tapeless import solvers

    method = sim.ImplicitMidpoint(solvers.Newton(rtol=1e-12))
    with pytest.raises(ValueError, match="reachable in float32"):
        run(decay, jnp.ones(2, jnp.float32), 1.0, method=method)


def test_a_blown_up_run_is_told() -> None:
    """Assert that a state which overflows raises a sentence, and that its gradient is an error as well."""
    explode = lambda t, y, p: y**2
    with pytest.raises(adjoint.SolveError, match=r"simulate: A value became infinite or NaN.*smaller `dt`"):
        run(explode, 1.0, t1=3.0)
    quiet = lambda y0: run(explode, y0, t1=3.0, throw=False).y_final
    assert not np.isfinite(quiet(1.0))
    with pytest.raises(adjoint.SolveError, match="derivative was asked for"):
        jax.grad(quiet)(1.0)


def test_a_failed_stage_is_carried_to_the_end() -> None:
    """Assert that an implicit step which does not converge is the run's status."""
    from tapeless import solvers

    method = sim.ImplicitMidpoint(solvers.Newton(max_iters=1, rtol=1e-14))
    trajectory = run(lambda t, y, p: -(y**3), 2.0, method=method, throw=False)
    assert trajectory.status == adjoint.Status.max_iterations
    with pytest.raises(adjoint.SolveError, match="iteration limit"):
        run(lambda t, y, p: -(y**3), 2.0, method=method)


# The graph, and float32


def test_the_graph_does_not_grow() -> None:
    """Assert as many equations in a gradient's jaxpr for 100 steps as for 100,000, in every method and mode."""
    pendulum = sim.SecondOrder(lambda t, q, v, p: -p * jnp.sin(q))

    def count(method: Any, n: int, checkpoint: Any) -> int:
        def f(p: Any) -> Any:
            span = {"t0": 0.0, "t1": n * 0.01, "dt": 0.01}
            return sim.simulate(pendulum, (1.0, 0.0), p, method=method, checkpoint=checkpoint, **span).y_final[0]

        return sum(1 for _ in equations(jax.make_jaxpr(jax.grad(f))(1.3)))

    for method in (RK4, sim.KahanLi8(), sim.ImplicitMidpoint()):
        for checkpoint in (None, 20):
            assert count(method, 100, checkpoint) == count(method, 100_000, checkpoint)


@pytest.mark.parametrize("method", [RK4, sim.ImplicitMidpoint()], ids=["RK4", "midpoint"])
def test_float32_throughout(method: Any) -> None:
    """Assert that a float32 state gives float32 results and gradients to float32 accuracy."""

    def final(k: Any) -> Any:
        return run(decay, jnp.ones(2, jnp.float32), k, method=method, dt=0.02).y_final

    value, gradient = final(jnp.float32(0.5)), jax.jacrev(final)(jnp.float32(0.5))
    assert value.dtype == gradient.dtype == jnp.float32
    assert np.allclose(value, np.exp(-0.5), rtol=1e-5)
    assert np.allclose(gradient, -np.exp(-0.5), rtol=1e-4)


def test_schedules_do_not_change_the_gradient() -> None:
    """Assert bitwise equal gradients for every number of snapshots."""
    rate = lambda t, y, p: jnp.stack([y[1], p * (1 - y[0] ** 2) * y[1] - y[0]])
    f = lambda p, c: jnp.sum(run(rate, jnp.array([2.0, 0.1]), p, t1=5.0, dt=0.05, checkpoint=c).y_final)
    results = [float(jax.grad(f)(0.8, c)) for c in (None, 1, 2, 7, 100, 1000)]
    assert len(set(results)) == 1


def test_jit_and_eager_agree() -> None:
    """Assert the same numbers with and without an outer jit."""
    f = lambda p: jnp.sum(run(decay, jnp.array([1.0, 2.0]), p, save_at=[0.33, 1.0]).y)
    assert max_error(jax.jit(jax.value_and_grad(f))(0.7), jax.value_and_grad(f)(0.7)) < 1e-15


def test_saves_are_not_snapped_to_the_grid() -> None:
    """Assert a save 5e-5 beyond a grid point of a long run, and the same value when its time is differentiated."""
    f = lambda times: run(lambda t, y, p: jnp.ones_like(y), 0.0, t1=1e5, dt=1.0, save_at=times).y
    times = jnp.array([10.00005, 99_999.5])
    assert np.allclose(f(times), times, rtol=0, atol=1e-9)
    assert np.allclose(jax.jacrev(f)(times), np.eye(2), rtol=0, atol=1e-12)


def test_failures_between_steps_are_told() -> None:
    """Assert that a stage which fails, or a state that is infinite, at a save time only is the run's status."""
    spike = lambda t, y, p: jnp.where((t > 0.02) & (t < 0.03), 1e6 * (y**2 + 1), 0.0)
    options = {"t1": 2.0, "dt": 1.0, "method": sim.ImplicitMidpoint(), "save_at": [0.05]}
    with pytest.raises(adjoint.SolveError):
        run(spike, 0.3, **options)
    hidden = lambda t, y, p: jnp.where((t > 0.52) & (t < 0.56), jnp.inf, 0.0)
    assert run(hidden, 0.0, dt=0.5, save_at=[0.55], throw=False).status == adjoint.Status.nonfinite


def test_the_end_of_an_empty_span_has_a_derivative() -> None:
    """Assert d/dt1 and d/dt0 of y at t1 = t0: the rate, with either sign."""
    f = lambda t0, t1: run(lambda t, y, p: -3 * y, 2.0, t0=t0, t1=t1).y_final
    assert np.allclose(jax.grad(f, argnums=(0, 1))(0.5, 0.5), (6.0, -6.0), rtol=0, atol=1e-12)


def test_pairs_of_any_kind() -> None:
    """Assert named tuples for (q, v), and positions and velocities of different dtypes."""
    from typing import NamedTuple

    class Phase(NamedTuple):
        q: Any
        v: Any

    oscillator = sim.SecondOrder(lambda t, q, v, p: -q)
    for method in (DP8, sim.VelocityVerlet()):
        end = run(oscillator, Phase(1.0, 0.0), method=method).y_final
        assert isinstance(end, Phase)
        assert float(end.q) == pytest.approx(np.cos(1), abs=1e-3)
        mixed = run(oscillator, (jnp.float32(1), jnp.float64(0)), method=method).y_final
        assert [x.dtype for x in mixed] == [jnp.float32, jnp.float64]


def test_conjugating_rates_are_differentiated() -> None:
    """Assert an implicit gradient of a rate that is not holomorphic, against central differences."""

    def final(p: Any) -> Any:
        rate = lambda t, y, p: -p * jnp.conj(y) * (1 + 0.3j)
        return run(rate, 1 + 0.5j, p, dt=0.05, method=sim.ImplicitMidpoint()).y_final.real

    difference = (final(0.7 + 1e-6) - final(0.7 - 1e-6)) / 2e-6
    assert float(jax.grad(final)(0.7)) == pytest.approx(float(difference), rel=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "rk4"}, "instance such as sim.RK4"),
        ({"method": sim.RK4}, "instance such as sim.RK4"),
        ({"t1": None}, "`t1` must be a real number, got None"),
        ({"t1": "1"}, "`t1` must be a real number, got '1'"),
        ({"save_at": "x"}, "one-dimensional array of times"),
    ],
)
def test_misuse_is_one_error(change: Any, message: str) -> None:
    """Assert expected and got for what is no method, no time, no function."""
    with pytest.raises((TypeError, ValueError), match=message):
        run(decay, 1.0, 1.0, **change)
    with pytest.raises(TypeError, match="must be a function rate"):
        run(3.0, 1.0)
