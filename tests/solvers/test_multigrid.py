"""Geometric multigrid: its transfers, its transpose, iterations that do not grow, and a Bratu problem on top."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from tapeless import adjoint, solvers
from tapeless.solvers._multigrid import _interpolated, _restricted


def laplacian(v: Any, level: int = 0) -> Any:
    """2d + 1 points, zero beyond the boundary."""
    w = jnp.pad(v, 1)
    inner = tuple(slice(1, -1) for _ in v.shape)
    around = sum(jnp.roll(w, 1, axis) + jnp.roll(w, -1, axis) for axis in range(v.ndim))[inner]
    return (2 * v.ndim * v - around) / 4**level


def neumann(v: Any, level: int = 0) -> Any:
    """The same by fluxes that vanish at the walls, and a little more to be regular."""
    flux = [jnp.pad(jnp.diff(v, axis=a), [(int(k == a),) * 2 for k in range(v.ndim)]) for a in range(v.ndim)]
    return 1e-3 * v - sum(jnp.diff(f, axis=a) for a, f in enumerate(flux)) / 4**level


def matrix(f: Any, shape: tuple[int, ...]) -> Any:
    n = int(np.prod(shape))
    return jax.vmap(f)(jnp.eye(n).reshape(n, *shape)).reshape(n, -1).T


@pytest.mark.parametrize("beyond", ["zero", "edge"])
@pytest.mark.parametrize("shape", [(9,), (7, 12), (6, 5, 4), (1, 8)], ids=str)
def test_restriction_is_the_transpose_of_interpolation(shape: tuple[int, ...], beyond: str) -> None:
    """Assert R = Pᵀ / 2ᵈ, and that interpolation is exact for linear functions away from the boundary."""
    coarse = jax.eval_shape(lambda v: _restricted(v, beyond), jnp.zeros(shape)).shape
    P = matrix(lambda v: _interpolated(v, shape, beyond), coarse)
    R = matrix(lambda v: _restricted(v, beyond), shape)
    assert np.allclose(P, 2 ** sum(n > 1 for n in shape) * R.T, rtol=0, atol=1e-15)
    if beyond == "edge":
        assert np.allclose(P.sum(axis=1), 1, rtol=0, atol=1e-15)


def test_the_transposed_cycle() -> None:
    """Assert that the transposed preconditioner of an unsymmetric operator is its transpose, and differs from it."""
    shape = (9, 12)

    def operator(v: Any, level: int) -> Any:
        w = jnp.pad(v, 1)
        return laplacian(v, level) * (1 + jnp.linspace(0, 1, v.shape[0])[:, None]) + 0.3 * w[2:, 1:-1] / 2**level

    grids, like = solvers.multigrid(operator, sweeps=2, coarsest=4).hoisted(jnp.zeros(shape)), jnp.zeros(shape)
    M = matrix(grids.prepare(lambda v: v, like), shape)
    assert np.allclose(matrix(grids.transposed(like).prepare(lambda v: v, like), shape), M.T, rtol=0, atol=1e-15)
    assert np.max(np.abs(M - M.T)) > 1e-2


@pytest.mark.parametrize(("operator", "beyond", "most"), [(laplacian, "zero", 11), (neumann, "edge", 13)])
def test_iterations_do_not_grow_with_the_grid(operator: Any, beyond: str, most: int) -> None:
    """Assert a bound on the iterations at 31² and 127² points, where plain conjugate gradients take ever more."""
    counts, plain = [], []
    grids = solvers.multigrid(operator, beyond=beyond)
    for n in (31, 127):
        b = jnp.asarray(np.random.default_rng(0).normal(size=(n, n)))
        for M, found in ((grids, counts), (None, plain)):
            method = solvers.CG(rtol=1e-8, preconditioner=M)
            found.append(int(solvers.linear_solve(operator, b, method).stats["iterations"]))
    assert max(counts) <= most
    assert plain[1] > 2.5 * plain[0] > 2.5 * counts[0]


def test_bratu() -> None:
    """Assert a gradient by 63² parameters against differences, its iterations, and that no array is large."""
    n = 63
    h = 1 / (n + 1)
    rng = np.random.default_rng(1)
    c, strength = jnp.asarray(rng.normal(size=(n, n))), jnp.asarray(1 + 4 * rng.uniform(size=(n, n)))
    linear = solvers.CG(rtol=1e-10, preconditioner=solvers.multigrid(laplacian))
    method = solvers.NewtonKrylov(rtol=1e-10, linear=linear)

    def residual(u: Any, strength: Any) -> Any:
        return laplacian(u) - h**2 * strength * jnp.exp(u)

    def loss(strength: Any) -> Any:
        return jnp.vdot(c, solvers.root_find(residual, jnp.zeros((n, n)), strength, method).value)

    both = jax.jit(jax.value_and_grad(loss))
    gradient = both(strength)[1]
    v, step = jnp.asarray(rng.normal(size=(n, n))), 1e-3
    difference = (both(strength + step * v)[0] - both(strength - step * v)[0]) / (2 * step)
    assert float(jnp.vdot(v, gradient)) == pytest.approx(float(difference), rel=1e-6)
    with adjoint.watch_solves() as log:
        u = solvers.root_find(residual, jnp.zeros((n, n)), strength, method).value
        solvers.linear_solve(lambda v: laplacian(v) - h**2 * strength * jnp.exp(u) * v, c, linear)
        jax.block_until_ready(both(strength))
    forward, adjoint_solve = log[1].iterations, log.of("adjoint")[0].iterations
    assert forward is not None
    assert adjoint_solve is not None
    assert adjoint_solve <= 1.2 * forward
    sizes = [v.aval.size for e in equations(jax.make_jaxpr(jax.value_and_grad(loss))(strength)) for v in e.outvars]
    assert max(sizes) <= 2 * n * n


def test_misuse() -> None:
    """Assert one sentence each."""
    with pytest.raises(TypeError, match="must be a function operator"):
        solvers.multigrid(jnp.eye(3))  # pyright: ignore
    with pytest.raises(ValueError, match='"zero" or "edge"'):
        solvers.multigrid(laplacian, beyond="periodic")
    tree = {"a": jnp.ones(3)}
    with pytest.raises(TypeError, match="one array on a grid"):
        solvers.linear_solve(lambda v: v, tree, solvers.CG(preconditioner=solvers.multigrid(laplacian)))
    halved = solvers.multigrid(lambda v, level: v[::2])
    with pytest.raises(ValueError, match=r"Expected \(20,\) on level 0, got \(10,\)"):
        solvers.linear_solve(laplacian, jnp.ones(20), solvers.CG(preconditioner=halved))
