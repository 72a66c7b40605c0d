# %% [markdown]
# # A gradient in bounded memory
#
# You have a simulator, written with `jax.lax.scan`, and its gradient runs out of memory. Here is one: a vortex that
# breaks down into turbulence, whose gradient would need 16 GB for 10,240 steps. One import is changed, and the memory
# no longer grows with the number of steps. What it costs in time is measured, next to other ways to do it in JAX.
#
# All quantities are dimensionless: length in units of L, velocity in units of V, time in L/V, for a vortex of size
# 2πL and speed V. The Reynolds number VL/ν is 1000.

# %%
# Shared with horizon_sweep.py.
import functools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from scipy.integrate import simpson
from scipy.signal import resample
from tapeless import adjoint, checkpointing

jax.config.update("jax_enable_x64", True)

# %%
started = time.perf_counter()
HERE = next(p for p in (Path.cwd(), Path.cwd() / "notebooks") if (p / "data").is_dir())
OUT = Path(os.environ.get("TAPELESS_OUT", HERE.parent / "out"))
OUT.mkdir(parents=True, exist_ok=True)
LIVE = int(os.environ.get("TAPELESS_LIVE_STEPS", "160"))  # the longest horizon that is run here: 40, 160, ...

# %% [markdown]
# ## The simulator
#
# The Taylor-Green vortex: incompressible flow in the periodic box [0, 2π]³,
#
#     ∂u/∂t = u × ω - ∇p + ν ∇²u,   ∇·u = 0,   ω = ∇ × u.
#
# In space, Fourier series on 20³ points; wave numbers of 7 and more are dropped (the 2/3 rule), and the pressure is
# eliminated by projecting on the fields without divergence. In time, the classical Runge-Kutta method. The state is
# the velocity at the grid points, (3, 20, 20, 20), which takes 192 kB.

# %%
# Shared with horizon_sweep.py.
N, NU, DT = 20, 1e-3, 0.05
AXES = (1, 2, 3)

grid = np.arange(N) * 2 * np.pi / N
X, Y, Z = np.meshgrid(grid, grid, grid, indexing="ij")
WAVES = np.fft.fftfreq(N, 1 / N)
K = np.stack(np.meshgrid(WAVES, WAVES, np.fft.rfftfreq(N, 1 / N), indexing="ij"))
K2 = np.sum(K**2, axis=0)
KEPT = np.all(np.abs(K) < N / 3, axis=0)
DIRECTION = K / np.sqrt(np.maximum(K2, 1))
taylor_green = np.stack([np.sin(X) * np.cos(Y) * np.cos(Z), -np.cos(X) * np.sin(Y) * np.cos(Z), np.zeros_like(X)])


def spectral(u):
    return jnp.fft.rfftn(u, axes=AXES)


def physical(u_hat):
    return jnp.fft.irfftn(u_hat, s=(N, N, N), axes=AXES)


def project(u_hat):
    """The part without divergence, of the wave numbers that are kept."""
    return KEPT * (u_hat - DIRECTION * jnp.sum(DIRECTION * u_hat, axis=0))


def curl(u_hat):
    return 1j * jnp.cross(K, u_hat, axis=0)


def rate(u_hat):
    turning = jnp.cross(physical(u_hat), physical(curl(u_hat)), axis=0)
    return project(spectral(turning)) - NU * K2 * u_hat


def step(u, _):
    u_hat = spectral(u)
    a = rate(u_hat)
    b = rate(u_hat + DT / 2 * a)
    c = rate(u_hat + DT / 2 * b)
    d = rate(u_hat + DT * c)
    return physical(u_hat + DT / 6 * (a + 2 * b + 2 * c + d)), None


def divergence_free(u):
    return physical(project(spectral(u)))


def vorticity(u):
    return physical(curl(spectral(u)))


def energy(u):
    return jnp.mean(jnp.sum(u**2, axis=0)) / 2


def enstrophy(u):
    return energy(vorticity(u))


# %% [markdown]
# First the vortex alone, to t = 20. Three things are known. Energy and enstrophy start from 1/8 and 3/8. Energy only
# leaves by viscosity, dE/dt = -2ν Z, with Z the enstrophy. And the divergence stays zero.
#
# The vortex breaks down into ever smaller ones, and the dissipation has its maximum near t = 9 (Brachet and others, J.
# Fluid Mech. 130 (1983), doi:10.1017/S0022112083001159). With 20 points a side the smallest of them are missing: the
# maximum comes a little late and is too low. To see what a gradient costs, the flow is good enough.


