# %% [markdown]
# # Weigh the outer planets
#
# Jupiter, Saturn, Uranus and Neptune pull on each other. From nothing but 148 years of their positions, every
# 100 days, we find their four masses, by fitting a simulator with exact gradients to JPL's ephemeris DE421.
#
# The unknowns are four masses and 24 initial coordinates. The masses start 5 to 8 % off; the initial state starts
# from the positions themselves (a spline through the first of them gives the velocities).
#
# Units: astronomical units (AU) and days, so GM is in AU³/day².

# %%
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.interpolate import make_interp_spline
from scipy.optimize import least_squares
from scipy.stats import t as student
from tapeless import adjoint, checkpointing, sim

jax.config.update("jax_enable_x64", True)
started = time.perf_counter()
HERE = next(p for p in (Path.cwd(), Path.cwd() / "notebooks") if (p / "data").is_dir())
OUT = Path(os.environ.get("TAPELESS_OUT", HERE.parent / "out"))
OUT.mkdir(parents=True, exist_ok=True)

PLANETS = ("Jupiter", "Saturn", "Uranus", "Neptune")
DT = 100.0  # days; also the interval of the data
SNAPSHOTS = 20

# %% [markdown]
# ## Data
#
# Positions relative to the barycentre of the Sun and the four inner planets, in the axes of the ICRF.
# `data/make_outer_planets.py` made the file from the PyPI packages `de421` and `jplephem`. Pluto's initial state and
# mass, and the mass of the inner solar system, are taken as known.

# %%
table = np.loadtxt(HERE / "data" / "outer_planets.csv", delimiter=",", skiprows=1)
known = json.loads((HERE / "data" / "outer_planets.json").read_text())
days = table[:, 0] - table[0, 0]
observed = table[:, 1:].reshape(-1, 4, 3)
years = 1899.5 + (table[:, 0] - 2414837.5) / 365.25  # Julian years, for the axes of the plots

GM_INNER = known["gm_inner_au3_day2"]
GM_PLUTO = known["gm_pluto_au3_day2"]
GM_DE421 = np.array(list(known["gm_outer_au3_day2"].values()))
GM_START = GM_DE421 * np.array([1.06, 0.93, 1.08, 0.95])

spline = make_interp_spline(days[:40], observed[:40].reshape(40, 12), k=9)
start = {
    "log_mass": jnp.zeros(4),  # log of GM over GM_START
    "q": jnp.asarray(observed[0]),
    "v": jnp.asarray(spline.derivative()(0.0).reshape(4, 3)),
}
print(f"{len(days)} epochs over {days[-1]:.0f} days, {years[0]:.1f} to {years[-1]:.1f}")

# %% [markdown]
# ## Model
#
# Newton's attraction between six bodies: the inner solar system as one point, and the five outer ones. With the
# inner one at the origin, the equations are heliocentric: its own acceleration is subtracted from the others'.
#
#     a_i = Σ_j GM_j (r_j - r_i) / |r_j - r_i|³  -  Σ_j GM_j r_j / |r_j|³
#
# `moment` is an optional correction, used at the end: the inner planets averaged over their orbits are rings, whose
# quadrupole pulls like an oblate Sun with the pole of the ecliptic.

# %%
SELF = np.eye(6)
OBLIQUITY = np.deg2rad(84381.448 / 3600)
POLE = np.array([0.0, -np.sin(OBLIQUITY), np.cos(OBLIQUITY)])


def acceleration(t, q, v, params):
    """Heliocentric accelerations (5, 3) of the outer bodies, in AU/day²."""
    gm, moment = params
    r = jnp.concatenate([jnp.zeros((1, 3)), q])
    apart = r[None] - r[:, None]
    weight = (1 - SELF) * gm * sim.inverse_cube(jnp.sum(apart**2, axis=-1) + SELF)
    a = jnp.sum(weight[..., None] * apart, axis=1)
    return a[1:] - a[0] + quadrupole(q, gm[0], moment)


def quadrupole(q, gm, moment):
    """3/2 GM (moment/2) / r⁵ [(5 s² - 1) r - 2 (r·n) n], s = r·n / r: rings of mass-weighted radius² `moment`."""
    square = jnp.sum(q**2, axis=-1, keepdims=True)
    height = (q @ POLE)[:, None]
    strength = 0.75 * gm * moment * sim.inverse_cube(square) / square
    return strength * ((5 * height**2 / square - 1) * q - 2 * height * POLE)


