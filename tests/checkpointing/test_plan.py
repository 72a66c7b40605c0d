"""The planner: plans that hold, budgets that are refused, and what a plan says of itself."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tapeless import checkpointing, sim
from tapeless.checkpointing import Budget, binomial, store_all


def burgers(u: Any, nu: Any) -> Any:
    """One step of the classical Runge-Kutta method."""

    def rate(u: Any) -> Any:
        up, um = jnp.roll(u, -1), jnp.roll(u, 1)
        return -u * (up - um) + nu * (up - 2 * u + um)

    a = rate(u)
    b = rate(u + 0.05 * a)
    c = rate(u + 0.05 * b)
    return u + 0.1 / 6 * (a + 2 * b + 2 * c + rate(u + 0.1 * c))


def network(u: Any, w: Any) -> Any:
    """A step with a matrix of parameters, which is not private to it."""
    return u + 0.01 * jnp.tanh(w @ jnp.tanh(w.T @ u))


def spectral(u: Any, nu: Any) -> Any:
    """A step in Fourier space."""
    k = jnp.fft.rfftfreq(u.shape[0], 1 / u.shape[0])
    return jnp.fft.irfft(jnp.fft.rfft(u + 1e-3 * u * u) * jnp.exp(-nu * k**2 * 1e-6), u.shape[0])


LOOPS = {
    "burgers": (burgers, jnp.linspace(1.0, 1.5, 2000), 0.3, 10_000),
    "network": (network, jnp.linspace(0.1, 0.9, 300), jnp.eye(300), 1000),
    "spectral": (spectral, jnp.linspace(0.1, 0.9, 4096), 0.7, 5000),
    "large": (burgers, jnp.linspace(1.0, 1.5, 50_000), 0.3, 500),
}


def compiled_bytes(step: Any, u: Any, p: Any, n: int, checkpoint: Any) -> int:
    def loss(u: Any, p: Any) -> Any:
        return jnp.sum(checkpointing.scan(lambda u, _: (step(u, p), None), u, length=n, checkpoint=checkpoint)[0] ** 2)

    return jax.jit(jax.grad(loss, (0, 1))).lower(u, p).compile().memory_analysis().temp_size_in_bytes


def planned(step: Any, u: Any, p: Any, n: int, budget: Any) -> checkpointing.Plan:
    """The plan where the parameter is being differentiated."""
    found = []

    def traced(p: Any) -> Any:
        found.append(checkpointing.plan(lambda u, _: (step(u, p), None), u, None, n, budget))
        return 0.0

    jax.eval_shape(traced, p)
    return found[0]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("states", [340, 1200])
def test_plans_hold(name: str, states: int) -> None:
    """Assert that the compiler's temporaries are within 25 % of the predicted peak, and never above the budget."""
    step, u, p, n = LOOPS[name]
    budget = Budget(states * u.nbytes)
    plan = planned(step, u, p, n, budget)
    measured = compiled_bytes(step, u, p, n, plan.checkpoint)
    assert 0.75 * plan.peak_bytes <= measured <= plan.peak_bytes <= budget.bytes
    assert measured == compiled_bytes(step, u, p, n, budget)


def test_grids_that_a_step_closes_over_cost_nothing() -> None:
    """Assert that a budget counts no gradient of fixed wavenumbers, and that a plan can be told so."""
    waves = [jnp.fft.fftfreq(12, 1 / 12), jnp.fft.fftfreq(12, 1 / 12), jnp.fft.rfftfreq(12, 1 / 12)]
    k = jnp.stack(jnp.meshgrid(*waves, indexing="ij"))
    u, n = jnp.sin(jnp.arange(3 * 12**3.0)).reshape(3, 12, 12, 12), 700

    def step(u: Any, scale: Any) -> Any:
        u_hat = jnp.fft.rfftn(u, axes=(1, 2, 3))
        vorticity = jnp.fft.irfftn(1j * jnp.cross(k, u_hat, axis=0), axes=(1, 2, 3))
        force = jnp.fft.rfftn(jnp.cross(u, vorticity, axis=0), axes=(1, 2, 3))
        return jnp.fft.irfftn((u_hat + 1e-4 * scale * force) / (1 + 1e-3 * jnp.sum(k * k, 0)), axes=(1, 2, 3))

    budget = Budget(100 * u.nbytes)
    run = lambda u, _: (step(u, 1.0), None)
    careful = checkpointing.plan(run, u, None, n, budget)
    plan = checkpointing.plan(run, u, None, n, budget, closed_over=False)
    assert plan.evaluations < careful.evaluations
    loss = lambda u, checkpoint: jnp.sum(checkpointing.scan(run, u, length=n, checkpoint=checkpoint)[0] ** 2)
    measured = [
        jax.jit(jax.grad(lambda u, c=c: loss(u, c))).lower(u).compile().memory_analysis().temp_size_in_bytes
        for c in (budget, plan.checkpoint)
    ]
    assert measured[0] == measured[1]
    assert 0.75 * plan.peak_bytes <= measured[0] <= plan.peak_bytes <= budget.bytes


