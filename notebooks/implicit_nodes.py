# %% [markdown]
# # Solves are nodes
#
# A solver iterates until it is done. How is it to be differentiated? By going back through all its iterations, or by
# one linear solve at the end: where F(u, p) = 0,
#
#     F_u du = -F_p dp,    and so    p̄ = -F_pᵀ w  with  F_uᵀ w = ū.
#
# This notebook compares the two on an equation with 961 unknowns, then solves and differentiates one with 65,025, and
# shows what happens where the formula does not hold.

# %%
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.sparse.linalg import cg
from tapeless import adjoint, solvers

jax.config.update("jax_enable_x64", True)
HERE = next(p for p in (Path.cwd(), Path.cwd() / "notebooks") if (p / "data").is_dir())
OUT = Path(os.environ.get("TAPELESS_OUT", HERE.parent / "out"))
OUT.mkdir(parents=True, exist_ok=True)
results = {}

# %% [markdown]
# ## The equation
#
# Bratu's problem: the steady temperature u of a square plate that heats itself, the more the hotter it is, and whose
# edges are kept at zero,
#
#     -Δu = λ eᵘ,    u = 0 on the edges of the unit square.
#
# All is dimensionless. The parameter is a field λ(x, y), how reactive the plate is at each point; the loss is the
# mean of u².

# %%


def laplacian(v, level=0):
    """-h² Δ on the interior points, by five points."""
    w = jnp.pad(v, 1)
    return (4 * v - w[2:, 1:-1] - w[:-2, 1:-1] - w[1:-1, 2:] - w[1:-1, :-2]) / 4**level


def bratu(u, reactivity):
    h = 1 / (len(u) + 1)
    return laplacian(u) - h**2 * reactivity * jnp.exp(u)


def reactivity_of(n):
    x = jnp.arange(1, n + 1) / (n + 1)
    return 4 + 3 * jnp.sin(5 * x[:, None]) * jnp.cos(3 * x[None, :]) + 2 * x[None, :]


# %% [markdown]
# ## Unrolled, and as a node
#
# Newton's method with conjugate gradients inside, written by hand with a fixed number of iterations so that JAX can go
# back through it; and `solvers.root_find` with the same methods.

# %%
N = 31
REACTIVITY = reactivity_of(N)


def unrolled(reactivity, newton_steps):
    u = jnp.zeros((N, N))
    for _ in range(newton_steps):
        F, jacobian = jax.linearize(lambda u: bratu(u, reactivity), u)
        x, r = jnp.zeros_like(u), -F

        def iterate(state, _, jacobian=jacobian):
            x, r, d = state
            q = jacobian(d)
            alpha = jnp.vdot(r, r) / jnp.vdot(d, q)
            x, new = x + alpha * d, r - alpha * q
            return (x, new, new + jnp.vdot(new, new) / jnp.vdot(r, r) * d), None

        u = u + jax.lax.scan(iterate, (x, r, r), None, length=45)[0][0]
    return jnp.mean(u**2)


def by_node(reactivity, rtol=1e-12, most=50):
    method = solvers.NewtonKrylov(rtol=rtol, atol=rtol, max_iters=most, linear=solvers.CG(rtol=1e-12))
    return jnp.mean(solvers.root_find(bratu, jnp.zeros((N, N)), reactivity, method).value ** 2)


def size(jaxpr):
    """Equations of a jaxpr and of those inside it."""
    inner = [v for e in jaxpr.eqns for v in e.params.values()]
    inner = [v for each in inner for v in (each if isinstance(each, list | tuple) else [each])]
    return len(jaxpr.eqns) + sum(
        size(getattr(v, "jaxpr", v)) for v in inner if hasattr(v, "eqns") or hasattr(v, "jaxpr")
    )


def weigh(loss):
    """Equations of a gradient, and the compiler's temporaries in numbers of the size of u."""
    traced = jax.jit(jax.value_and_grad(loss)).trace(REACTIVITY)
    compiled = traced.lower().compile()
    return size(traced.jaxpr.jaxpr), compiled.memory_analysis().temp_size_in_bytes / (8 * N * N), compiled


exact = jax.jit(jax.value_and_grad(by_node))(REACTIVITY)
scale = float(jnp.max(jnp.abs(exact[1])))
rows = []
for steps in (1, 2, 3, 4, 5):
    equations, temporaries, run = weigh(lambda p, steps=steps: unrolled(p, steps))
    value, gradient = run(REACTIVITY)
    errors = abs(float(value / exact[0] - 1)), float(jnp.max(jnp.abs(gradient - exact[1]))) / scale
    rows.append((steps, equations, temporaries, *errors))
    print(
        f"{steps} Newton steps unrolled: {equations:6,} equations, {temporaries:5.0f} arrays like u, "
        f"error of the value {errors[0]:.0e}, of the gradient {errors[1]:.0e}"
    )

# %%
node_rows = []
gradient_at = jax.jit(jax.value_and_grad(by_node))
for rtol in 10.0 ** -np.arange(1, 13):
    value, gradient = gradient_at(REACTIVITY, rtol)
    errors = abs(float(value / exact[0] - 1)), float(jnp.max(jnp.abs(gradient - exact[1]))) / scale
    node_rows.append((rtol, *errors))