outer = sim.SecondOrder(acceleration)


def simulate(unknown, moment=0.0, checkpoint=SNAPSHOTS, system=outer):
    gm = jnp.concatenate([jnp.array([GM_INNER]), GM_START * jnp.exp(unknown["log_mass"]), jnp.array([GM_PLUTO])])
    q0 = jnp.concatenate([unknown["q"], jnp.array([known["pluto_position_au"]])])
    v0 = jnp.concatenate([unknown["v"], jnp.array([known["pluto_velocity_au_day"]])])
    return sim.simulate(
        system,
        (q0, v0),
        (gm, moment),
        t0=0.0,
        t1=float(days[-1]),
        dt=DT,
        method=sim.DormandPrince8(),
        save_at=days,
        checkpoint=checkpoint,
    )


def misfit(unknown, moment=0.0, **options):
    """Positions minus observations (541, 4, 3), in AU."""
    return simulate(unknown, moment, **options).y[0][:, :4] - observed


def loss(unknown, **options):
    return jnp.sum(misfit(unknown, **options) ** 2)


# %% [markdown]
# ## Is the gradient right?
#
# Before any fit: the reverse gradient, by way of `checkpointing` with 20 snapshots, against central differences, the
# slope of Taylor remainders, and forward mode. The point is the start of the fit, which is neither symmetric nor
# stationary.

# %%
report = adjoint.check_gradient(loss, start)
print(report)
assert report.passed

# %%
figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
axis.loglog(report.steps, report.remainders, "o-", ms=4, label="Taylor remainder")
error = np.abs(report.central - report.reverse) / abs(report.reverse)
axis.loglog(report.steps, error, "s-", ms=4, label="central differences, relative error")
reference = report.remainders[10] * (report.steps / report.steps[10]) ** 2
axis.loglog(report.steps, reference, "k:", lw=1, label="slope 2")
axis.set(xlabel="step along the direction (relative)", ylabel="remainder (AU²), or relative error")
axis.set(ylim=(1e-16, 1e7), title="The gradient check")
axis.legend(loc="upper left")
figure.savefig(OUT / "gradient_check.png", dpi=150)

# %% [markdown]
# ## Fit
#
# Levenberg-Marquardt (MINPACK's, by way of SciPy) on the exact Jacobian: 6,492 residuals, 28 unknowns. Forward mode
# needs one tangent for each of 28 columns, reverse mode one sweep for each of 6,492 rows; both are timed, and the
# cheaper one is used.

# %%
flat_start, unflatten = jax.flatten_util.ravel_pytree(start)


def residuals(x, moment=0.0):
    return misfit(unflatten(x), moment).ravel()


residuals_of = jax.jit(residuals)
jacobian_of = jax.jit(jax.jacfwd(residuals))


def measure(function, at, repeats=15):
    """Median seconds of a compiled function."""
    jax.block_until_ready(function(at))
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(at))
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


binomial_run = jax.jit(jax.value_and_grad(loss)).lower(start).compile()
forward_seconds = measure(jacobian_of, flat_start, repeats=3)
reverse_seconds = measure(binomial_run, start) * observed.size  # one row of the Jacobian costs what a gradient costs
print(f"Jacobian: forward {forward_seconds:.3f} s, reverse about {reverse_seconds:.0f} s")
assert forward_seconds < reverse_seconds


def fit(moment):
    """Masses, states, covariance and trace of a fit."""
    trace = []

    def observed_residuals(x):
        r = np.asarray(residuals_of(x, moment))
        trace.append((float(np.sqrt(np.mean(r**2))), GM_START * np.exp(x[:4]) / GM_DE421 - 1))
        return r

    found = least_squares(
        observed_residuals,
        np.asarray(flat_start),
        jac=lambda x: np.asarray(jacobian_of(x, moment)),
        method="lm",
        x_scale="jac",
        xtol=1e-14,
        ftol=1e-14,
        gtol=1e-14,
    )
    freedom = observed.size - len(found.x)
    covariance = np.linalg.inv(found.jac.T @ found.jac) * 2 * found.cost / freedom
    return found, covariance, trace, student.ppf(0.975, freedom)