# %%
def divergence(u):
    return jnp.fft.irfftn(1j * jnp.sum(K * spectral(u), axis=0), s=(N, N, N))


def observed_step(u, _):
    after, _ = step(u, None)
    return after, (u, energy(u), enstrophy(u), jnp.max(jnp.abs(divergence(u))))


_, history = jax.jit(lambda u: lax.scan(observed_step, u, length=401))(taylor_green)
flow, energies, enstrophies, divergences = map(np.asarray, history)
times = DT * np.arange(401)
lost = energies[0] - energies[-1]
balance = abs(simpson(2 * NU * enstrophies, x=times) / lost - 1)
print(f"energy and enstrophy at t = 0       {energies[0]:.15f}, {enstrophies[0]:.15f}")
print(f"energy lost until t = 20            {lost:.10f}")
print(f"  against the integral of 2ν Z      {balance:.1e} (relative difference)")
print(f"energy never grows                  {bool(np.all(np.diff(energies) < 0))}")
print(f"largest divergence, all times       {divergences.max():.1e}")
print(f"largest enstrophy                   {enstrophies.max():.2f} at t = {times[enstrophies.argmax()]:.1f}")
assert balance < 1e-6
assert divergences.max() < 1e-12

# %%
figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
axis.plot(times, 2 * NU * enstrophies, lw=2.5, color="tab:blue", label="2ν Z")
slope = -np.gradient(energies, DT, edge_order=2)
axis.plot(times, slope, "--", lw=1.5, color="black", label="-dE/dt, from differences")
axis.set(xlabel="time t (dimensionless)", ylabel="dissipation rate (dimensionless)", ylim=(0, None), xlim=(0, 20))
axis.set_title("Energy leaves by viscosity alone")
axis.legend()
figure.savefig(OUT / "dissipation.png", dpi=150)


# %%
def fine(field, points=120):
    """A periodic field (..., N, N) on more points: its Fourier series, evaluated there; both ends included."""
    for axis in (-2, -1):
        field = resample(field, points, axis=axis)
        field = np.concatenate([field, np.take(field, [0], axis=axis)], axis=axis)
    return field


def vorticity_slice(u, level=0):
    """Magnitude of the vorticity at z = grid[level]."""
    return np.linalg.norm(fine(np.asarray(vorticity(u))[:, :, :, level]), axis=0)


def show(axis, values, **options):
    """An image of values (x, y), with x to the right."""
    image = axis.imshow(values.T, origin="lower", extent=(0, 2 * np.pi, 0, 2 * np.pi), **options)
    axis.set_xticks([0, np.pi, 2 * np.pi], ["0", "π", "2π"])
    axis.set_yticks([0, np.pi, 2 * np.pi], ["0", "π", "2π"])
    axis.set_xlabel("x (dimensionless)")
    return image


slices = {t: vorticity_slice(flow[round(t / DT)]) for t in (0, 4, 8, 12)}
figure, axes = plt.subplots(1, 4, figsize=(11, 3.4), sharey=True, layout="constrained")
top = max(values.max() for values in slices.values())
for axis, (t, values) in zip(axes, slices.items(), strict=True):
    image = show(axis, values, vmin=0, vmax=top, cmap="magma")
    axis.set_title(f"t = {t}")
axes[0].set_ylabel("y (dimensionless)")
figure.colorbar(image, ax=axes, label="|ω| (dimensionless)")
figure.suptitle("Magnitude of the vorticity at z = 0", fontsize=11)
figure.savefig(OUT / "vorticity.png", dpi=150)

# %% [markdown]
# ## Its gradient, and where that ends
#
# How does the enstrophy at the end depend on the velocity at the start? The answer is a field of 24,000 numbers. It is
# computed at a generic point: the vortex plus a random flow, for the vortex alone is so symmetric that a wrong gradient
# could pass. Whatever start is given, its divergence-free part is what flows.


# %%
# Shared with horizon_sweep.py.
def random_flow(seed):
    """A random field without divergence, of wave numbers up to 3 and unit mean square."""
    u_hat = np.asarray(project(spectral(np.random.default_rng(seed).standard_normal((3, N, N, N)))))
    u = np.asarray(physical(np.where(K2 <= 9, u_hat, 0)))
    return u / np.sqrt(np.mean(np.sum(u**2, axis=0)))


