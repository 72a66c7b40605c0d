"""What does the gradient of a long loop cost, beside the peers at their best settings?

The loop is n steps of the classical Runge-Kutta method for the viscous Burgers' equation on N periodic points; wanted
are a loss of its final state and the derivatives by initial state and viscosity. In one run and interleaved: tapeless's
loops with s snapshots, equinox and diffrax with as many, nested `jax.checkpoint`, and `lax.scan`, which stores all.
Written to `benchmarks/results/checkpointing.md` and `checkpointing.png`.

    python benchmarks/checkpointing.py
    python benchmarks/checkpointing.py --quick  # the first table only, printed
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import diffrax
import equinox
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tapeless import checkpointing

jax.config.update("jax_enable_x64", True)

RESULTS = Path(__file__).parent / "results"
NU = 1e-3
TOLERANCE = 1e-10  # to which all results agree
MOST_BYTES = 4e9  # of temporaries; a program with more is not run
SLOW = 5.0  # seconds of a call from which three are timed, the first included
CUT = 20.0  # seconds after which a call is cut off when only its memory is wanted: all its buffers are in use by then
COTANGENTS = 28
S, LEAF, WHILE, DEFAULT = (f"tapeless, {x}" for x in ("s snapshots", "s and a leaf", "`while_loop`", "default"))
EQUINOX, DIFFRAX, PLAIN = "equinox", "diffrax", "`lax.scan`"
BLOCKS, BLOCKS_STEPS = "`jax.checkpoint`, blocks", "`jax.checkpoint`, blocks and steps"
NAMES = (S, LEAF, WHILE, DEFAULT, EQUINOX, DIFFRAX, BLOCKS, BLOCKS_STEPS, PLAIN)


class Case(NamedTuple):
    """n steps of N entries, s snapshots."""

    n: int
    size: int
    snapshots: int = 64

    def __str__(self):
        return f"n = {self.n:,}, N = {self.size:,}, s = {self.snapshots}"

    dx = property(lambda self: 2 * math.pi / self.size)
    args = property(lambda self: (1 + 0.5 * jnp.sin(self.dx * jnp.arange(self.size)), jnp.array(NU)))

    @property
    def dt(self):
        """Stable, and ending before a front has formed; a power of two, so that diffrax's times are exact."""
        return 2.0 ** math.floor(math.log2(min(0.2 * self.dx / 1.5, 0.25 * self.dx**2 / NU, 1 / self.n)))


HEADLINE = (Case(4096, 64), Case(2048, 1024), Case(128, 65536, 32))
MIDDLE, LONG = HEADLINE[1], Case(10**6, 1000)
MOST = {64: 6, 1024: 5, 65536: 4, 10**6: 3}  # the largest n of the sweep, as a power of ten
SWEEP = (*(Case(10**power, size) for size, most in MOST.items() for power in range(3, most + 1)), LONG)
SEGMENTS = (Case(10_000, 1024, 620), Case(10_000, 1024, 320))
say = functools.partial(print, file=sys.stderr, flush=True)
leaves = {SEGMENTS[0]: 1, SEGMENTS[1]: 24}  # L: here for the same memory; others are found


class Program(NamedTuple):
    """A compiled function; seconds to compile it, bytes of its temporaries, seconds to run it or why it was not run."""

    call: Any
    compiling: float
    temporaries: int
    seconds: float | None = None
    note: str = ""


class RK4(diffrax.AbstractERK):
    a, b = (np.array([0.5]), np.array([0, 0.5]), np.array([0, 0, 1.0])), np.array([1, 2, 2, 1]) / 6
    tableau: ClassVar[Any] = diffrax.ButcherTableau(a_lower=a, b_sol=b, b_error=0 * b, c=np.array([0.5, 0.5, 1]))
    interpolation_cls: ClassVar[Any] = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k


def burgers(u, nu, dx):
    """∂u/∂t = -u ∂u/∂x + ν ∂²u/∂x²."""
    up, um = jnp.roll(u, -1), jnp.roll(u, 1)
    return -u * (up - um) / (2 * dx) + nu * (up - 2 * u + um) / dx**2