def test_store_all_when_it_fits() -> None:
    """Assert that what fits is stored, with one evaluation a step and the predicted bytes."""
    step, u, p, _ = LOOPS["burgers"]
    plan = planned(step, u, p, 200, "100 MB")
    assert (plan.schedule, plan.evaluations, plan.ratio) == (store_all(200), 200, 1.0)
    assert 0.75 * plan.peak_bytes <= compiled_bytes(step, u, p, 200, plan.checkpoint) <= plan.peak_bytes


def test_an_impossible_budget_tells_the_smallest_possible() -> None:
    """Assert that the text gives the least budget, that it is one, and that a byte less is not."""
    step, u, p, n = LOOPS["burgers"]
    with pytest.raises(ValueError, match=r"The budget must be at least .* bytes\) for this loop, got 1 kB") as error:
        planned(step, u, p, n, "1 kB")
    least = int(str(error.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    assert planned(step, u, p, n, least).schedule == binomial(n, 1)
    with pytest.raises(ValueError, match="The budget must be at least"):
        planned(step, u, p, n, least - 1)


def test_a_larger_budget_never_costs_more() -> None:
    """Assert that evaluations fall from n²/2 to n as the budget grows, through 3n and 2n."""
    step, u, p, n = LOOPS["burgers"]
    sizes = [int(400_000 * 1.3**i) for i in range(36)]
    ratios = [planned(step, u, p, n, size).ratio for size in (sizes[0], sizes[8], sizes[16], sizes[-1])]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 10 > 3.1 > ratios[2] > ratios[3] == 1.0


def test_lanes_multiply_the_states() -> None:
    """Assert that a budget for a batch is the budget of one lane, and that it holds for the batched gradient."""
    step, u, p, n = LOOPS["burgers"]
    one, four = planned(step, u, p, n, 2_000_000), planned(step, u, p, n, Budget(8_000_000, lanes=4))
    assert (four.schedule, four.peak_bytes) == (one.schedule, 4 * one.peak_bytes)
    us = jnp.stack([u, 1.1 * u, 1.2 * u, 1.3 * u])
    loss = lambda u: jnp.sum(
        checkpointing.scan(lambda u, _: (step(u, 0.3), None), u, length=n, checkpoint=Budget(8_000_000, lanes=4))[0]
        ** 2
    )
    used = jax.jit(jax.vmap(jax.grad(loss))).lower(us).compile().memory_analysis().temp_size_in_bytes
    assert 0.7 * four.peak_bytes < used <= 8_000_000


def test_a_plan_prints_and_draws_itself() -> None:
    """Assert the numbers in the text, and the marked point in the picture."""
    step, u, p, n = LOOPS["burgers"]
    plan = planned(step, u, p, n, "3 MB")
    text = str(plan)
    for part in (repr(plan.schedule), "10,000 steps of 16 kB", "3 MB", f"{plan.evaluations:,}", f"{plan.ratio:.3f}"):
        assert part in text
    assert sum(plan.parts().values()) == plan.peak_bytes
    axes = plan.draw()
    assert axes.get_xlabel() == "peak memory of the gradient (MB)"
    assert [line.get_xydata()[0].tolist() for line in axes.lines if line.get_label() == "this plan"] == [
        [plan.peak_bytes / 1e6, plan.ratio]
    ]


@pytest.mark.parametrize("size", [0, -5, True, 2.5, "200", "MB", "1 XB", "-3 MB", "1e400 MB", None])
def test_misuse_of_a_budget(size: Any) -> None:
    """Assert expected, got and next step."""
    with pytest.raises(ValueError, match="`size` must be a positive number of bytes, or one with a unit"):
        Budget(size)


def test_sizes_are_read() -> None:
    """Assert units of powers of ten and two."""
    assert [Budget(s).bytes for s in ("3 B", "1.5kB", "2 MiB", "1e3 MB", 7)] == [3, 1500, 2**21, 10**9, 7]
    assert Budget("1 MB") == Budget(10**6)
    with pytest.raises(ValueError, match="`lanes` must be an integer of at least 1, got 0"):
        Budget("1 MB", lanes=0)


def test_simulations_take_budgets_and_schedules() -> None:
    """Assert that `simulate` keeps within a budget, with the gradient unchanged, and says why a disk does not fit."""

    def run(p: Any, checkpoint: Any, method: Any) -> Any:
        y0, span = jnp.linspace(0.1, 0.9, 30), {"t0": 0.0, "t1": 2.0, "dt": 0.1}
        rate = lambda t, y, p: jnp.sin(p * y)
        return sim.simulate(rate, y0, p, method=method, checkpoint=checkpoint, **span).y_final

    explicit = lambda p, c: jnp.sum(run(p, c, sim.RK4()) ** 2)
    got = [jax.grad(explicit)(0.7, c) for c in (None, Budget("20 kB"), binomial(20, 3, leaf=4), store_all())]
    assert all(float(g) == pytest.approx(float(got[0]), rel=1e-14) for g in got[1:])
    midpoint = lambda p, c: jnp.sum(run(p, c, sim.ImplicitMidpoint()) ** 2)
    got = [jax.grad(midpoint)(0.7, c) for c in (None, 7, Budget("400 kB"), binomial(20, 3, leaf=4))]
    assert all(float(g) == pytest.approx(float(got[0]), rel=1e-14) for g in got[1:])
    with pytest.raises(ValueError, match="a simulation is one compiled program"):
        run(0.7, Budget("400 kB", disk="somewhere"), sim.RK4())
