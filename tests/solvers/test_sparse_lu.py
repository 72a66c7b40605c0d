"""`SparseLU`: right both ways, factors that are kept, and what it says when it fails."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO
from tapeless import adjoint, solvers
from tapeless.adjoint._sparse import Pattern, as_pattern
from tapeless.solvers import _sparse_lu
from tapeless.solvers._factors import FACTORS, clear_factors, factor_statistics, limit_factors
from tapeless.solvers._sparse_lu import SparseLU

N = 6


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    clear_factors()
    yield
    limit_factors(10**9)


def flow(k: Any, u: Any) -> Any:
    """Diffusion with a coefficient per cell, and a wind that makes the structure unsymmetric."""
    w = jnp.pad(u, 1)
    wind = jnp.pad(u, ((2, 0), (0, 0)))[:-2]
    return (3 + k) * u - k * w[2:, 1:-1] - w[:-2, 1:-1] - 0.3 * w[1:-1, 2:] - 0.7 * w[1:-1, :-2] + 0.4 * wind


def inputs(dtype: Any = np.float64) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.uniform(0.5, 1.5, (N, N)), dtype), jnp.asarray(rng.normal(size=(N, N)), dtype)


def solve(k: Any, b: Any, method: Any = SparseLU()) -> Any:  # noqa: B008
    return solvers.linear_solve(lambda u: flow(k, u), b, method).value


def diffusion(u: Any, p: Any) -> Any:
    """An implicit step of reaction and diffusion, structurally symmetric."""
    w = jnp.pad(u, 1)
    laplacian = w[2:, 1:-1] + w[:-2, 1:-1] + w[1:-1, 2:] + w[1:-1, :-2] - 4 * u
    return u - p["u0"] - 0.5 * (p["D"] * laplacian + 4 * (u - u**3))


def step(u0: Any, D: Any, **options: Any) -> Any:
    method = solvers.Newton(linear=SparseLU())
    return solvers.root_find(diffusion, u0, {"u0": u0, "D": D}, method, **options)


def system(rows: Any) -> tuple[Pattern, np.ndarray]:
    A = np.asarray(rows)
    pattern = Pattern(*np.nonzero(A), len(A))
    return pattern, A[pattern.rows, pattern.cols]


def test_values_and_derivatives_are_those_of_dense_lu() -> None:
    """Assert values, gradients, tangents and a Hessian-vector product against `LU()`, and forward against reverse."""
    k, b = inputs()
    dk, v = b[::-1], k[:, ::-1] - 1

    def everything(method: Any) -> Any:
        def loss(k: Any, b: Any) -> Any:
            return jnp.sum(jnp.sin(solve(k, b, method)) * k)

        x, x_dot = jax.jvp(lambda k: solve(k, b, method), (k,), (dk,))
        bars = jax.grad(loss, argnums=(0, 1))(k, b)
        hvp = jax.jvp(lambda k: jax.grad(loss)(k, b), (k,), (dk,))[1]
        k_bar = jax.vjp(lambda k: solve(k, b, method), k)[1](v)[0]
        return x, x_dot, bars, hvp, k_bar

    sparse, dense = jax.jit(lambda: everything(SparseLU()))(), jax.jit(lambda: everything(solvers.LU()))()
    for a, c in zip(jax.tree.leaves(sparse), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(jnp.vdot(v, sparse[1]), jnp.vdot(sparse[4], dk), rtol=1e-12)


def test_linear_solves_share_one_factor() -> None:
    """Assert that value, tangent and gradient of a linear solve factorise once in all."""
    k, b = inputs()
    jax.block_until_ready(jax.jit(lambda: jax.jvp(lambda k: solve(k, b), (k,), (b,)))())
    jax.block_until_ready(jax.jit(jax.grad(lambda b: jnp.sum(solve(k, b) ** 2)))(b))
    assert factor_statistics().factorisations == 1


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_other_dtypes(dtype: Any) -> None:
    """Assert solutions and transposed solves to the rounding of the dtype, which they keep."""
    k, b = inputs()
    if np.issubdtype(dtype, np.complexfloating):
        k, b = k * (1 + 0.5j), b + 1j * b.T
    k, b = k.astype(dtype), b.astype(dtype)
    A = np.asarray(jax.jacfwd(lambda u: flow(k, u), holomorphic=True)(b.astype(complex))).reshape(N * N, N * N)
    assert abs(A - A.T).max() > 0.1
    x, bar = jax.jit(lambda b: (solve(k, b), jax.vjp(lambda b: solve(k, b), b)[1](solve(k, b))[0]))(b)
    assert x.dtype == bar.dtype == dtype
    tolerance = 200 * np.finfo(dtype).eps
    np.testing.assert_allclose(x.ravel(), np.linalg.solve(A, np.asarray(b).ravel()), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(bar.ravel(), np.linalg.solve(A.T, np.asarray(x).ravel()), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_batches_are_solved_lane_by_lane() -> None:
    """Assert that lanes of right-hand sides and of operators agree with single solves, gradients too."""
    k, b = inputs()
    ks, bs = jnp.stack([k, k + 0.5, 2 * k]), jnp.stack([b, -b, b.T])
    one = jax.jit(lambda k, b: (solve(k, b), jax.grad(lambda k: jnp.sum(solve(k, b) ** 3))(k)))
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[one(k, b) for k, b in zip(ks, bs, strict=True)])
    for got, want in zip(jax.jit(jax.vmap(one))(ks, bs), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    clear_factors()
    of_lanes = jax.jit(jax.vmap(lambda b: solve(k, b)))(bs)
    np.testing.assert_allclose(flow(k, of_lanes[2]), b.T, atol=1e-13)
    assert factor_statistics().factorisations == 1


def test_matrices_and_given_structures() -> None:
    """Assert that BCOO, dense and given structures lead to one solution, with the matrix's gradient, jitted or not."""
    k, b = inputs()
    A = np.asarray(jax.jacfwd(lambda u: flow(k, u))(b)).reshape(N * N, N * N)
    rhs, sparse = b.ravel(), BCOO.from_scipy_sparse(scipy.sparse.coo_matrix(A))
    expected = np.linalg.solve(A, rhs)
    w = np.linalg.solve(A.T, 2 * expected)
    for operator in (jnp.asarray(A), sparse):
        np.testing.assert_allclose(solvers.linear_solve(operator, rhs, SparseLU()).value, expected, rtol=1e-12)

    def of_entries(data: Any) -> Any:
        matrix = BCOO((data, sparse.indices), shape=sparse.shape)
        return jnp.sum(solvers.linear_solve(matrix, rhs, SparseLU()).value ** 2)

    i, j = np.asarray(sparse.indices).T
    np.testing.assert_allclose(jax.jit(jax.grad(of_entries))(sparse.data), -w[i] * expected[j], rtol=1e-11, atol=1e-13)
    given = SparseLU(pattern=scipy.sparse.csr_array(A))
    assert given == SparseLU(pattern=sparse)
    assert hash(given.pattern) == hash(SparseLU(sparse).pattern)
    opaque = jax.jit(lambda i, data: solvers.linear_solve(BCOO((data, i), shape=sparse.shape), rhs, given).value)
    np.testing.assert_allclose(opaque(sparse.indices, sparse.data), expected, rtol=1e-12)


