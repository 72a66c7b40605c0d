"""Trouble cases S59 to S61 of loops and checkpointing, with the values given there."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from jax import lax
from tapeless import checkpointing, sim

# Of N steps: x_N and dx_N/dω at ω = 1.
S59 = {
    1: (0.995, -0.01),
    2: (0.98005, -0.0398),
    3: (0.9552995, -0.088803),
    7: (0.764654046156995, -0.45167363841607),
    10: (0.539951250933508, -0.842750388405864),
    64: (0.992870231795521, -0.763837080133282),
    100: (-0.836794927110387, 5.48202119543515),
    1000: (0.882684967316541, 47.0553716885313),
}
H = 0.1


def verlet(omega: Any, u: Any) -> Any:
    """A step of velocity Verlet for x'' = -ω² x."""
    x, v = u
    v = v - H / 2 * omega**2 * x
    x = x + H * v
    return x, v - H / 2 * omega**2 * x


def oscillation(scan: Any, n: int, omega: Any) -> Any:
    return scan(lambda u, _: (verlet(omega, u), None), (1.0, 0.0), None, n)[0][0]


def slots(n: int) -> list[int]:
    return sorted({1, 2, 3, 5, n, n + 3})


def closed_form(n: int) -> tuple[float, float]:
    """x_N = cos N θ with θ = 2 arcsin(ω h/2), and its derivative at ω = 1."""
    theta = 2 * math.asin(H / 2)
    return math.cos(n * theta), -n * math.sin(n * theta) * H / math.sqrt(1 - (H / 2) ** 2)


@pytest.mark.parametrize("n", S59)
def test_s59_checkpointed_oscillator(n: int) -> None:
    """Assert value and gradient for each number of slots: those in closed form, and those of plain reverse mode."""
    assert np.allclose(closed_form(n), S59[n], rtol=1e-14, atol=0)
    scans = [functools.partial(checkpointing.scan, checkpoint=s) for s in slots(n)]

    @jax.jit  # one program of all
    def gradients(omega: Any) -> Any:
        return [jax.value_and_grad(functools.partial(oscillation, scan, n))(omega) for scan in [lax.scan, *scans]]

    plain, *rest = gradients(1.0)
    assert max_error(plain, S59[n]) < 1e-14
    for got in rest:
        assert max_error(got, plain) < 1e-14
        assert max_error(got, S59[n]) < 1e-14


def test_s59_no_steps_and_the_energy() -> None:
    """Assert the identity of no steps, and x²/2 + v²/(2 (1 - h²/4)) = 1/2 after each of 1,000."""
    f = functools.partial(oscillation, functools.partial(checkpointing.scan, checkpoint=2), 0)
    assert jax.value_and_grad(f)(1.0) == (1.0, 0.0)

    def step(u: Any, _: Any) -> Any:
        x, v = u = verlet(1.0, u)
        return u, x**2 / 2 + v**2 / (2 * (1 - H**2 / 4))

    energy = checkpointing.scan(step, (1.0, 0.0), None, 1000, checkpoint=3)[1]
    assert energy.shape == (1000,)
    assert np.allclose(energy, 0.5, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("n", "checkpoint"), [(1, 4), (2, 2), (3, 1), (7, 10), (10, 3), (64, 5), (100, 2), (1000, 3)])
def test_s59_simulated_oscillator(n: int, checkpoint: int) -> None:
    """Assert the same of `sim.simulate`, with slots from one to more than there are steps."""

    def final(omega: Any) -> Any:
        system = sim.SecondOrder(lambda t, q, v, omega: -(omega**2) * q)
        method = sim.VelocityVerlet()
        run = sim.simulate(system, (1.0, 0.0), omega, t0=0, t1=n * H, dt=H, method=method, checkpoint=checkpoint)
        return run.y_final[0], run.stats["steps"]

    (value, steps), slope = jax.value_and_grad(final, has_aux=True)(1.0)
    assert steps == n
    assert max_error((value, slope), S59[n]) < 1e-14


@pytest.mark.parametrize(
    ("n", "power", "expected"), [(2, 1, (0.25, 1.0)), (3, 1, (0.125, 0.75)), (3, -1, (8.0, -48.0))], ids=str
)
def test_s60_parameter_in_the_loops_jacobian(n: int, power: int, expected: tuple[float, float]) -> None:
    """Assert x^n and its derivative where the body captures the parameter, in loops of known and unknown length."""

    def known(checkpoint: Any, x: Any) -> Any:
        return checkpointing.scan(lambda acc, _: (acc * x**power, None), 1.0, length=n, checkpoint=checkpoint)[0]

    def unknown(checkpoint: Any, x: Any) -> Any:
        body = lambda state: (state[0] + 1, state[1] * x**power)
        return checkpointing.while_loop(lambda state: state[0] < n, body, (0, 1.0), checkpoint=checkpoint)[1]

    @jax.jit
    def gradients(x: Any) -> Any:
        return [
            jax.value_and_grad(functools.partial(loop, checkpoint))(x)
            for loop in (known, unknown)
            for checkpoint in (1, 2, None)
        ]

    assert gradients(0.5) == [expected] * 6  # powers of two: no rounding


SIDE = 300
STATE = SIDE**2 * 8  # bytes


def mean_of_sum(scan: Any, n: int, x: Any) -> Any:
    z = jnp.ones((SIDE, SIDE))
    return jnp.mean(scan(lambda acc, y: (acc + x * (y + z), None), jnp.zeros_like(z), jnp.ones(n))[0])


def temporary_states(scan: Any, n: int) -> float:
    """Temporaries of the compiled gradient, in states; its number is checked on the way."""
    compiled = jax.jit(jax.grad(functools.partial(mean_of_sum, scan, n))).lower(1.0).compile()
    assert float(compiled(1.0)) == pytest.approx(2 * n, rel=1e-13)
    return compiled.memory_analysis().temp_size_in_bytes / STATE


def test_s61_memory_of_an_accumulation() -> None:
    """Assert gradients of 2n in room that is flat in n: the slots and at most four states; JAX's own grows by n."""
    few, more, many = (temporary_states(lax.scan, n) for n in (5, 10, 100))
    assert more - few == pytest.approx(5, abs=0.1)
    assert many - more == pytest.approx(90, abs=0.1)
    sizes = [temporary_states(functools.partial(checkpointing.scan, checkpoint=3), n) for n in (5, 10, 100)]
    assert max(sizes) - min(sizes) < 0.01
    assert max(sizes) < 3 + 4


def test_s61_told_before_it_runs() -> None:
    """Assert that a plan made where the gradient is taken bounds its room from above, and is within the budget."""
    budget = checkpointing.Budget(10 * STATE)
    plans = []

    def scan(f: Any, init: Any, xs: Any) -> Any:
        plans.append(checkpointing.plan(f, init, xs, budget=budget))
        return checkpointing.scan(f, init, xs, checkpoint=plans[-1].checkpoint)

    for n in (10, 100):
        room = temporary_states(scan, n) * STATE
        plan = plans[-1]
        assert room <= plan.peak_bytes <= budget.bytes
        assert plan.evaluations == n + plan.schedule.advances + min(plan.schedule.leaf, n)
        assert plan.schedule.slots >= 2