def show_trace(trace):
    print("evaluation   rms (AU)   relative error of the masses")
    for i, (rms, off) in enumerate(trace):
        errors = "  ".join(f"{name[0]} {e:+.1e}" for name, e in zip(PLANETS, off, strict=True))
        print(f"{i:10d}  {rms:9.2e}   {errors}")


point, point_covariance, point_trace, quantile = fit(0.0)
show_trace(point_trace)

# %% [markdown]
# What it leaves of the positions, 4·10⁻⁷ AU or sixty kilometres, is not noise (see below). The model takes the Sun and
# the four inner planets as one point. Averaged over their orbits, the inner planets are rings around the Sun, and the
# quadrupole of these rings is known (it is computed, not fitted). With it:

# %%
found, covariance, trace, _ = fit(known["inner_moment_au2"])
show_trace(trace)

# %% [markdown]
# ## Four masses

# %%
masses = GM_START * np.exp(found.x[:4])
point_masses = GM_START * np.exp(point.x[:4])
intervals = quantile * np.sqrt(np.diag(covariance)[:4]) * masses
rms_of = {"point": np.sqrt(2 * point.cost / observed.size), "rings": np.sqrt(2 * found.cost / observed.size)}
print("GM (AU³/day²)   found              DE421              relative error   95 % interval   (one point)")
for k, name in enumerate(PLANETS):
    gm, truth = masses[k], GM_DE421[k]
    print(
        f"{name:13s}   {gm:.10e}   {truth:.10e}   {gm / truth - 1:+14.1e}   ± {intervals[k] / gm:.1e}"
        f"       ({point_masses[k] / truth - 1:+.1e})"
    )
print(f"rms of the residuals: {rms_of['rings']:.1e} AU with rings, {rms_of['point']:.1e} AU with one point")

# %% [markdown]
# The intervals are those of least squares with independent errors. They are too narrow: what is left is still not
# noise but what the model leaves out (the inner planets' motion along their orbits, relativity), so an error of a
# few intervals is to be expected.

# %% [markdown]
# ## What is left
#
# Residuals over time, with the inner planets as one point and as rings. With one point they move with the planets'
# periods and grow towards both ends.

# %%
left = {
    "one point": np.asarray(misfit(unflatten(jnp.asarray(point.x)))),
    "with rings": np.asarray(misfit(unflatten(jnp.asarray(found.x)), known["inner_moment_au2"])),
}
figure, axes = plt.subplots(4, 1, figsize=(7, 7.6), sharex=True, layout="constrained")
for k, (axis, name) in enumerate(zip(axes, PLANETS, strict=True)):
    rms = {}
    for (label, residual), color in zip(left.items(), ("tab:orange", "tab:blue"), strict=True):
        lines = axis.plot(years, 1e6 * residual[:, k], lw=0.9, color=color)
        lines[0].set_label(label)
        rms[label] = 1e6 * np.sqrt(np.mean(residual[:, k] ** 2))
    axis.set_ylabel("residual (10⁻⁶ AU)", fontsize=9)
    axis.set_title(f"{name}: rms {rms['one point']:.2f}, with rings {rms['with rings']:.2f} (10⁻⁶ AU)", fontsize=10)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=9)
figure.suptitle("Residuals in x, y and z", fontsize=11, x=0.3, y=0.985)
axes[-1].set_xlabel("year")
figure.savefig(OUT / "residuals.png", dpi=150)

# %% [markdown]
# ## What a gradient costs
#
# The step evaluations are counted by a callback inside the acceleration, not taken from the schedule. Bytes are the
# compiler's own account of temporary memory.

# %%
evaluations = 0


def count():
    global evaluations
    evaluations += 1


def counted(t, q, v, params):
    jax.debug.callback(count)
    return acceleration(t, q, v, params)


counted_system = sim.SecondOrder(counted)
jax.block_until_ready(jax.jit(jax.grad(lambda u: loss(u, system=counted_system)))(start))
jax.effects_barrier()
steps = round(days[-1] / DT)
step_evaluations = evaluations // sim.DormandPrince8.stages
schedule = checkpointing.binomial(steps, SNAPSHOTS)