u_start = jnp.asarray(taylor_green + 0.2 * random_flow(seed=0))


def store_all(u, steps):
    return lax.scan(step, u, length=steps)[0]


def loss(u, loop, steps):
    return enstrophy(loop(divergence_free(u), steps))


def gradient(u, loop, steps):
    return jax.grad(loss)(u, loop, steps)


@functools.cache
def compiled(function, loop, steps):
    return jax.jit(function, static_argnums=(1, 2)).lower(u_start, loop, steps).compile()


# %% [markdown]
# `jax.lax.scan` keeps what each step needs to be reversed. The compiler says how much memory that takes, so there is
# no need to run it:

# %%
HORIZONS = (40, 160, 640, 2560, 10240)


def temporaries(loop, steps):
    """Bytes of temporary memory of a gradient, by the compiler's own account."""
    return compiled(gradient, loop, steps).memory_analysis().temp_size_in_bytes


predicted = {steps: temporaries(store_all, steps) for steps in HORIZONS}
for steps, size in predicted.items():
    print(f"{steps:6d} steps   {size / 1e6:9.1f} MB   {size / steps / 1e6:.2f} MB a step")

# %% [markdown]
# Eight states' worth for each step. The gradient itself is fine, for as long as it fits.
#
# ## One import
#
# `checkpointing.scan` takes the same arguments, and one more: how many states may be held.

# %%
# Shared with horizon_sweep.py.
SNAPSHOTS = 64


def bounded(u, steps, checkpoint=SNAPSHOTS):
    return checkpointing.scan(step, u, length=steps, checkpoint=checkpoint)[0]


