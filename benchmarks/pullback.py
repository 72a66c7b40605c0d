"""What does a gradient cost, and what are its parts?

On the six bodies of `notebooks/weigh_the_planets.py`, for Dormand-Prince 8 and Kahan-Li 8, in one run and interleaved:
one step, its pullback, and the fusions of each in the optimised program; a forward run, and value and gradient with 20
snapshots, with all states, and with all residuals (JAX's own derivative of `lax.scan` over the same step), with the
temporaries that the compiler reports. Written to `benchmarks/results/pullback.md`.

    python benchmarks/pullback.py
"""

import re
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tapeless import checkpointing, sim

jax.config.update("jax_enable_x64", True)

ROUNDS, STEPS, SNAPSHOTS, DT = 21, 540, 20, 100.0
SELF = np.eye(6)
GM = jnp.array([2.959e-4, 2.825e-7, 8.46e-8, 1.292e-8, 1.524e-8, 2.2e-12])  # AU³/day²
RADII = np.array([5.2, 9.55, 19.2, 30.1, 39.5])  # AU


def acceleration(t, q, v, gm):
    """Heliocentric attraction of six bodies, in AU/day²."""
    r = jnp.concatenate([jnp.zeros((1, 3)), q])
    apart = r[None] - r[:, None]
    weight = (1 - SELF) * gm * sim.inverse_cube(jnp.sum(apart**2, axis=-1) + SELF)
    a = jnp.sum(weight[..., None] * apart, axis=1)
    return a[1:] - a[0]


def initial_state():
    """Circular orbits, a little inclined, at scattered longitudes."""
    angle = np.array([0.3, 1.9, 3.1, 4.6, 5.8])
    tilt = np.array([0.02, 0.04, 0.01, 0.03, 0.3])
    speed = np.sqrt(float(GM[0]) / RADII)
    q = RADII[:, None] * np.stack([np.cos(angle), np.sin(angle), tilt * np.sin(angle)], -1)
    v = speed[:, None] * np.stack([-np.sin(angle), np.cos(angle), tilt * np.cos(angle)], -1)
    return jnp.asarray(q), jnp.asarray(v)


def one_step(method):
    """A single step as a function of state and masses, with JAX's own derivative."""

    def step(y, gm):
        return method.step(field(gm), jnp.array(0.0), jnp.array(DT), y, ()).y

    return step


def field(gm):
    """The equations with the masses filled in."""

    def rate(t, y):
        return y[1], acceleration(t, y[0], y[1], gm)

    return sim.Field(rate, lambda t, q: acceleration(t, q, None, gm))


def programs(method):
    """Compiled programs by name; all take (y, gm)."""
    step = one_step(method)

    def scanned(y, gm):
        return lax.scan(lambda c, _: (step(c, gm), c), y, None, length=STEPS)

    def pull(states, gm, bar):
        def body(carry, y):
            bar, total = carry
            bar, more = jax.vjp(step, y, gm)[1](bar)
            return (bar, total + more), None

        return lax.scan(body, (bar, jnp.zeros_like(gm)), states)[0]

    def run(checkpoint):
        def loss(y, gm):
            system = sim.SecondOrder(acceleration)
            end = sim.simulate(
                system, y, gm, t0=0.0, t1=STEPS * DT, dt=DT, method=method, checkpoint=checkpoint
            ).y_final
            return jnp.sum(jnp.sin(end[0])) + 1e3 * jnp.sum(end[1] ** 2)

        return loss

    def plain(y, gm):
        end = scanned(y, gm)[0]
        return jnp.sum(jnp.sin(end[0])) + 1e3 * jnp.sum(end[1] ** 2)

    y = initial_state()
    states = jax.jit(scanned)(y, GM)[1]
    gradient = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
    lowered = {
        "steps": (jax.jit(lambda y, gm: scanned(y, gm)[0]), (y, GM)),
        "pullbacks": (jax.jit(pull), (states, GM, y)),
        "forward": (jax.jit(run(SNAPSHOTS)), (y, GM)),
        "gradient, 20 snapshots": (gradient(run(SNAPSHOTS)), (y, GM)),
        "gradient, all states": (gradient(run(None)), (y, GM)),
        "gradient, all residuals": (gradient(plain), (y, GM)),
    }
    return {name: (f.lower(*args).compile(), args) for name, (f, args) in lowered.items()}


def race(compiled):
    """Median seconds of each program, interleaved."""
    taken = {name: [] for name in compiled}
    for _ in range(ROUNDS):
        for name, (f, args) in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(f(*args))
            taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in taken.items()}


def report(method):
    """The lines of one method."""
    compiled = programs(method)
    seconds = race(compiled)
    fusions = {name: len(re.findall(r"\bfusion\(", f.as_text())) for name, (f, _) in compiled.items()}
    kilobytes = {name: f.memory_analysis().temp_size_in_bytes / 1e3 for name, (f, _) in compiled.items()}
    name = type(method).__name__
    step, pull = (1e6 * seconds[key] / STEPS for key in ("steps", "pullbacks"))
    schedule = checkpointing.binomial(STEPS, SNAPSHOTS)
    replays = schedule.advances - (STEPS - 1)
    forward, whole = seconds["forward"], seconds["gradient, 20 snapshots"]
    replayed = replays * forward / STEPS
    lines = [
        f"## {name}, {STEPS} steps",
        "",
        f"One step {step:.1f} μs ({fusions['steps']} fusions), its pullback {pull:.1f} μs "
        f"({fusions['pullbacks']} fusions): ratio **{pull / step:.2f}**.",
        "",
        f"One gradient with {SNAPSHOTS} snapshots is **{whole / forward:.1f}** forward runs: forward sweep 1.0, "
        f"{replays} replayed steps {replayed / forward:.1f}, pullbacks {(whole - forward - replayed) / forward:.1f}.",
        "",
        "| program | ms | forward runs | temporaries (kB) | fusions |",
        "|---|---|---|---|---|",
    ]
    for key in ("forward", "gradient, 20 snapshots", "gradient, all states", "gradient, all residuals"):
        numbers = (
            f"{1e3 * seconds[key]:.2f}",
            f"{seconds[key] / forward:.1f}",
            f"{kilobytes[key]:.0f}",
            str(fusions[key]),
        )
        lines.append("| " + " | ".join((key, *numbers)) + " |")
    return "\n".join(lines)


def main():
    """Measure both methods and write the results."""
    parts = [report(method) for method in (sim.DormandPrince8(), sim.KahanLi8())]
    text = "\n\n".join(
        [
            "# What a gradient costs",
            f"Six bodies, float64, JAX {jax.__version__} on the CPU; medians of {ROUNDS} interleaved runs. "
            "Made by `benchmarks/pullback.py`.",
            *parts,
        ]
    )
    path = Path(__file__).parent / "results" / "pullback.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
