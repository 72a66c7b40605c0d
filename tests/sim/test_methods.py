"""Each method: measured order, its own promises, and exact discrete derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from tapeless import sim

METHODS = {
    "RK4": sim.RK4(),
    "DormandPrince8": sim.DormandPrince8(),
    "VelocityVerlet": sim.VelocityVerlet(),
    "KahanLi8": sim.KahanLi8(),
    "ImplicitMidpoint": sim.ImplicitMidpoint(),
}


def driven(t: Any, q: Any, v: Any, p: Any) -> Any:
    """A nonlinear oscillator with explicit time: a method that evaluates at the wrong time loses its order."""
    return -p * jnp.sin(q) + 0.3 * jnp.cos(1.7 * t + 0.4)


DRIVEN = sim.SecondOrder(driven)
START = (jnp.array([0.7]), jnp.array([-0.4]))


def final(method: Any, dt: float, p: Any = 1.3, t1: float = 2.0, **options: Any) -> Any:
    run = sim.simulate(DRIVEN, START, p, t0=0.1, t1=0.1 + t1, dt=dt, method=method, **options)
    return jnp.concatenate(run.y_final)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same problem by an independent integrator at rounding."""
    from scipy.integrate import solve_ivp

    def rate(t: float, y: Any) -> Any:
        return [y[1], -1.3 * np.sin(y[0]) + 0.3 * np.cos(1.7 * t + 0.4)]

    return solve_ivp(rate, (0.1, 2.1), [0.7, -0.4], method="DOP853", rtol=1e-13, atol=1e-15).y[:, -1]


@pytest.mark.parametrize("name", METHODS)
def test_measured_order(name: str, reference: Any) -> None:
    """Assert the order by a fit of errors over four step sizes, within 0.15."""
    method = METHODS[name]
    count = np.array([16, 23, 32, 45]) if method.order < 8 else np.array([5, 6, 8, 10])
    errors = [float(jnp.max(jnp.abs(final(method, 2.0 / n) - reference))) for n in count]
    slope = -np.polyfit(np.log(count), np.log(errors), 1)[0]
    assert slope == pytest.approx(method.order, abs=0.15)


@pytest.mark.parametrize("name", ["RK4", "DormandPrince8", "ImplicitMidpoint"])
def test_discrete_gradient_is_exact(name: str) -> None:
    """Assert d/da and d/dy0 against the closed form: a one-step method applied to y' = a y gives R(a h)ⁿ."""
    method = METHODS[name]
    h, n = 0.1, 7

    def growth(z: Any) -> Any:
        if isinstance(method, sim.ImplicitMidpoint):
            return (1 + z / 2) / (1 - z / 2)
        tableau = method.tableau
        ks: list[Any] = []
        for row in tableau.a:
            ks.append(1 + z * sum((a * k for a, k in zip(row, ks, strict=False)), 0.0))
        return 1 + z * sum(b * k for b, k in zip(tableau.b, ks, strict=True))

    def run(a: Any, y0: Any, checkpoint: Any) -> Any:
        return sim.simulate(
            lambda t, y, a: a * y, y0, a, t0=0, t1=n * h, dt=h, method=method, checkpoint=checkpoint
        ).y_final

    for checkpoint in (None, 1, 3):
        got = jax.value_and_grad(run, argnums=(0, 1))(-0.8, 1.7, checkpoint)
        expected = jax.value_and_grad(lambda a, y0: y0 * growth(a * h) ** n, argnums=(0, 1))(-0.8, 1.7)
        assert max_error(got, expected) < 1e-13


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("n", "x", "slope"),
    [
        (1, 0.995, -0.01),
        (2, 0.98005, -0.0398),
        (3, 0.9552995, -0.088803),
        (7, 0.764654046156995, -0.45167363841607),
        (10, 0.539951250933508, -0.842750388405864),
        (64, 0.992870231795521, -0.763837080133282),
        (100, -0.836794927110387, 5.48202119543515),
        (1000, 0.882684967316541, 47.0553716885313),
    ],
)
def test_s59_verlet_against_its_closed_form(n: int, x: float, slope: float, slots: int) -> None:
    """Assert case S59: value, gradient and discrete energy of Verlet's oscillator, for every number of slots."""

    def run(w: Any, **options: Any) -> Any:
        oscillator = sim.SecondOrder(lambda t, q, v, w: -(w**2) * q)
        return sim.simulate(
            oscillator,
            (1.0, 0.0),
            w,
            t0=0,
            t1=0.1 * n,
            dt=0.1,
            method=sim.VelocityVerlet(),
            checkpoint=slots,
            **options,
        )

    value, gradient = jax.value_and_grad(lambda w: run(w).y_final[0])(1.0)
    assert float(value) == pytest.approx(x, abs=1e-12)
    assert float(gradient) == pytest.approx(slope, rel=1e-10)
    q, v = run(1.0, save_at=0.1 * np.arange(n + 1)).y
    assert np.allclose(q**2 / 2 + v**2 / (2 * (1 - 0.1**2 / 4)), 0.5, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["VelocityVerlet", "KahanLi8", "ImplicitMidpoint"])