def contenders(case, rate=burgers):
    """Functions (u, ν) -> final state, by name."""
    n, s, dx, dt = case.n, case.snapshots, case.dx, case.dt
    blocks = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    remat = lambda f: jax.checkpoint(f, prevent_cse=False)  # which is not needed within a scan

    def step(u, nu):
        a = rate(u, nu, dx)
        b = rate(u + dt / 2 * a, nu, dx)
        c = rate(u + dt / 2 * b, nu, dx)
        d = rate(u + dt * c, nu, dx)
        return u + dt / 6 * (a + 2 * b + 2 * c + d)

    scanned = lambda scan, n, step, u, **how: scan(lambda u, _: (step(u), None), u, length=n, **how)[0]
    ours = lambda how: lambda u, nu: scanned(checkpointing.scan, n, lambda u: step(u, nu), u, checkpoint=how)

    def tapeless_while(u, nu):
        cond, body = lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1], nu))
        return checkpointing.while_loop(cond, body, (jnp.int32(0), u), checkpoint=s)[1]

    def equinox_while(u, nu):  # `max_steps` counts already: a counter in the state would be a second one
        return eqxi.while_loop(
            lambda u: True, lambda u: step(u, nu), u, max_steps=n, kind="checkpointed", checkpoints=s
        )

    def diffrax_solve(u, nu):
        term = diffrax.ODETerm(lambda t, u, nu: rate(u, nu, dx))
        how = {"max_steps": n, "throw": False, "adjoint": diffrax.RecursiveCheckpointAdjoint(checkpoints=s)}
        return diffrax.diffeqsolve(term, RK4(), 0.0, n * dt, dt, u, args=nu, **how).ys[0]

    def nested(inner):
        block = lambda nu: lambda u: scanned(jax.lax.scan, n // blocks, inner(lambda u: step(u, nu)), u)
        return lambda u, nu: scanned(jax.lax.scan, blocks, remat(block(nu)), u)

    plain = lambda u, nu: scanned(jax.lax.scan, n, lambda u: step(u, nu), u)
    leaf = checkpointing.binomial(n, s, leaf=leaves.get(case, 1))
    theirs = (equinox_while, diffrax_solve, nested(lambda f: f), nested(remat), plain)
    return dict(zip(NAMES, (ours(s), ours(leaf), tapeless_while, ours(None), *theirs), strict=True))


def gradient(run):
    """Value of the loss and its derivatives."""
    return jax.value_and_grad(lambda u, nu: jnp.sum(run(u, nu) ** 3), argnums=(0, 1))


def compiled(f, args):
    begin = time.perf_counter()
    call = jax.jit(f).lower(*args).compile()
    return Program(call, time.perf_counter() - begin, call.memory_analysis().temp_size_in_bytes)


def with_longest_leaf(case, most):
    """The program with the longest leaf, from 16 down, that has at most `most` bytes of temporaries."""
    leaf = leaves[case] = min((leaves[c] for c in leaves if c[1:] == case[1:]), default=16)
    while True:
        program = compiled(gradient(contenders(case)[LEAF]), case.args)
        over = program.temporaries - most
        if over <= 0 or leaf == 1:
            return program
        leaf = leaves[case] = max(1, leaf - max(1, over // (12 * 8 * case.size)))  # a step keeps twelve arrays


def race(programs, args, rounds=5):
    """The programs with their median seconds, taking turns; their results must agree."""
    taken, wanted = {name: [] for name in programs}, None
    near = lambda a, b: np.testing.assert_allclose(a, b, TOLERANCE, TOLERANCE * np.max(np.abs(b)), equal_nan=False)
    for turn in range(rounds + 1):
        for name, program in programs.items():
            if turn > 2 and taken[name][0] > SLOW:
                continue
            begin = time.perf_counter()
            out = jax.block_until_ready(program.call(*args))
            taken[name].append(time.perf_counter() - begin)
            if turn == 0:
                wanted = out if wanted is None else wanted
                jax.tree.map(near, out, wanted)
    median = {name: np.median(t if t[0] > SLOW else t[1:]) for name, t in taken.items()}
    say("; ".join(f"{name}: {t:.3g} s" for name, t in median.items()))
    return {name: p._replace(seconds=median[name]) for name, p in programs.items()}


def measure(case, rounds, predicted, limit):
    """Programs of all contenders; those that are predicted to take more than `limit` seconds are only compiled."""
    runs = contenders(case)
    programs = {name: compiled(gradient(runs[name]), case.args) for name in NAMES if name != LEAF}
    programs = {S: programs[S], LEAF: with_longest_leaf(case, programs[EQUINOX].temporaries), **programs}
    for name, p in programs.items():
        about = f"not run: about {predicted[name]:.0f} s" if predicted.get(name, 0) > limit else ""
        programs[name] = p._replace(note="more than 4 GB" if p.temporaries > MOST_BYTES else about)
    say(f"{case}; leaf {leaves[case]}")
    return programs | race({name: p for name, p in programs.items() if not p.note}, case.args, rounds)


def sweep(limit):
    """Programs by case. Seconds are predicted from those of a smaller case, in proportion to n N."""
    results, expected = {}, {}
    for case in sorted(SWEEP, key=lambda c: c.n * c.size):
        smaller = [c for c in results if c.n <= case.n and c.size <= 1.1 * case.size]
        before = max(smaller, key=lambda c: (c.size, c.n), default=case)
        predicted = {k: t * case.n * case.size / (before.n * before.size) for k, t in expected.get(before, {}).items()}
        results[case] = measure(case, 5, predicted, limit)
        expected[case] = predicted | {name: p.seconds for name, p in results[case].items() if p.seconds}
    return {case: results[case] for case in SWEEP}


def evaluations(case):
    """Evaluations of the step in one gradient, counted: those of the rate, of which there are four in a step."""
    calls, counts = [], {}

    def rate(u, nu, dx):
        jax.debug.callback(calls.append, u[0])
        return burgers(u, nu, dx)

    for name, run in contenders(case, rate).items():
        call = compiled(gradient(run), case.args).call
        calls.clear()
        jax.block_until_ready(call(*case.args))
        jax.effects_barrier()
        counts[name] = len(calls) / 4
    assert (counts[S], counts[LEAF]) == (by_formula(case, 1), by_formula(case, leaves[case]))
    return counts


def by_formula(case, leaf):
    """n + t(n, s) and the steps of the last leaf, which are recorded without having been advanced over."""
    schedule = checkpointing.binomial(case.n, case.snapshots, leaf=leaf)
    turn = next(a for a in schedule if isinstance(a, checkpointing.Youturn))
    return case.n + schedule.advances + turn.stop - turn.start


def in_child(cache, n, size, snapshots, leaf, name, seconds):
    """Compile; run for so many seconds at most, if for any; print the peak."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    case = Case(n, size, snapshots)
    leaves[case] = leaf
    runs = contenders(case)
    program = compiled(gradient(runs[name]) if name in runs else runs[PLAIN], case.args)
    if program.temporaries > MOST_BYTES:
        return print("null")
    status = Path("/proc/self/status")  # `ru_maxrss` of `getrusage` would include the peak of the parent process
    peak = lambda: print(int(status.read_text().split("VmHWM:")[1].split()[0]) / 1e3, flush=True)
    if seconds > 0:
        threading.Timer(seconds, lambda: (peak(), os._exit(0))).start()
        jax.block_until_ready(program.call(*case.args))
    peak()
    os._exit(0)


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def states(case, program):
    return f"{program.temporaries / (8 * case.size):,.0f}"


def timed(program, base):
    """Seconds, and their ratio to those of the base; or why there are none."""
    ratio = "" if program.note or base.note else f" ({program.seconds / base.seconds:.2f})"
    return program.note or f"{program.seconds:.3g}{ratio}"


def headline_table(measured, counts):
    head = ("case", "contender", "seconds (ratio)", "evaluations / n", "compilation (s)", "temporaries (states)")
    count = lambda case, name: f"{counts[case][name] / case.n:.2f}" if counts else ""
    title = lambda case, name: f"{name} of {leaves[case]}" if name == LEAF else name
    rows = []
    for case, ps in measured.items():
        about = lambda p, case=case: (f"{p.compiling:.1f}", states(case, p))
        rows += [(case, title(case, k), timed(p, ps[S]), count(case, k), *about(p)) for k, p in ps.items()]
    return table(head, rows)


def sweep_table(swept, cell):
    cells = lambda case, programs: [cell(case, p, programs[S]) for p in programs.values()]
    return table(("n", "N", *NAMES), [(f"{c.n:,}", f"{c.size:,}", *cells(c, ps)) for c, ps in swept.items()])


def resident_table(cases):
    """Peak resident memory of processes that compile, and of ones that find all compiled and run."""

    def peaks(case, name):
        with tempfile.TemporaryDirectory() as cache:
            tasks = [json.dumps((cache, *case, leaves[case], name, seconds)) for seconds in (0, CUT)]
            found = [json.loads(subprocess.check_output([sys.executable, __file__, "--child", x])) for x in tasks]
        say(f"{case}; {name}: {found} MB")
        return found

    rows = {name: [x for case in cases for x in peaks(case, name)] for name in ("forward", *NAMES)}
    forward, head = rows.pop("forward"), [f"{case}: {what}" for case in cases for what in ("compiling", "running")]
    cells = lambda row: ["–" if a is None else f"{a - b:+.0f}" for a, b in zip(row, forward, strict=True)]
    return table(("contender", *head), [(name, *cells(row)) for name, row in rows.items()])


def derivatives_table(case):
    """A JVP, and a batch of pullbacks."""
    u, nu = case.args
    bars = jnp.cos(jnp.arange(COTANGENTS)[:, None] * u)
    jvp = lambda run: lambda u, nu: jax.jvp(run, (u, nu), (jnp.cos(u), nu))[1]
    pullbacks = lambda run: lambda u, nu, bars: jax.vmap(jax.vjp(run, u, nu)[1])(bars)
    columns, runs = [], contenders(case)
    for make, args, without in ((jvp, (u, nu), (EQUINOX, DIFFRAX)), (pullbacks, (u, nu, bars), ())):
        columns.append(race({k: compiled(make(run), args) for k, run in runs.items() if k not in without}, args))
    head = ("contender", "JVP: seconds (ratio)", "MB", f"{COTANGENTS} pullbacks: seconds (ratio)", "MB")
    cells = lambda p, base: (timed(p, base), f"{p.temporaries / 1e6:.1f}") if p else ("no forward mode", "")
    return table(head, ((name, *(x for c in columns for x in cells(c.get(name), c[PLAIN]))) for name in NAMES))


def segments_table():
    programs = race({c: compiled(gradient(contenders(c)[LEAF]), c.args) for c in SEGMENTS}, SEGMENTS[0].args)
    base, head = programs[SEGMENTS[0]], ("s", "L", "evaluations / n", "seconds (ratio)", "temporaries (states)")
    row = lambda c, leaf, p: (c.snapshots, leaf, f"{by_formula(c, leaf) / c.n:.3f}", timed(p, base), states(c, p))
    return table(head, [row(c, leaves[c], p) for c, p in programs.items()])


def draw(swept, path):
    """Seconds against n for two N, and temporaries."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.6), layout="constrained")
    seconds, memory = lambda c, p: p.seconds or math.nan, lambda c, p: p.temporaries / (8 * c.size)
    panels = ((64,), seconds), ((1024, 1000), seconds), ((1024, 1000), memory)
    for ax, (sizes, value) in zip(axes, panels, strict=True):
        for i, name in enumerate(NAMES):
            points = [(c.n, value(c, programs[name])) for c, programs in swept.items() if c.size in sizes]
            style = {"color": f"C{i}", "marker": "osDv^<>Px"[i], "ls": "-" if "tapeless" in name else "--"}
            x, y = zip(*points, strict=True)
            ax.loglog(x, y, **style, ms=11 - i, mfc="none", mew=1.6, label=name.replace("`", ""))
        ax.set(xlabel="number of steps n", title="N = 64" if sizes == (64,) else "N = 1,024 (1,000 for n = 10⁶)")
        ax.set_ylabel("temporaries (states of N numbers)" if value is memory else "value and gradient (s)")
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def report(measured, rounds, limit):
    """Measure the rest, and say all."""
    counts, swept = {case: evaluations(case) for case in HEADLINE}, sweep(limit)
    draw(swept, RESULTS / "checkpointing.png")
    return f"""# What the gradient of a long loop costs

Value and gradient, by initial state and viscosity, of n steps of RK4 for the viscous Burgers' equation on N points in
float64, with s snapshots where a contender takes their number; ratios to tapeless with s snapshots.
{time.strftime("%Y-%m-%d")}, {os.cpu_count()} cores, JAX {jax.__version__} on the CPU, equinox {equinox.__version__},
diffrax {diffrax.__version__}. Made by `benchmarks/checkpointing.py`.

{headline_table(measured, counts)}
A leaf is the longest one whose temporaries are no more than equinox's. Evaluations are those of a step, that of
recording it included; they were counted, and for tapeless with s snapshots and with a leaf they are n + t(n, s) + L.

## Length and size

Seconds with s = 64, and temporaries in states with the seconds of compilation:

{sweep_table(swept, lambda case, p, base: timed(p, base))}
{sweep_table(swept, lambda case, p, base: f"{states(case, p)}; {p.compiling:.1f} s")}
![Seconds and temporaries](checkpointing.png)

## Resident memory

Megabytes of the peak of a process beyond that of a forward run: when it only compiles, and when it runs what has been
compiled before (cut off after {CUT:.0f} s: all buffers are in use by then).

{resident_table((*HEADLINE, LONG))}
## A JVP and {COTANGENTS} pullbacks at {MIDDLE}; ratios to `lax.scan`

{derivatives_table(MIDDLE)}
## Snapshots alone, and with leaves in the same memory, at n = 10,000, N = 1,024

{segments_table()}
## How the numbers were taken

Seconds are medians of {rounds} calls in the first table and of five elsewhere, of three for calls over {SLOW:.0f} s;
the contenders of a case take turns, after a first call that is not counted. Compilation is tracing, lowering and
compiling once, after a small program. Temporaries are what the compiler reports. Values and gradients of all agree to
{TOLERANCE:g}. Not run is what would take over {limit:.0f} s, predicted from a smaller case in proportion to n N, and
what has more than 4 GB of temporaries. equinox is `equinox.internal.while_loop` with `checkpoints=s`, `max_steps=n` and
no condition of its own: a counter in the state made it slower for small N. diffrax has `ConstantStepSize`, `max_steps`,
`RecursiveCheckpointAdjoint(checkpoints=s)`, RK4 as an `AbstractERK` and `throw=False`; `StepTo` took as long,
`throw=True` and `scan_kind="bounded"` longer. `jax.checkpoint` is around blocks of near √n steps, in one variant around
each step too, with `prevent_cse=False`. tapeless's default is `lax.scan` up to 256 MB, then near √(2n) snapshots.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first table only, printed")
    parser.add_argument("--limit", type=float, default=35.0, help="seconds of a call beyond which it is not made")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return in_child(*json.loads(options.child))
    small, rounds = Case(8, 8, 2), 3 if options.quick else 11
    compiled(gradient(contenders(small)[PLAIN]), small.args)  # so that JAX has started
    measured = {case: measure(case, rounds, {}, math.inf) for case in HEADLINE}
    if options.quick:
        return print(headline_table(measured, {}))
    return (RESULTS / "checkpointing.md").write_text(report(measured, rounds, options.limit))


if __name__ == "__main__":
    main()