def test_adjoint_of_newton_factorises_nothing() -> None:
    """Assert one factorisation an iteration, none in the adjoint, and a gradient right to 1e-12 all the same."""
    u0 = jnp.asarray(np.random.default_rng(5).normal(size=(9, 8)))
    v = jnp.cos(jnp.arange(72.0)).reshape(9, 8)
    forward = jax.jit(lambda u0, D: jax.vjp(lambda *p: step(*p, throw=False).value, u0, D))
    iterations = int(jax.jit(lambda u0, D: step(u0, D, throw=False).stats["iterations"])(u0, 0.8))
    clear_factors()
    u, pull = jax.block_until_ready(forward(u0, 0.8))
    before = factor_statistics()
    assert before.factorisations == iterations > 2
    bars = jax.block_until_ready(pull(v))
    after = factor_statistics()
    assert after.factorisations == before.factorisations
    assert after.neighbours == 1
    J = np.asarray(jax.jacfwd(lambda u: diffusion(u, {"u0": u0, "D": 0.8}))(u)).reshape(72, 72)
    w = np.linalg.solve(J.T, v.ravel())
    F_D = np.asarray(jax.jvp(lambda D: diffusion(u, {"u0": u0, "D": D}), (0.8,), (1.0,))[1]).ravel()
    np.testing.assert_allclose(bars[0].ravel(), w, rtol=0, atol=1e-12 * abs(w).max())
    np.testing.assert_allclose(bars[1], -w @ F_D, rtol=1e-12)
    clear_factors()
    fresh = jax.block_until_ready(pull(v))
    assert factor_statistics().factorisations == 1
    np.testing.assert_allclose(fresh[0], bars[0], rtol=0, atol=1e-13 * abs(w).max())