def test_energy_stays_bounded(name: str) -> None:
    """Assert that the symplectic methods keep the energy of a Kepler orbit over a hundred periods."""
    kepler = sim.SecondOrder(lambda t, q, v, p: -q * sim.inverse_cube(jnp.sum(q**2)))
    q0, v0 = jnp.array([0.8, 0.0]), jnp.array([0.0, np.sqrt(1.2 / 0.8)])
    period, dt = 2 * np.pi, 2 * np.pi / 100
    early = np.arange(0, 500, 7) * dt
    times = np.concatenate([early, 9500 * dt + early])
    run = sim.simulate(kepler, (q0, v0), t0=0.0, t1=100 * period, dt=dt, method=METHODS[name], save_at=times)
    q, v = run.y
    energy = jnp.sum(v**2, -1) / 2 - 1 / jnp.sqrt(jnp.sum(q**2, -1))
    drift = np.abs(energy - energy[0])
    assert drift.max() < (1e-9 if METHODS[name].order == 8 else 1e-2)
    assert drift[len(early) :].max() < 1.2 * drift[: len(early)].max() + 1e-13


def test_methods_that_need_an_acceleration_say_so() -> None:
    """Assert one error for first-order systems and for accelerations that read the velocity."""
    options = {"t0": 0.0, "t1": 1.0, "dt": 0.1, "method": sim.VelocityVerlet()}
    with pytest.raises(TypeError, match=r"Expected sim.SecondOrder.*got sim.ODE.*Runge-Kutta"):
        sim.simulate(lambda t, y, p: y, 1.0, **options)
    with pytest.raises(ValueError, match="does not depend on the velocity"):
        sim.simulate(sim.SecondOrder(lambda t, q, v, p: -q - 0.1 * v), (1.0, 0.0), **options)
    with pytest.raises(ValueError, match=r"pair \(q, v\)"):
        sim.simulate(sim.SecondOrder(lambda t, q, v, p: -q), jnp.ones(2), **options)


def test_implicit_steps_are_not_solved_again_in_reverse() -> None:
    """Assert that a gradient through implicit steps makes t(n, s) + 1 solves, counted inside the rate."""
    from helpers import Counter
    from tapeless import checkpointing, solvers

    counter = Counter()
    n, s = 20, 3

    def rate(t: Any, y: Any, p: Any) -> Any:
        counter.tick()
        return -p * y**3

    method = sim.ImplicitMidpoint(solvers.Newton(rtol=1e-12))

    def run(p: Any, n: int) -> Any:
        return sim.simulate(rate, 1.0, p, t0=0, t1=n * 0.05, dt=0.05, method=method, checkpoint=s)

    jax.block_until_ready(run(0.9, n).y_final)
    per_solve = counter.settle() / n
    jax.block_until_ready(jax.grad(lambda p: run(p, n).y_final)(0.9))
    solves = (counter.settle() - 2 * n) / per_solve
    assert solves <= checkpointing.binomial(n, s).advances + 1.5 + 2 * n / per_solve


def test_step_pullbacks_are_adjoint_to_tangents() -> None:
    """Assert ⟨c, J d⟩ = ⟨Jᵀ c, d⟩ for every method on a generic point and direction."""
    rng = np.random.default_rng(1)
    d, c = rng.standard_normal(), jnp.asarray(rng.standard_normal(2))
    for method in METHODS.values():
        f = lambda p, method=method: final(method, 0.25, p, checkpoint=2)
        forward = c @ jax.jvp(f, (1.3,), (d,))[1]
        reverse = jax.vjp(f, 1.3)[1](c)[0] * d
        assert float(forward) == pytest.approx(float(reverse), rel=1e-12)
