"""What do a solve and its gradient cost, beside the peers at their best settings?

Small dense Newton, conjugate gradients on 2D Poisson, Newton-Krylov on a 2D Bratu problem of 10⁶ unknowns, sparse LU in
an implicit step of 2D reaction and diffusion, and 10⁵ scalar roots at once. Each contender returns the same loss and
its derivatives by a field of parameters; they run interleaved, in one process. Written to
`benchmarks/results/solvers.md`.

    python benchmarks/solvers.py
    python benchmarks/solvers.py --only newton roots  # some of the cases, printed
"""

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxopt
import lineax as lx
import numpy as np
import optimistix as optx
from jax import lax
from jax.scipy.sparse.linalg import cg
from tapeless import adjoint, solvers

jax.config.update("jax_enable_x64", True)

RESULTS = Path(__file__).parent / "results"
AGREE = 1e-6  # to which all gradients agree, relative
LEAST = 0.05  # seconds of a measurement: as many calls as that takes
SLOW = 20.0  # seconds of a call that is timed once
say = functools.partial(print, file=sys.stderr, flush=True)


class Case(NamedTuple):
    """What is solved, the parameters, and the contenders: functions of the parameters that return a loss."""

    title: str
    params: Any
    contenders: dict[str, Any]


class Row(NamedTuple):
    """What was measured of a contender."""

    name: str
    forward: float
    both: float
    compiling: float
    temporaries: int
    error: float
    counts: str


def newton_loop(f, linear_solve, u, rtol=1e-10, most=50):
    """A plain Newton iteration, for those who have none."""

    def body(c):
        u, _, k = c
        d = linear_solve(f, u, -f(u))
        return u + d, jnp.max(jnp.abs(d) / (1e-12 + rtol * jnp.abs(u))), k + 1

    return lax.while_loop(lambda c: (c[1] > 1) & (c[2] < most), body, (u, jnp.inf, 0))[0]


def dense(f, u, b):
    """F_u d = b by a dense factorisation."""
    return jnp.linalg.solve(jax.jacfwd(f)(u), b)


def newton(n):
    """F(u) = u + B tanh(A u) / 2 - p for n unknowns, whose Jacobian is full and changes all over."""
    rng = np.random.default_rng(0)
    A, B = (jnp.asarray(rng.normal(size=(n, n)) / np.sqrt(n)) for _ in range(2))
    p, c = jnp.asarray(rng.normal(size=n)), jnp.asarray(rng.normal(size=n))
    residual = lambda u, p: u + 0.5 * B @ jnp.tanh(A @ u) - p
    loss = lambda u: jnp.vdot(c, jnp.sin(u))
    zero = jnp.zeros(n)

    def unrolled(p):
        u = zero
        for _ in range(7):
            u = u + dense(lambda u: residual(u, p), u, -residual(u, p))
        return loss(u)

    def custom_root(p):
        f = lambda u: residual(u, p)
        tangent = lambda g, y: jnp.linalg.solve(jax.jacfwd(g)(y), y)
        return loss(lax.custom_root(f, zero, lambda f, u: newton_loop(f, dense, u), tangent))

    @jaxopt.implicit_diff.custom_root(residual, solve=jaxopt.linear_solve.solve_lu)
    def with_jaxopt(u, p):
        return newton_loop(lambda u: residual(u, p), dense, u)

    def optimistix(p):
        f = lambda u, p: residual(u, p)
        how = optx.Newton(rtol=1e-10, atol=1e-12, linear_solver=lx.LU())
        adjoint = optx.ImplicitAdjoint(linear_solver=lx.LU())
        return loss(optx.root_find(f, how, zero, p, adjoint=adjoint).value)

    return Case(
        f"Newton, dense, n = {n}",
        p,
        {
            "tapeless": lambda p: loss(solvers.root_find(residual, zero, p).value),
            "optimistix": optimistix,
            "`lax.custom_root`": custom_root,
            "jaxopt": lambda p: loss(with_jaxopt(zero, p)),
            "unrolled, 7 iterations": unrolled,
        },
    )


def laplacian(v, level=0):
    """The five-point stencil with zeros beyond the boundary."""
    w = jnp.pad(v, 1)
    return (4 * v - w[2:, 1:-1] - w[:-2, 1:-1] - w[1:-1, 2:] - w[1:-1, :-2]) / 4**level