def test_reports_of_solves() -> None:
    """Assert that refinements and the true residual of the adjoint solve are seen by `watch_solves`."""
    u0 = jnp.linspace(-1.0, 1.0, 30).reshape(5, 6)
    with adjoint.watch_solves() as log:
        jax.block_until_ready(jax.jit(jax.grad(lambda D: jnp.sum(step(u0, D).value ** 2)))(0.8))
    (record,) = log.of("adjoint")
    assert record.method == "SparseLU"
    assert record.converged
    assert record.iterations in (1, 2)
    assert record.residual is not None
    assert record.residual < 1e-13


def test_the_nearest_factor_serves_only_if_it_contracts() -> None:
    """Assert that a similar factor is refined to the exact solution, transposed or not, and a far one is not used."""
    rng = np.random.default_rng(1)
    pattern, values = system(
        np.diag(rng.uniform(3, 4, 30)) + np.diag(rng.normal(size=29), 1) + np.diag(np.ones(28), -2)
    )
    b = rng.normal(size=30)

    def run(values: np.ndarray, *, flipped: bool = False) -> np.ndarray:
        x, (regular, _) = _sparse_lu._solve(values, b, pattern, flipped=flipped, near=True)
        A = pattern.matrix(values).toarray()
        np.testing.assert_allclose(x, np.linalg.solve(A.T if flipped else A, b), rtol=1e-13, atol=1e-14)
        assert regular
        return np.array(factor_statistics()[:4])

    run(values)
    run(-values)
    for flipped in (False, True):
        counts = run(values * rng.uniform(0.99, 1.01, values.size), flipped=flipped)
        assert counts[0] == 2
        assert counts[3] == 1 + flipped
    assert run(values * rng.uniform(-3, 3, values.size))[0] == 3
    group = "lu", values.dtype.str, pattern.digest
    assert FACTORS.nearest(group, -1.01 * values) == FACTORS.nearest(group, -values) != FACTORS.nearest(group, values)


def test_entries_outside_the_pattern_are_a_failure() -> None:
    """Assert that no entry is missed in silence, however small, and that complete patterns pass."""
    k, b = inputs()
    A = np.array(jax.jacfwd(lambda u: flow(k, u))(b)).reshape(N * N, N * N)
    A[7, 20] = 0.0
    more = lambda size: lambda u: jnp.asarray(A) @ u + size * jnp.zeros(N * N).at[7].set(u[20])
    status = lambda size: solvers.linear_solve(more(size), b.ravel(), SparseLU(A), throw=False).status
    found = jax.jit(jax.vmap(status))(jnp.array([0.0, 1.0, 1e-6, 1e-9]))
    converged, incomplete = (np.asarray(found == s) for s in (adjoint.Status.converged, adjoint.Status.incomplete))
    assert converged.tolist() == [True, False, False, False]
    assert incomplete.tolist() == [False, True, True, True]
    with pytest.raises(adjoint.SolveError, match="outside the sparsity pattern"):
        solvers.linear_solve(more(1e-3), b.ravel(), SparseLU(A))
    conjugate = lambda u: 3 * u + jnp.conj(u)
    solution = solvers.linear_solve(conjugate, b + 1j * b.T, SparseLU(np.eye(N * N)), throw=False)
    assert not bool(solution.status == adjoint.Status.converged)


def test_failures_have_their_own_status() -> None:
    """Assert that singular matrices, exactly or in rounding, and numbers that are none are told apart, per lane."""
    _, b = inputs()
    neumann = jnp.array([2.0, 1.0])

    def A(k: Any, u: Any) -> Any:
        w = jnp.pad(u, 1, mode="edge")
        return k * (4 * u - w[2:, 1:-1] - w[:-2, 1:-1] - w[1:-1, 2:] - w[1:-1, :-2]) + (k - 1) * u

    status = jax.vmap(lambda k: solvers.linear_solve(lambda u: A(k, u), b, SparseLU(), throw=False).status)
    found = status(jnp.array([1.0, 2.0, jnp.nan, 0.0]))
    S = adjoint.Status
    for lane, expected in enumerate([S.singular, S.converged, S.nonfinite, S.converged]):
        assert bool(jax.tree.map(lambda x, lane=lane: x[lane], found) == expected)
    zero = solvers.linear_solve(lambda u: 0 * u, neumann, SparseLU(), throw=False)
    assert bool(zero.status == S.singular)
    with pytest.raises(ValueError, match="Expected 36 rows, got 2"):
        solvers.linear_solve(lambda u: u, b, SparseLU(np.eye(2)))


