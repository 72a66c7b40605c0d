"""Preconditioners of one's own: transposed for the adjoint solve, closing over anything, without derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from jax import lax
from jax.scipy.linalg import solve_triangular
from tapeless import adjoint, solvers
from tapeless.adjoint import Status

N = 60
RNG = np.random.default_rng(2)
# Transport against a gradient of speed: the forward sweep is nearly the inverse, its transpose the inverse of Aᵀ.
LOWER = np.diag(1 + RNG.uniform(size=N)) - np.diag(1 + RNG.uniform(size=N - 1), -1)
TRANSPORT = LOWER + np.diag(0.1 * RNG.uniform(size=N - 1), 1)
B, WEIGHT = RNG.normal(size=N), RNG.normal(size=N)
# Symmetric, with a diagonal over four decades.
STIFF = np.diag(np.logspace(0, 4, N)) + 0.3 * (np.eye(N, k=1) + np.eye(N, k=-1))


def sweep(v: Any) -> Any:
    return solve_triangular(LOWER, v, lower=True)


def back_sweep(v: Any) -> Any:
    return solve_triangular(LOWER, v, lower=True, trans=1)


def by_host(matrix: Any) -> Any:
    """A function that JAX can evaluate, and not transpose."""
    inverse = np.linalg.inv(matrix)
    return lambda v: jax.pure_callback(lambda v: inverse @ np.asarray(v), v, v, vmap_method="sequential")


def gradient(method: Any, **options: Any) -> Any:
    """The gradient by b and the solves that it took."""

    def f(b: Any) -> Any:
        return jnp.vdot(WEIGHT, solvers.linear_solve(lambda v: TRANSPORT @ v, b, method, **options).value)

    with adjoint.watch_solves() as log:
        found = jax.jit(jax.grad(f))(B)
    (forward,), (backward,) = log.of("forward"), log.of("adjoint")
    return found, forward, backward


@pytest.mark.parametrize("method", [solvers.GMRES, solvers.BiCGStab])
def test_the_adjoint_solve_transposes(method: Any) -> None:
    """Assert as many iterations back as forward, where the preconditioner as it stands takes far more or fails."""
    found, forward, backward = gradient(method(rtol=1e-12, preconditioner=sweep))
    assert max_error(found, np.linalg.solve(TRANSPORT.T, WEIGHT)) < 1e-10
    assert 2 <= forward.iterations <= 30
    assert backward.iterations <= forward.iterations + 1
    wrong = method(rtol=1e-12, max_iters=4 * forward.iterations, preconditioner=sweep)
    _, _, untransposed = gradient(method(rtol=1e-12, preconditioner=sweep), adjoint=wrong, throw=False)
    assert not untransposed.converged


def test_a_given_transpose() -> None:
    """Assert that a function JAX cannot transpose serves with its transpose, to second order, and is named without."""
    there, back = by_host(LOWER), by_host(LOWER.T)
    M = solvers.preconditioner(there, transpose=back)
    found, forward, backward = gradient(solvers.GMRES(rtol=1e-12, preconditioner=M))
    assert max_error(found, np.linalg.solve(TRANSPORT.T, WEIGHT)) < 1e-10
    assert backward.iterations <= forward.iterations + 1

    bare = solvers.GMRES(rtol=1e-10, preconditioner=there)
    x = solvers.linear_solve(TRANSPORT, B, bare).value
    assert max_error(x, np.linalg.solve(TRANSPORT, B)) < 1e-8
    tangent = jax.jvp(lambda b: solvers.linear_solve(TRANSPORT, b, bare).value, (B,), (WEIGHT,))[1]
    assert max_error(tangent, np.linalg.solve(TRANSPORT, WEIGHT)) < 1e-8
    with pytest.raises(ValueError, match=r"JAX cannot transpose this one .*solvers.preconditioner\(apply, transpose="):
        gradient(bare)
    other = solvers.GMRES(rtol=1e-10, preconditioner=back)
    assert max_error(gradient(bare, adjoint=other)[0], found) < 1e-8


def test_transposed_means_not_conjugated() -> None:
    """Assert that a complex preconditioner is not conjugated: the exact inverse takes one iteration both ways."""
    A = TRANSPORT[:8, :8] + 1j * RNG.normal(size=(8, 8))
    inverse = np.linalg.inv(A)
    method = solvers.GMRES(rtol=1e-10, preconditioner=lambda v: inverse @ v)
    with adjoint.watch_solves() as log:
        solve = jax.jit(lambda b, ct: jax.vjp(lambda b: solvers.linear_solve(A, b, method).value, b)[1](ct)[0])
        w = solve(B[:8] + 0j, WEIGHT[:8] * (1 - 2j))
    assert max_error(w, np.linalg.solve(A.T, WEIGHT[:8] * (1 - 2j))) < 1e-9
    assert [record.iterations for record in log] == [1, 1]


def total(p: Any, scale: Any = 1.0) -> Any:
    """A preconditioner that closes over the parameters of the operator, and over one that is its own."""
    method = solvers.CG(rtol=1e-12, preconditioner=lambda v: scale * v / (jnp.diag(STIFF) + p))
    found = solvers.linear_solve(lambda v: STIFF @ v + p * v, B, method)
    return jnp.vdot(WEIGHT, found.value), found.stats["iterations"]


def dense(p: Any) -> Any:
    A = STIFF + np.diag(p)
    return -np.linalg.solve(A, WEIGHT) * np.linalg.solve(A, B)


@pytest.mark.slow
def test_closing_over_parameters() -> None:
    """Assert gradients in eager, jit, vmap and second order where M closes over them; and M has no derivative."""
    p, dp = 1 + RNG.uniform(size=N), RNG.normal(size=N)
    both = jax.grad(total, argnums=(0, 1), has_aux=True)
    (by_p, by_scale), iterations = both(p, 0.7)
    assert max_error(by_p, dense(p)) < 1e-11
    assert float(by_scale) == 0.0
    assert int(iterations) <= 15 < int(solvers.linear_solve(STIFF, B, solvers.CG(rtol=1e-12)).stats["iterations"])

    def hessian_product(p: Any) -> Any:
        return jax.jvp(lambda p: both(p, 0.7)[0], (p,), (dp,))

    ps = np.stack([p, 3 * p])
    (by_ps, by_scales), (products, crossed) = jax.jit(jax.vmap(hessian_product))(ps)
    assert np.array_equal(by_scales, np.zeros(2))
    assert np.array_equal(crossed, np.zeros(2))
    for q, ours, product in zip(ps, by_ps, products, strict=True):
        assert max_error(ours, dense(q)) < 1e-11
        difference = (dense(q + 1e-5 * dp) - dense(q - 1e-5 * dp)) / 2e-5
        assert max_error(product, difference) < 1e-8


@pytest.mark.slow
def test_another_method_for_the_adjoint_solve() -> None:
    """Assert that `adjoint=` brings its own method, tolerance and preconditioner, and that its errors are its own."""
    exact = np.linalg.solve(TRANSPORT.T, WEIGHT)
    errors = []
    for rtol in (1e-2, 1e-10):
        method = solvers.BiCGStab(rtol=rtol, preconditioner=back_sweep)
        found, forward, backward = gradient(solvers.LU(), adjoint=method)
        assert (forward.method, backward.method) == ("LU", "BiCGStab")
        assert backward.residual <= rtol * np.linalg.norm(WEIGHT)
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert all(error < 20 * rtol for error, rtol in zip(errors, (1e-2, 1e-10), strict=True))
    assert errors[0] > 1e-6
    found, _, backward = gradient(solvers.GMRES(preconditioner=sweep), adjoint=solvers.LU())
    assert (backward.method, backward.iterations) == ("LU", None)
    assert max_error(found, exact) < 1e-13


def test_on_pytrees_and_lanes() -> None:
    """Assert that M sees the structure of the unknowns, and that lanes count their own iterations."""
    method = solvers.MINRES(rtol=1e-12, preconditioner=lambda v: {"u": v["u"] / 100, "p": v["p"] / 0.3})

    def A(v: Any) -> Any:
        return {"u": 100 * v["u"] + v["p"], "p": v["u"] - 0.3 * v["p"]}

    def run(scale: Any) -> Any:
        found = solvers.linear_solve(A, {"u": scale * B, "p": scale * WEIGHT}, method)
        return found.value, found.stats["iterations"]

    x, iterations = jax.jit(jax.vmap(run))(np.array([0.0, 1.0]))
    matrix = np.block([[100 * np.eye(N), np.eye(N)], [np.eye(N), -0.3 * np.eye(N)]])
    exact = np.linalg.solve(matrix, np.concatenate([B, WEIGHT]))
    assert max_error(np.concatenate([x["u"][1], x["p"][1]]), exact) < 1e-10
    assert iterations.tolist()[0] == 0
    assert 2 <= iterations.tolist()[1] <= 6


@pytest.mark.parametrize("method", [solvers.CG, solvers.MINRES])
def test_an_indefinite_one_is_told(method: Any) -> None:
    """Assert the status for a preconditioner that is not positive definite, in methods that need it."""
    M = lambda v: v * jnp.where(jnp.arange(N) == 3, -1.0, 1.0)
    found = solvers.linear_solve(STIFF, B * (np.arange(N) == 3), method(preconditioner=M), throw=False)
    assert found.status == Status.indefinite


def test_one_with_a_loop() -> None:
    """Assert that a loop of known length needs no given transpose, and one with a condition is named."""
    A = jnp.asarray(STIFF)

    def jacobi_sweeps(v: Any, loop: Any) -> Any:
        d = jnp.diag(A)
        return loop(lambda x: x + (v - A @ x) / d, v / d)

    counted = lambda v: jacobi_sweeps(v, lambda f, x: lax.fori_loop(0, 2, lambda _, x: f(x), x))
    conditional = lambda v: jacobi_sweeps(
        v, lambda f, x: lax.while_loop(lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0]
    )

    def f(b: Any, M: Any) -> Any:
        return jnp.vdot(WEIGHT, solvers.linear_solve(A, b, solvers.CG(rtol=1e-12, preconditioner=M)).value)

    assert max_error(jax.jit(jax.grad(f), static_argnums=1)(B, counted), np.linalg.solve(STIFF, WEIGHT)) < 1e-11
    with pytest.raises(ValueError, match=r"needs the transpose of the preconditioner"):
        jax.make_jaxpr(jax.grad(f), static_argnums=1)(B, conditional)