def poisson(n=512):
    """-Δu + q u = b on n x n points, by the field q."""
    rng = np.random.default_rng(0)
    q, b = jnp.asarray(rng.uniform(size=(n, n)) / n), jnp.asarray(rng.normal(size=(n, n)))
    c = jnp.asarray(rng.normal(size=(n, n)))
    operator = lambda q: lambda v: laplacian(v) + q * v
    loss = lambda u: jnp.vdot(c, u)
    ours = lambda **how: lambda q: loss(solvers.linear_solve(operator(q), b, solvers.CG(rtol=1e-8, **how)).value)

    def lineax(q):
        shape = jax.ShapeDtypeStruct(b.shape, b.dtype)
        A = lx.FunctionLinearOperator(operator(q), shape, lx.positive_semidefinite_tag)
        return loss(lx.linear_solve(A, b, lx.CG(rtol=1e-8, atol=0.0, max_steps=10**5)).value)

    return Case(
        f"Conjugate gradients, Poisson, {n}²",
        q,
        {
            "tapeless": ours(),
            "tapeless, multigrid": ours(preconditioner=solvers.multigrid(laplacian)),
            "lineax": lineax,
            "`jax.scipy` cg": lambda q: loss(cg(operator(q), b, tol=1e-8, maxiter=10**5)[0]),
            "jaxopt": lambda q: loss(jaxopt.linear_solve.solve_cg(operator(q), b, tol=1e-8, maxiter=10**5)),
        },
    )


def bratu(n=1000):
    """-Δu = λ eᵘ on n x n points, by the field λ."""
    h = 1 / (n + 1)
    rng = np.random.default_rng(0)
    strength = jnp.asarray(1 + 2 * rng.uniform(size=(n, n)))
    c = jnp.asarray(rng.normal(size=(n, n))) * h**2
    residual = lambda u, strength: laplacian(u) - h**2 * strength * jnp.exp(u)
    loss = lambda u: jnp.vdot(c, u**2)
    zero, grids = jnp.zeros((n, n)), solvers.multigrid(laplacian)
    method = solvers.NewtonKrylov(rtol=1e-8, linear=solvers.CG(rtol=1e-8, preconditioner=grids))
    cycle = jax.jit(lambda v: grids.hoisted(v).prepare(None, v)(v))

    def inner(f, u, b):
        return cg(jax.linearize(f, u)[1], b, tol=1e-8, M=cycle)[0]

    def custom_root(strength):
        tangent = lambda g, y: cg(g, y, tol=1e-8, M=cycle)[0]
        f = lambda u: residual(u, strength)
        return loss(lax.custom_root(f, zero, lambda f, u: newton_loop(f, inner, u, 1e-8), tangent))

    return Case(
        f"Newton-Krylov, Bratu, {n}²",
        strength,
        {
            "tapeless": lambda p: loss(solvers.root_find(residual, zero, p, method).value),
            "`lax.custom_root`, our multigrid": custom_root,
        },
    )


def reaction(n):
    """One implicit step of ∂u/∂t = D Δu + u - u³ on n x n points, by the field D."""
    rng = np.random.default_rng(0)
    u0, D = jnp.asarray(rng.normal(size=(n, n))), jnp.asarray(1 + rng.uniform(size=(n, n)))
    c = jnp.asarray(rng.normal(size=(n, n)))
    residual = lambda u, D: u - u0 - 0.5 * (u - u**3 - D * laplacian(u))
    loss = lambda u: jnp.vdot(c, u)

    def ours(method):
        return lambda D: loss(solvers.root_find(residual, u0, D, method).value)

    def optimistix(D):
        krylov = lx.GMRES(rtol=1e-10, atol=1e-12, restart=40)
        how = optx.Newton(rtol=1e-8, atol=1e-10, linear_solver=krylov)
        adjoint = optx.ImplicitAdjoint(linear_solver=krylov)
        return loss(optx.root_find(lambda u, D: residual(u, D), how, u0, D, adjoint=adjoint, max_steps=50).value)

    return Case(
        f"Implicit step, reaction and diffusion, {n}²",
        D,
        {
            "tapeless, SparseLU": ours(solvers.Newton(linear=solvers.SparseLU())),
            "tapeless, GMRES": ours(solvers.NewtonKrylov()),
            "optimistix, GMRES": optimistix,
        },
    )


def roots(lanes=100_000):
    """Kepler's equation for many orbits, by their eccentricities."""
    rng = np.random.default_rng(0)
    e, M = jnp.asarray(rng.uniform(0, 0.9, lanes)), jnp.asarray(rng.uniform(0, np.pi, lanes))
    c = jnp.asarray(rng.normal(size=lanes))
    residual = lambda E, p: E - p[0] * jnp.sin(E) - p[1]
    ours = lambda method: lambda e, M: solvers.root_find(residual, M + 0.85 * e, (e, M), method).value
    tolerances = {"rtol": 1e-10, "atol": 1e-12}

    def optimistix(how, **options):
        adjoint = optx.ImplicitAdjoint(linear_solver=lx.AutoLinearSolver(well_posed=True))
        start = lambda e, M: optx.root_find(
            residual, how, M + 0.85 * e, (e, M), options=options, adjoint=adjoint, throw=False
        )
        return lambda e, M: start(e, M).value

    many = lambda f: lambda e: jnp.vdot(c, jax.vmap(f)(e, M))
    return Case(
        f"{lanes:,} scalar roots under `vmap`",
        e,
        {
            "tapeless, Newton": many(ours(solvers.Newton(**tolerances))),
            "tapeless, Chandrupatla": many(ours(solvers.Chandrupatla(0.0, 4.1, **tolerances))),
            "optimistix, Newton": many(optimistix(optx.Newton(**tolerances))),
            "optimistix, Bisection": many(optimistix(optx.Bisection(**tolerances), lower=0.0, upper=4.1)),
        },
    )