def test_pivoting_and_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert small errors for zero diagonals and for rows and columns of all sizes, and a second try for bad pivots."""
    rng = np.random.default_rng(7)
    B, size = rng.normal(size=(3, 8)), 10.0 ** rng.integers(-4, 5, 20)
    saddle = np.block([[np.diag(rng.uniform(1, 2, 8)), B.T], [B, np.zeros((3, 3))]])
    line = np.diag(rng.uniform(2, 3, 20)) + np.diag(np.ones(19), 1) + np.diag(np.ones(19), -1)
    wild = 10.0 ** rng.integers(-30, 31, (20, 1)) * line * size

    def error(A: np.ndarray, exact: np.ndarray) -> float:
        pattern, values = system(A)
        x, (regular, _) = _sparse_lu._solve(values, A @ exact, pattern, flipped=False, near=False)
        assert regular
        return float(np.max(abs(x / exact - 1)))

    assert error(saddle, rng.uniform(1, 2, 11)) < 1e-13
    assert error(wild, rng.uniform(1, 2, 20) / size) < 1e-13
    assert factor_statistics().factorisations == 2
    monkeypatch.setattr(_sparse_lu, "_THRESHOLD", 1e-30)
    assert error(rng.normal(size=(9, 9)) * np.where(np.eye(9), 1e-25, 1), rng.uniform(1, 2, 9)) < 1e-12
    assert factor_statistics().factorisations == 4


def test_the_cache_is_bounded_and_threads_share_it() -> None:
    """Assert that old factors go when the bound is met, that a forgotten one is made anew, and that threads agree."""
    k, b = inputs()
    run = jax.jit(solve)
    jax.block_until_ready([run(k + i, b) for i in range(4)])
    counts = factor_statistics()
    assert counts.factorisations == counts.kept == 4
    assert counts.hits == 0
    limit_factors(2 * counts.bytes // 4 + 1000)
    assert factor_statistics().kept == 2
    assert factor_statistics().bytes <= 2 * counts.bytes // 4 + 1000
    jax.block_until_ready([run(k + i, b) for i in (3, 0)])
    assert factor_statistics().hits == 1
    assert factor_statistics().factorisations == 5
    limit_factors(0)
    assert factor_statistics().kept == 1
    limit_factors(10**9)
    pattern, values = system(np.diag(np.full(300, 4.0)) + np.diag(np.ones(299), 1) - np.diag(np.ones(299), -1))

    def work(i: int) -> Any:
        b = np.cos(np.arange(300.0) * (i + 1))
        return _sparse_lu._solve(values * (1 + i % 3), b, pattern, flipped=bool(i % 2), near=False)[0]

    clear_factors()
    expected = [work(i) for i in range(60)]
    assert factor_statistics().factorisations == 3
    assert factor_statistics().hits == 57
    with ThreadPoolExecutor(6) as pool:
        for got, want in zip(pool.map(work, range(60)), expected, strict=True):
            np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="number of bytes"):
        limit_factors(-1)


def test_without_a_hook_the_structure_is_found_from_products() -> None:
    """Assert the same solution where a method is handed products only, those of the transpose included."""
    k, b = inputs()
    _, matvec = jax.linearize(lambda u: flow(k, u), b)
    transpose = jax.linear_transpose(matvec, b)
    outcome = jax.jit(lambda b: SparseLU().solve(matvec, b, b))(b)
    back = jax.jit(lambda b: SparseLU().transposed(b).solve(lambda v: transpose(v)[0], b, b))(b)
    assert bool(outcome.status == adjoint.Status.converged)
    assert bool(back.status == adjoint.Status.converged)
    np.testing.assert_allclose(flow(k, outcome.value), b, atol=1e-13)
    np.testing.assert_allclose(transpose(back.value)[0], b, atol=1e-13)
    assert factor_statistics().factorisations == 1
    assert as_pattern(SparseLU().for_function(lambda u: flow(k, u), b).pattern) is not None