# %%
def distance(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


g_all = compiled(gradient, store_all, LIVE)(u_start)
g_bounded = compiled(gradient, bounded, LIVE)(u_start)
tight = functools.partial(bounded, checkpoint=8)
differences = {SNAPSHOTS: distance(g_bounded, g_all), 8: distance(compiled(gradient, tight, LIVE)(u_start), g_all)}
for snapshots, difference in differences.items():
    print(f"{LIVE} steps, {snapshots:2d} snapshots: differs from that of lax.scan by {difference:.1e} (relative)")
    assert difference < 1e-12
spurious = float(jnp.max(jnp.abs(divergence(g_bounded))) / jnp.max(jnp.abs(g_bounded)))
print(f"divergence of the gradient, relative to its largest value: {spurious:.1e}")
predicted_bounded = {steps: temporaries(bounded, steps) for steps in (640, 10240)}
for steps, size in predicted_bounded.items():
    print(f"{steps:6d} steps, {SNAPSHOTS} snapshots: {size / 1e6:.1f} MB of temporaries")

# %% [markdown]
# They agree; that does not yet make them right. So the gradient, by way of 8 snapshots, is compared with what does not
# use it: central differences and Taylor remainders along a random direction, and forward mode.

# %%
report = adjoint.check_gradient(lambda u: loss(u, tight, LIVE // 2), u_start)
print(report)
assert report.passed

# %% [markdown]
# ## A budget instead of a number
#
# Memory can be said in bytes. The planner looks at the step, without running it, and finds the schedule with the fewest
# evaluations that keeps within the budget (`closed_over=False`: no gradient of the wavenumbers is wanted). Its
# prediction is compared with the compiler's account.

# %%
# Shared with horizon_sweep.py.
BUDGET = checkpointing.Budget("50 MB")
budgeted = functools.partial(bounded, checkpoint=BUDGET)

# %%
plan = checkpointing.plan(step, u_start, None, length=HORIZONS[-1], budget=BUDGET, closed_over=False)
print(plan)
planned_compiler = temporaries(budgeted, HORIZONS[-1])
print(f"the compiler's account: {planned_compiler / 1e6:.1f} MB")

# %% [markdown]
# ## Memory and time against the horizon
#
# What else there is, all of it exact:
#
# - *lax.scan* stores everything.
# - *nested*: an outer scan over about √n blocks, each a `jax.checkpoint` of an inner scan. It holds √n states, and
#   everything of the √n steps of a block.
# - *nested twice*: the same with the step under `jax.checkpoint` as well. It holds 2√n states, and runs each step once
#   more.
# - *equinox*: the checkpointed while loop that Diffrax uses, with 64 checkpoints. (Equinox keeps it in
#   `equinox.internal`, whose names may change.)

# %%
# Shared with horizon_sweep.py.


def nested(u, steps, step=step):
    inner = next(m for m in range(math.isqrt(steps), 0, -1) if steps % m == 0)
    block = jax.checkpoint(lambda u: lax.scan(step, u, length=inner)[0], prevent_cse=False)
    return lax.scan(lambda u, _: (block(u), None), u, length=steps // inner)[0]


def nested_twice(u, steps):
    return nested(u, steps, jax.checkpoint(step, prevent_cse=False))


def equinox_loop(u, steps):
    def goes_on(state):
        return state[0] < steps

    def advance(state):
        return state[0] + 1, step(state[1], None)[0]

    options = {"kind": "checkpointed", "max_steps": steps, "checkpoints": SNAPSHOTS}
    return eqxi.while_loop(goes_on, advance, (0, u), **options)[1]


LOOPS = {
    "lax.scan": store_all,
    "nested": nested,
    "nested twice": nested_twice,
    "equinox": equinox_loop,
    "tapeless": bounded,
    "tapeless, 50 MB": budgeted,
}

# %% [markdown]
# The long runs take a quarter of an hour, so they were done beforehand by `horizon_sweep.py`, which runs the cells of
# this notebook that name it. It keeps, for each gradient, the temporary memory by the compiler's account; the peak
# resident memory of a process that computes it, above that of a process that only runs forward (compiling apart); and
# the seconds.

# %%
stored = json.loads((HERE / "data" / "horizon_sweep.json").read_text())
runs = {(run["loop"], run["steps"]): run for run in stored["runs"]}
versions = ", ".join(f"{name} {number}" for name, number in stored["versions"].items())
print(f"{stored['date']}, {stored['machine']['cores']} cores of {stored['machine']['processor']}")
print(f"{versions}; {stored['total_seconds'] / 60:.0f} minutes in all")


def table(title, value, loops=tuple(LOOPS), digits=1):
    """Rows of loops, columns of horizons; what was not run is a dash."""
    print(f"\n{title:36s}" + "".join(f"{steps:>10,d}" for steps in HORIZONS))
    for loop in loops:
        values = [value(runs[loop, steps]) for steps in HORIZONS]
        print(f"{loop:36s}" + "".join("         -" if v is None else f"{v:10,.{digits}f}" for v in values))


def compiler_megabytes(run):
    return run["temporary_bytes"] / 1e6


def resident_megabytes(run):
    return (run["peak_bytes"] - runs["forward", run["steps"]]["peak_bytes"]) / 1e6 if "peak_bytes" in run else None


def seconds_of(run):
    return run.get("seconds")


def forward_runs(run):
    return run["seconds"] / runs["forward", run["steps"]]["seconds"] if "seconds" in run else None


table("compiler's temporaries (MB)", compiler_megabytes)
table("resident, above forward (MB)", resident_megabytes, digits=0)
table("seconds", seconds_of, ("forward", *LOOPS))
table("seconds, in forward runs", forward_runs)
apart = max(run["difference"] for run in stored["runs"] if "difference" in run)
print(f"\nlargest relative difference of two gradients at one horizon: {apart:.1e}")

# %% [markdown]
# The cheap ones again, here and now, to see that the file tells the truth:

# %%
short = [steps for steps in HORIZONS if steps <= LIVE]
live = {}
print(f"{'':16s} steps   temporaries (MB)   in the file   seconds   in the file")
for steps in short:
    for loop, run_loop in LOOPS.items():
        program = compiled(gradient, run_loop, steps)
        size = program.memory_analysis().temp_size_in_bytes
        begin = time.perf_counter()
        result = jax.block_until_ready(program(u_start))
        taken = time.perf_counter() - begin
        live[loop, steps] = {"temporary_bytes": size, "seconds": taken, "gradient": result}
        then = runs[loop, steps]
        print(
            f"{loop:16s} {steps:5d}   {size / 1e6:16.1f}   {compiler_megabytes(then):11.1f}   {taken:7.2f}"
            f"   {then['seconds']:11.2f}"
        )
        assert distance(result, live["lax.scan", steps]["gradient"]) < 1e-12

# %%
if LIVE >= 160:  # the memory of fewer steps is lost in that of Python and JAX
    command = [sys.executable, str(HERE / "horizon_sweep.py"), "--steps", str(LIVE), "--out", "-"]
    command += ["--loops", "forward", "tapeless", "lax.scan"]
    again = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["runs"]
    for run in again[1:]:
        resident = (run["peak_bytes"] - again[0]["peak_bytes"]) / 1e6
        then = resident_megabytes(runs[run["loop"], LIVE])
        print(f"{run['loop']:9s} {LIVE} steps: {resident:4.0f} MB resident above forward; in the file {then:4.0f} MB")

# %%
COLORS = {
    "lax.scan": "black",
    "nested": "tab:orange",
    "nested twice": "tab:brown",
    "equinox": "tab:green",
    "tapeless": "tab:blue",
    "tapeless, 50 MB": "tab:purple",
}
MARKS = dict(zip(LOOPS, "osDv^P", strict=True))
LABELS = {
    "lax.scan": "lax.scan, stores everything",
    "equinox": "equinox, 64 checkpoints",
    "tapeless": "tapeless, 64 snapshots",
    "tapeless, 50 MB": "tapeless, budget of 50 MB",
}
figure, axes = plt.subplots(1, 3, figsize=(11.5, 4.6), layout="constrained")
panels = (
    (compiler_megabytes, "temporary memory, compiler (MB)"),
    (resident_megabytes, "peak resident memory above forward (MB)"),
    (seconds_of, "time of a gradient (s)"),
)
for axis, (value, label) in zip(axes, panels, strict=True):
    for loop in LOOPS:
        ran = [(n, value(runs[loop, n])) for n in HORIZONS if "seconds" in runs[loop, n]]
        style = {"color": COLORS[loop], "marker": MARKS[loop], "ms": 5, "lw": 1.3}
        axis.plot(*zip(*ran, strict=True), label=LABELS.get(loop, loop), **style)
    axis.set(xlabel="steps (dimensionless time 0.05 each)", ylabel=label, xscale="log", yscale="log")
    axis.minorticks_off()
    axis.set_xticks(HORIZONS, [f"{n:,}" for n in HORIZONS], fontsize=9)
    axis.grid(alpha=0.3)
axes[2].plot(HORIZONS, [runs["forward", n]["seconds"] for n in HORIZONS], "k:", lw=1.3, label="forward run")
fits = max(n for n in HORIZONS if "seconds" in runs["lax.scan", n])
beyond = [n for n in HORIZONS if n >= fits]
sizes = [compiler_megabytes(runs["lax.scan", n]) for n in beyond]
style = {"color": "black", "marker": "o", "mfc": "white", "ms": 5, "lw": 1.3, "zorder": 1}
(predicted_line,) = axes[0].plot(beyond, sizes, "--", label="predicted, not run", **style)
for axis in axes[:2]:
    axis.set_ylim(3, 3e4)
handles, _ = axes[2].get_legend_handles_labels()
figure.legend(handles=[*handles, predicted_line], loc="outside lower center", ncols=4, fontsize=9)
figure.suptitle("A gradient of the Taylor-Green flow", fontsize=11)
figure.savefig(OUT / "horizon.png", dpi=150)

# %% [markdown]
# - *lax.scan* is the fastest, and its memory grows by 1.5 MB a step. The 16 GB at 10,240 steps were not tried.
# - *nested* is the next fastest. Its memory grows as √n: four times the steps, twice the memory. A hundred megabytes
#   may well be had; then there is no reason to take anything else. With larger states or more steps there is.
# - *nested twice* holds states only, and grows as √n all the same. Up to about a thousand steps it takes the least.
# - *equinox* and *tapeless* hold 64 states, however many steps there are. What they pay is time, which grows as the
#   steps do, and a little more.
#
# The resident memory has a floor of 50 to 60 MB at any horizon. That is not data but Python and JAX, which trace and
# load a larger program than the forward run's.
#
# ## What the gradient says
#
# With G the gradient per unit of volume, a small change δu of the velocity at the start changes the enstrophy at the
# end by the mean of G · δu over the box. G is itself a flow without divergence. First the numbers: a change along G is
# compared with a random one of the same size.

# %%
sensitivity = np.asarray(g_bounded) * N**3
final = jax.jit(lambda u: loss(u, bounded, LIVE))
at_end = float(final(u_start))
rms = float(np.sqrt(np.mean(np.sum(np.asarray(u_start) ** 2, axis=0))))
changes = {}
print(f"enstrophy {float(enstrophy(u_start)):.3f} at t = 0, {at_end:.3f} at t = {LIVE * DT:g}")
for name, direction in (("along the gradient", sensitivity), ("at random", random_flow(seed=1))):
    change = 1e-3 * rms * direction / np.sqrt(np.mean(np.sum(direction**2, axis=0)))
    foretold = float(np.mean(np.sum(sensitivity * change, axis=0))) / at_end
    found = float(final(u_start + change)) / at_end - 1
    changes[name] = (foretold, found)
    print(f"0.1 % of the flow, {name:18s}: enstrophy changes by {foretold:+.3%} as foretold, {found:+.3%} as run")

# %%
before, after = vorticity_slice(u_start), vorticity_slice(store_all(u_start, LIVE))
strength = np.linalg.norm(fine(sensitivity[:, :, :, 0]), axis=0)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
for axis, values, t in ((axes[0], before, 0), (axes[1], after, LIVE * DT)):
    image = show(axis, values, vmin=0, vmax=max(before.max(), after.max()), cmap="magma")
    axis.set_title(f"vorticity at t = {t:g}", fontsize=11)
figure.get_layout_engine().set(wspace=0.04)
figure.colorbar(image, ax=axes[:2], label="|ω| (dimensionless)")
image = show(axes[2], strength, vmin=0, cmap="viridis")
axes[2].set_title("gradient G, at t = 0", fontsize=11)
figure.colorbar(image, ax=axes[2], label="|G| (dimensionless)")
skip = slice(None, None, 2)
arrows = sensitivity[:2, skip, skip, 0]
axes[2].quiver(grid[skip], grid[skip], arrows[0].T, arrows[1].T, color="white", width=0.005)
axes[0].set_ylabel("y (dimensionless)")
figure.suptitle(
    f"How the enstrophy at t = {LIVE * DT:g} depends on the velocity at t = 0 (slices at z = 0)", fontsize=11
)
figure.savefig(OUT / "gradient.png", dpi=150)
weak = before < np.median(before)
below, above = strength[weak].mean(), strength[~weak].mean()
print(f"mean of |G| where |ω| at the start is below its median: {below:.3g}, above: {above:.3g}")

# %% [markdown]
# In this slice the gradient is largest between the vortices, where the fluid is drawn out, and not in them.
#
# With a longer horizon the flow depends on its start ever more strongly. The same 0.1 %, along the gradient at each
# horizon, if the response were in proportion:

# %%
for steps in HORIZONS:
    scale = 1e-3 * rms * runs["tapeless", steps]["gradient_norm"] * N**1.5
    print(f"t = {steps * DT:5g}: enstrophy would change by {scale / runs['forward', steps]['loss']:.2g} of itself")

# %% [markdown]
# From t = 32 on that is a multiple of the enstrophy itself: the flow is chaotic, and a change of 0.1 % is far outside
# the range where it responds in proportion. The gradient is still exact: it tells what much smaller changes do. No
# amount of memory helps against that.
#
# ## In short
#
# Take `jax.lax.scan` while it fits. When it does not, import `checkpointing.scan` in its place, say how many states or
# how many bytes, and check the gradient once. The table above is what it costs here; `checkpointing.plan` tells
# beforehand what it costs elsewhere.

# %%
flat = [runs["tapeless", n] for n in HORIZONS if n > SNAPSHOTS]
assert max(map(compiler_megabytes, flat)) < 1.1 * min(map(compiler_megabytes, flat))
result = {
    "steps": LIVE,
    "energy_balance": float(balance),
    "largest_divergence": float(divergences.max()),
    "gradients_differ": max(differences.values()),
    "gradient_check": {
        "verdict": report.verdict,
        "difference_error": report.difference_error,
        "taylor_slope": report.slope,
        "forward_reverse": report.forward_reverse,
    },
    "temporary_bytes_predicted": {"lax.scan": predicted, "tapeless": predicted_bounded},
    "planned_bytes": plan.peak_bytes,
    "planned_bytes_compiler": planned_compiler,
    "live": [
        {"loop": loop, "steps": steps, "temporary_bytes": run["temporary_bytes"], "seconds": run["seconds"]}
        for (loop, steps), run in live.items()
    ],
    "changes": changes,
    "seconds": time.perf_counter() - started,
}
(OUT / "bounded_memory.json").write_text(json.dumps(result, indent=2) + "\n")
print(f"{result['seconds']:.0f} s in all; report, pictures and numbers are in {OUT.name}/")
