"""Trouble cases S28 to S36 of linear solves, where `CG` and `LU` can meet them, with the values given there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tapeless import adjoint, solvers

METHODS = {"cg": solvers.CG(rtol=1e-13), "lu": solvers.LU()}
D = jnp.diag(jnp.array([1.0, 2.0, 3.0]))


def solve(A: Any, b: Any, method: Any, **options: Any) -> Any:
    return solvers.linear_solve(lambda v: A @ v, b, method, **options)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_s28_zero_right_hand_side(method: Any) -> None:
    """Assert x = 0 in no iterations, with the gradient of the transposed system."""
    solution = solve(D, jnp.zeros(3), method)
    assert np.array_equal(solution.value, np.zeros(3))
    assert int(solution.stats.get("iterations", 0)) == 0
    by_b = jax.grad(lambda b: jnp.sum(solve(D, b, method).value))(jnp.zeros(3))
    assert np.allclose(by_b, (1, 1 / 2, 1 / 3), rtol=0, atol=1e-14)
    by_A = jax.grad(lambda A: jnp.sum(solve(A, jnp.zeros(3), method).value))(D)
    assert np.array_equal(by_A, np.zeros((3, 3)))


def test_s28_zero_tolerance() -> None:
    """Assert that a tolerance of zero ends without NaN at the exact solution."""
    solution = solve(D, jnp.array([1.0, 2.0, 3.0]), solvers.CG(rtol=0.0, max_iters=20), throw=False)
    assert np.allclose(solution.value, 1, rtol=0, atol=1e-15)
    tiny = solve(jnp.array([[2.0, 1.5], [1.5, 3.0]]), jnp.zeros(2), solvers.CG(), x0=jnp.array([5e-324, 0.0]))
    assert np.max(np.abs(tiny.value)) <= 1e-300


def test_s29_start_at_the_solution() -> None:
    """Assert no iterations from the solution."""
    solution = solve(jnp.eye(2), -jnp.ones(2), solvers.CG(), x0=-jnp.ones(2))
    assert np.array_equal(solution.value, -np.ones(2))
    assert int(solution.stats["iterations"]) == 0


def test_s30_unsymmetric_matrix() -> None:
    """Assert that conjugate gradients on an unsymmetric matrix is right or fails, and never silently wrong."""
    A = jnp.eye(3).at[0, 1].set(1.0)
    solution = solve(A, jnp.ones(3), solvers.CG(), throw=False)
    right = np.allclose(solution.value, (0, 1, 1), rtol=0, atol=1e-6)
    assert right or bool(adjoint.failed(solution.status))
    assert np.allclose(solve(A, jnp.ones(3), solvers.LU()).value, (0, 1, 1), rtol=0, atol=1e-15)


def test_s31_undeclared_singular_matrix_is_flagged() -> None:
    """Assert that LU reports the pure-Neumann matrix as singular, and CG the inconsistent right-hand side."""
    A = 2 * jnp.eye(8) - jnp.eye(8, k=1) - jnp.eye(8, k=-1)
    A = A.at[0, 0].set(1.0).at[7, 7].set(1.0)
    b = jnp.cos(jnp.pi * (jnp.arange(8) + 0.5) / 8)
    assert solve(A, b, solvers.LU(), throw=False).status == adjoint.Status.singular
    assert bool(adjoint.failed(solve(A, b + 1, solvers.CG(), throw=False).status))
    assert np.allclose(solve(A, b, solvers.CG(rtol=1e-12)).value, 6.568535592272 * b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_s32_unsymmetric_perturbation(method: Any) -> None:
    """Assert the tangent of a symmetric matrix in an unsymmetric direction."""
    A, dA = jnp.array([[1.0, -1.0], [-1.0, 2.0]]), jnp.array([[0.0, 1.0], [0.0, 0.0]])
    x, dx = jax.jvp(lambda A: solve(A, jnp.ones(2), method).value, (A,), (dA,))
    assert np.allclose(x, (3, 2), rtol=0, atol=1e-12)
    assert np.allclose(dx, (-4, -2), rtol=0, atol=1e-12)


def test_s33_gradient_of_the_start_is_zero() -> None:
    """Assert exact zeros of the right shape for the start of CG and of Newton, under jit and vmap."""

    def total(x0: Any) -> Any:
        return jnp.sum(solve(jnp.diag(jnp.array([1.0, 3.0])), jnp.array([1.0, 2.0]), solvers.CG(), x0=x0).value)

    gradient = jax.jit(jax.vmap(jax.grad(total)))(jnp.zeros((3, 2)))
    assert np.array_equal(gradient, np.zeros((3, 2)))
    assert float(jax.grad(lambda g: solvers.root_find(lambda x, _: x**2 - 2, g).value)(1.5)) == 0.0


def test_s34_lanes_finish_at_different_times() -> None:
    """Assert that batched lanes equal lanes run one by one, with per-lane iterations."""
    A = jnp.diag(jnp.arange(1.0, 6.0))
    b = jnp.stack([jnp.zeros(5), jnp.eye(5)[0], jnp.ones(5)])

    def run(b: Any) -> Any:
        solution = solve(A, b, solvers.CG(rtol=1e-12))
        return solution.value, solution.stats["iterations"]

    values, iterations = jax.vmap(run)(b)
    assert np.allclose(values, np.stack([run(row)[0] for row in b]), rtol=0, atol=1e-15)
    assert iterations.tolist() == [0, 1, 5]
    gradient = jax.vmap(jax.grad(lambda b: jnp.sum(run(b)[0])))(b)
    assert np.allclose(gradient, 1 / np.arange(1.0, 6.0), rtol=0, atol=1e-11)


def test_s35_float32_is_not_believed() -> None:
    """Assert that the true residual decides: a claimed success in float32 has it within the tolerance."""
    i = np.arange(1, 101)
    Q = np.sqrt(2 / 101) * np.sin(np.pi * np.outer(i, i) / 101)
    A = (Q * np.logspace(0, 4, 100)) @ Q.T
    A32, b32 = jnp.asarray(A, jnp.float32), jnp.ones(100, jnp.float32)
    for rtol in (1e-6, 1e-5, 1e-3):
        solution = solve(A32, b32, solvers.CG(rtol=rtol), throw=False)
        true = np.linalg.norm(np.ones(100) - np.asarray(A32, float) @ np.asarray(solution.value, float)) / 10
        if solution.status == adjoint.Status.converged:
            assert true < 1.5 * rtol
        else:
            assert rtol < 1e-3
            assert true > rtol / 2
        # Computed in float32, b - A x is known to the rounding of A x only, which is as large as itself here.
        assert float(solution.stats["residual"]) / 10 == pytest.approx(true, rel=0.5, abs=1e-6)
    x = solve(jnp.asarray(A), jnp.ones(100), solvers.CG(rtol=1e-10, max_iters=5000)).value
    assert float(jnp.sum(x)) == pytest.approx(93.767050406276, rel=1e-8)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_s36_complex_systems(method: Any) -> None:
    """Assert the value and the gradient (JAX's conjugate convention) of Hermitian and of real systems."""
    b = jnp.array([1.0, 1.0j])

    def loss(A: Any, b: Any) -> Any:
        return jnp.abs(solve(A, b, method).value[0]) ** 2

    hermitian = jnp.array([[2.0, 1.0j], [-1.0j, 2.0]])
    assert np.allclose(solve(hermitian, b, method).value, b, rtol=0, atol=1e-12)
    g = jax.grad(loss, argnums=1)(hermitian, b)
    assert np.allclose([g[0].real, -g[0].imag, g[1].real, -g[1].imag], (4 / 3, 0, 0, 2 / 3), rtol=0, atol=1e-12)
    g = jax.grad(loss, argnums=1)(jnp.array([[2.0, 1.5], [1.5, 3.0]]) + 0j, b)
    assert np.allclose([g[0].real, -g[0].imag, g[1].real, -g[1].imag], (1.28, -0.64, -0.64, 0.32), rtol=0, atol=1e-12)


def test_empty_and_misshapen_systems() -> None:
    """Assert that no unknowns are no trouble, and that shapes which do not fit are one error."""
    assert solvers.linear_solve(jnp.zeros((0, 0)), jnp.zeros(0)).value.shape == (0,)
    assert solvers.root_find(lambda u, p: u, jnp.zeros(0)).value.shape == (0,)
    with pytest.raises(ValueError, match=r"square matrix and a vector. Expected shapes .* got \(2, 3\)"):
        solvers.linear_solve(jnp.zeros((2, 3)), jnp.zeros(2))


def test_large_matrix_free_gradient() -> None:
    """Assert that the gradient of a matrix-free solve is matrix-free: 10⁵ unknowns, no N × N array anywhere."""
    n = 100_000

    def total(shift: Any) -> Any:
        def A(v: Any) -> Any:
            return (2 + shift) * v - jnp.pad(v[1:], (0, 1)) - jnp.pad(v[:-1], (1, 0))

        return jnp.sum(solvers.linear_solve(A, jnp.ones(n), solvers.CG(rtol=1e-10)).value)

    step = 1e-4
    difference = (total(1.0 + step) - total(1.0 - step)) / (2 * step)
    assert float(jax.grad(total)(1.0)) == pytest.approx(float(difference), rel=1e-6)


def test_operators_that_conjugate() -> None:
    """Assert value and gradient where a complex operator is not linear over the complex numbers."""
    x = solvers.linear_solve(lambda v: v + 0.3 * jnp.conj(v), jnp.array([1 + 1j])).value
    assert np.allclose(x, 1 / 1.3 + 1j / 0.7, rtol=0, atol=1e-14)
    f = lambda q: solvers.root_find(lambda u, q: u + 0.3 * jnp.conj(u) - (1 + 1j * q), 0j, q).value.imag
    assert float(jax.grad(f)(1.0)) == pytest.approx(1 / 0.7, abs=1e-13)
    complexed = solvers.linear_solve(jnp.eye(2) * (1 + 1j), jnp.array([1.0, 2.0])).value
    assert np.allclose(complexed, np.array([1, 2]) * (1 - 1j) / 2)
    with pytest.raises(ValueError, match="real values for real unknowns"):
        solvers.root_find(lambda u, p: u + 1j, 1.0)


def test_the_ends_of_the_number_range() -> None:
    """Assert that right-hand sides near underflow and overflow are solved, and infinite ones told."""
    for size in (1e-170, 1e170):
        assert np.allclose(solve(2 * jnp.eye(2), size * jnp.ones(2), solvers.CG()).value / size, 0.5)
    for method in METHODS.values():
        infinite = solve(jnp.eye(2), jnp.array([jnp.inf, 1.0]), method, throw=False)
        assert infinite.status == adjoint.Status.nonfinite
    assert (
        solve(1e-300 * jnp.eye(2), jnp.array([1e100, 1.0]), solvers.LU(), throw=False).status
        == adjoint.Status.nonfinite
    )


def test_lu_looks_at_its_residual() -> None:
    """Assert refinement under pivot growth, and statuses for matrices that the dtype cannot resolve."""
    n = 60
    growth = np.eye(n) - np.tril(np.ones((n, n)), -1)
    growth[:, -1] = 1
    x = solvers.linear_solve(jnp.asarray(growth), jnp.asarray(growth @ np.ones(n))).value
    assert np.allclose(x, 1, rtol=0, atol=1e-12)
    i = np.arange(14)
    hilbert = jnp.asarray(1 / (i[:, None] + i + 1.0))
    assert solvers.linear_solve(hilbert, jnp.ones(14), throw=False).status == adjoint.Status.singular
    bad_scales = jnp.diag(jnp.array([1e-200, 1.0, 1e200]))
    assert np.allclose(solvers.linear_solve(bad_scales, jnp.array([1e-200, 1.0, 1e200])).value, 1)


def test_nonlinear_operators_are_told() -> None:
    """Assert that an operator which is not linear is a failure, not the solution of its linearisation."""
    for method in METHODS.values():
        solution = solvers.linear_solve(lambda v: v + v**3, jnp.array([1.0, 2.0]), method, throw=False)
        assert solution.status == adjoint.Status.nonlinear


def test_misuse_is_one_error() -> None:
    """Assert expected and got for lists, names of methods, shapes of x0, and operators that are not square."""
    with pytest.raises(TypeError, match=r"function v -> A v or a square array, got list"):
        solvers.linear_solve([[2, 0], [0, 2]], jnp.ones(2))  # pyright: ignore
    with pytest.raises(TypeError, match=r"instance such as solvers.CG\(\) or solvers.LU\(\), got 'cg'"):
        solvers.linear_solve(jnp.eye(2), jnp.ones(2), "cg")  # pyright: ignore
    with pytest.raises(ValueError, match=r"structure and shapes of `b`. Expected \(2,\), got \(1,\)"):
        solvers.linear_solve(lambda v: v[:1], jnp.ones(2))
    with pytest.raises(ValueError, match=r"`x0` must have the structure and shapes of `b`"):
        solvers.linear_solve(jnp.eye(2), jnp.ones(2), x0=jnp.ones(3))
    with pytest.raises(ValueError, match="must not be negative or NaN, got -1"):
        solvers.linear_solve(jnp.eye(2), jnp.ones(2), solvers.CG(rtol=-1.0))
    single = solvers.linear_solve(jnp.eye(2), jnp.ones(2), solvers.CG(), x0=jnp.ones(2, jnp.float32))
    assert single.value.dtype == jnp.float64