node_equations, node_temporaries, _ = weigh(by_node)
five, fifty = (weigh(lambda p, most=most: by_node(p, most=most))[0] for most in (5, 50))
print(f"as a node: {node_equations} equations, {node_temporaries:.0f} arrays like u, whatever the tolerance")
print(f"at most 5 iterations: {five} equations; at most 50: {fifty}")
results["equations"] = {"node": node_equations, "five": five, "fifty": fifty, "unrolled": [r[1] for r in rows]}
results["temporaries"] = {"node": node_temporaries, "unrolled": [r[2] for r in rows]}
results["gradient_error_over_tolerance"] = max(g / t for t, _, g in node_rows if t > 1e-11)

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
steps = [r[0] for r in rows]
for axis, column, node, label in (
    (axes[0], 1, node_equations, "equations of the gradient's jaxpr"),
    (axes[1], 2, node_temporaries, "temporary arrays of the size of u"),
):
    axis.plot(steps, [r[column] for r in rows], "s-", color="tab:orange", label="unrolled")
    axis.axhline(node, color="tab:blue", label="node")
    axis.set(xlabel="Newton steps unrolled", ylabel=label, yscale="log", xticks=steps)
    axis.legend()
tolerances = np.array([r[0] for r in node_rows])
axes[2].loglog(tolerances, np.maximum([r[1] for r in node_rows], 1e-17), "o-", color="tab:blue", label="value")
axes[2].loglog(tolerances, np.maximum([r[2] for r in node_rows], 1e-17), "^--", color="tab:green", label="gradient")
axes[2].loglog(tolerances, tolerances, ":", color="black", label="the tolerance")
axes[2].set(xlabel="tolerance asked of the node", ylabel="relative error")
axes[2].invert_xaxis()
axes[2].legend()
for axis in axes:
    axis.grid(alpha=0.3)
figure.savefig(OUT / "implicit_nodes_cost.png", dpi=110)

# %% [markdown]
# Unrolled, the program and its memory grow with every iteration, and the gradient lags behind the value: after five
# Newton steps the value has nine digits and the gradient five. The node's gradient costs one solve, its program is the
# same whatever the tolerance, and its error stays below the tolerance that was asked of the value.
#
# ## A larger equilibrium
#
# 255 x 255 points. Conjugate gradients are preconditioned by a multigrid cycle, which is made from the Laplacian; the
# adjoint solve uses its transpose without being asked.

# %%
M = 255
field = reactivity_of(M)
method = solvers.NewtonKrylov(rtol=1e-10, linear=solvers.CG(rtol=1e-10, preconditioner=solvers.multigrid(laplacian)))


def temperature(reactivity):
    return solvers.root_find(bratu, jnp.zeros((M, M)), reactivity, method).value


def loss(reactivity):
    return jnp.mean(temperature(reactivity) ** 2)


u = temperature(field)
with adjoint.watch_solves() as log:
    sensitivity = jax.grad(loss)(field) * M**2  # per unit of area
print(log)
results["adjoint_iterations"] = log.of("adjoint")[0].iterations

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
for axis, (title, values, label) in zip(
    axes,
    (
        ("reactivity", field, "λ (dimensionless)"),
        ("temperature", u, "u (dimensionless)"),
        ("sensitivity of the mean of u²", sensitivity, "∂(mean u²)/∂λ per unit of area"),
    ),
    strict=True,
):
    image = axis.imshow(values.T, origin="lower", extent=(0, 1, 0, 1), cmap="viridis")
    axis.set(title=title, xlabel="x (side of the square)", ylabel="y (side of the square)")
    figure.colorbar(image, ax=axis, label=label)
figure.savefig(OUT / "implicit_nodes_bratu.png", dpi=110)

# %% [markdown]
# The gradient is checked against what does not use it.

# %%
report = adjoint.check_gradient(loss, field)
print(report)
results["gradient_check"] = report.difference_error

# %% [markdown]
# ## A wrong gradient, caught
#
# The formula holds at a root only. Two Newton steps are not enough here; the formula evaluated there gives a field that
# looks like a gradient:

# %%
u2 = jnp.zeros((N, N))
for _ in range(2):
    F, jacobian = jax.linearize(lambda u: bratu(u, REACTIVITY), u2)
    u2 = u2 - cg(jacobian, F, tol=1e-12)[0]
jacobian = jax.linearize(lambda u: bratu(u, REACTIVITY), u2)[1]
w = cg(jacobian, 2 * u2 / N**2, tol=1e-12)[0]
looks_fine = -jax.vjp(lambda p: bratu(u2, p), REACTIVITY)[1](w)[0]
error = float(jnp.max(jnp.abs(looks_fine - exact[1]))) / scale
print(f"the formula after two steps: wrong by {error:.1%} of the largest entry, and nothing says so")
results["unconverged_error"] = error

# %% [markdown]
# A node says so. It knows whether it has converged, and by default it raises; with `throw=False` the value may be
# looked at, but not differentiated.

# %%
stopped = solvers.NewtonKrylov(max_iters=2, linear=solvers.CG())


def quiet(p):
    return jnp.mean(solvers.root_find(bratu, jnp.zeros((N, N)), p, stopped, throw=False).value ** 2)


print("value:", quiet(REACTIVITY))
for attempt in (
    lambda: solvers.root_find(bratu, jnp.zeros((N, N)), REACTIVITY, stopped),
    lambda: jax.grad(quiet)(REACTIVITY),
):
    try:
        attempt()
    except adjoint.SolveError as reason:
        print(reason)
        results["raised"] = results.get("raised", 0) + 1

# %% [markdown]
# The same goes for the adjoint solve. Here it is given two iterations:

# %%
short = solvers.CG(rtol=1e-10, max_iters=2)
try:
    jax.grad(lambda p: jnp.mean(solvers.root_find(bratu, jnp.zeros((N, N)), p, adjoint=short).value ** 2))(REACTIVITY)
except adjoint.SolveError as reason:
    print(reason)
    results["raised"] += 1
(OUT / "implicit_nodes.json").write_text(json.dumps(results, indent=1))