forward_run = jax.jit(loss).lower(start).compile()
store_all_run = jax.jit(jax.value_and_grad(lambda u: loss(u, checkpoint=None))).lower(start).compile()
seconds = {
    "forward": measure(forward_run, start),
    "binomial": measure(binomial_run, start),
    "store_all": measure(store_all_run, start),
}
peak = {
    "binomial": binomial_run.memory_analysis().temp_size_in_bytes,
    "store_all": store_all_run.memory_analysis().temp_size_in_bytes,
}
g_binomial, g_all = binomial_run(start)[1], store_all_run(start)[1]
schedule_difference = max(
    float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
    for a, b in zip(jax.tree.leaves(g_binomial), jax.tree.leaves(g_all), strict=True)
)
runs = {name: seconds[name] / seconds["forward"] for name in seconds}
print(f"steps                      {steps}")
print(f"snapshots                  {SNAPSHOTS}")
print(f"step evaluations, counted  {step_evaluations}")
print(f"  by the schedule          {steps + schedule.advances + 1} = n + t(n, s) + 1")
print(f"temporaries, 20 snapshots  {peak['binomial'] / 1e6:.2f} MB")
print(f"temporaries, all states    {peak['store_all'] / 1e6:.2f} MB")
print(f"one forward run            {1e3 * seconds['forward']:.1f} ms")
print(f"value and gradient         {1e3 * seconds['binomial']:.1f} ms = {runs['binomial']:.1f} runs")
print(f"the same, all states       {1e3 * seconds['store_all']:.1f} ms = {runs['store_all']:.1f} runs")
print(f"the gradients differ by    {schedule_difference:.1e} (relative)")

# %% [markdown]
# Here both fit with ease. What counts is that the first number does not grow with the number of steps. JAX's own
# derivative of the same loop, which keeps the residuals of every step, needs 17 MB and more time
# (`benchmarks/pullback.py`).

# %% [markdown]
# ## What a planet's place says of the masses
#
# Change of each planet's final position for a relative change of each mass: the exact derivative, from the Jacobian
# of the fit. Jupiter's mass moves everything. Uranus and Neptune show theirs mostly in each other, a hundred times more
# weakly: that is why these two masses come out last in precision.

# %%
of_masses = np.asarray(found.jac).reshape(-1, 4, 3, 28)[-1, :, :, :4]
sensitivity = np.linalg.norm(of_masses, axis=1)
figure, axis = plt.subplots(figsize=(6, 4.4), layout="constrained")
image = axis.imshow(np.log10(sensitivity), cmap="viridis")
axis.set_xticks(range(4), [f"mass of\n{name}" for name in PLANETS])
axis.set_yticks(range(4), [f"{name}'s\nposition" for name in PLANETS])
middle = np.log10(sensitivity).mean()
for i in range(4):
    for j in range(4):
        color = "black" if np.log10(sensitivity[i, j]) > middle else "white"
        axis.text(j, i, f"{sensitivity[i, j]:.2g}", ha="center", va="center", color=color)
axis.set_title(f"Final position ({years[-1]:.0f}) per relative change of mass (AU)", fontsize=11)
figure.colorbar(image, label="log₁₀ of the value in AU")
figure.savefig(OUT / "sensitivity.png", dpi=150)

# %%
result = {
    "planets": {
        name.lower(): {
            "found": float(masses[k]),
            "reference": float(GM_DE421[k]),
            "relative_error": float(masses[k] / GM_DE421[k] - 1),
            "interval": [float(masses[k] - intervals[k]), float(masses[k] + intervals[k])],
            "relative_error_without_rings": float(point_masses[k] / GM_DE421[k] - 1),
        }
        for k, name in enumerate(PLANETS)
    },
    "unit": "AU^3/day^2",
    "rms_au": {key: float(value) for key, value in rms_of.items()},
    "gradient_check": {
        "verdict": report.verdict,
        "difference_error": report.difference_error,
        "taylor_slope": report.slope,
        "forward_reverse": report.forward_reverse,
    },
    "steps": steps,
    "snapshots": SNAPSHOTS,
    "step_evaluations": step_evaluations,
    "peak_bytes": int(peak["binomial"]),
    "peak_bytes_all_states": int(peak["store_all"]),
    "gradients_differ": schedule_difference,
    "gradient_over_forward": seconds["binomial"] / seconds["forward"],
    "seconds": time.perf_counter() - started,
}
(OUT / "weigh_the_planets.json").write_text(json.dumps(result, indent=2) + "\n")
print(f"{result['seconds']:.0f} s in all; report, pictures and numbers are in {OUT.name}/")
