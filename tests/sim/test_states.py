"""`simulate`: kinds of states and parameters, what is refused, what fails, and the graph."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import decay, equations, max_error, run
from tapeless import adjoint, sim

RK4 = sim.RK4()
DP8 = sim.DormandPrince8()


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


def test_failures_between_steps_are_told() -> None:
    """Assert that a stage which fails, or a state that is infinite, at a save time only is the run's status."""
    spike = lambda t, y, p: jnp.where((t > 0.02) & (t < 0.03), 1e6 * (y**2 + 1), 0.0)
    options = {"t1": 2.0, "dt": 1.0, "method": sim.ImplicitMidpoint(), "save_at": [0.05]}
    with pytest.raises(adjoint.SolveError):
        run(spike, 0.3, **options)
    hidden = lambda t, y, p: jnp.where((t > 0.52) & (t < 0.56), jnp.inf, 0.0)
    assert run(hidden, 0.0, dt=0.5, save_at=[0.55], throw=False).status == adjoint.Status.nonfinite


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