CASES = {
    "newton": (lambda: newton(10), lambda: newton(100)),
    "poisson": (poisson,),
    "bratu": (bratu,),
    "reaction": (lambda: reaction(128), lambda: reaction(256)),
    "roots": (roots,),
}


def measured(case, repeats=7):
    """Rows of a case; the contenders take turns."""
    programs, rows, expected = {}, [], None
    for name, loss in case.contenders.items():
        start = time.perf_counter()
        both = jax.jit(jax.value_and_grad(loss)).lower(case.params).compile()
        compiling = time.perf_counter() - start
        programs[name] = jax.jit(loss).lower(case.params).compile(), both, compiling
        gradient = both(case.params)[1]
        expected = gradient if expected is None else expected
        error = float(jnp.max(jnp.abs(gradient - expected)) / jnp.max(jnp.abs(expected)))
        say(f"{case.title}: {name} compiled in {compiling:.1f} s, gradient differs by {error:.0e}")
        rows.append(Row(name, 0, 0, compiling, both.memory_analysis().temp_size_in_bytes, error, counts(loss, case)))
    times = {name: ([], []) for name in programs}
    for turn in range(repeats):
        for name, (forward, both, _) in programs.items():
            for run, seconds in zip((forward, both), times[name], strict=True):
                if turn and seconds[0] > SLOW:
                    continue
                calls = 1 if not turn else max(1, int(LEAST / seconds[0]))
                start = time.perf_counter()
                for _ in range(calls):
                    jax.block_until_ready(run(case.params))
                seconds.append((time.perf_counter() - start) / calls)
    return [
        row._replace(forward=float(np.median(times[row.name][0])), both=float(np.median(times[row.name][1])))
        for row in rows
    ]


def counts(loss, case):
    """Iterations of the forward and the adjoint solve, and factorisations of each, where they can be asked for."""
    if jnp.size(case.params) > 10 and "vmap" in case.title:
        return ""
    solvers.clear_factors()
    with adjoint.watch_solves() as log:
        jax.block_until_ready(jax.jit(loss)(case.params))
        made = solvers.factor_statistics().factorisations
        jax.block_until_ready(jax.jit(jax.grad(loss))(case.params))
    found = {record.kind: record for record in log}
    if "adjoint" not in found:
        return ""
    text = f"{found['forward'].iterations} | {found['adjoint'].iterations}"
    return f"{text}; {made} | {solvers.factor_statistics().factorisations - made}" if made else text


def table(case, rows):
    """Markdown."""
    first = rows[0]
    lines = [
        f"## {case.title}",
        "",
        "| contender | forward (s) | with gradient (s) | ratio | compilation (s) | temporaries (MB) | iterations "
        "forward, adjoint; factorisations |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        flag = "" if r.error < AGREE else f" (gradient differs by {r.error:.0e})"
        lines.append(
            f"| {r.name}{flag} | {r.forward:.3g} | {r.both:.3g} | {r.both / first.both:.2f} | {r.compiling:.2g} | "
            f"{r.temporaries / 1e6:,.1f} | {r.counts.replace('|', ',')} |"
        )
    return "\n".join([*lines, ""])


def main():
    """Measure, print, and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    only = parser.parse_args().only
    tables = []
    for name in only or CASES:
        for make in CASES[name]:
            case = make()
            tables.append(table(case, measured(case)))
            print(tables[-1], flush=True)
    if only is None:
        head = (
            "# What a solve and its gradient cost\n\nMedians of seven interleaved runs in float64; ratios are those of "
            f"the time with gradient, to the first row. {time.strftime('%Y-%m-%d')}, 2 cores, JAX {jax.__version__} on "
            f"the CPU, optimistix {optx.__version__}, lineax {lx.__version__}, jaxopt {jaxopt.__version__}. Made by\n"
            "`benchmarks/solvers.py`.\n\n"
        )
        (RESULTS / "solvers.md").write_text(head + "\n".join(tables))


if __name__ == "__main__":
    main()
