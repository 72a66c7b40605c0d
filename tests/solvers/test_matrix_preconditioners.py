"""Preconditioners made from the operator: `jacobi`, `ilu`, `amg`, and their transposes."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tapeless import adjoint, solvers
from tapeless.solvers._amg import amg
from tapeless.solvers._factors import clear_factors, factor_statistics, limit_factors
from tapeless.solvers._ilu import ilu
from tapeless.solvers._jacobi import jacobi
from tapeless.solvers._structured import Structured

pytestmark = pytest.mark.slow  # compilation, for a minute


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    clear_factors()
    yield
    limit_factors(10**9)


def poisson(u: Any) -> Any:
    w = jnp.pad(u, 1)
    return 4 * u - w[2:, 1:-1] - w[:-2, 1:-1] - w[1:-1, 2:] - w[1:-1, :-2]


def windy(k: Any, u: Any) -> Any:
    """Diffusion with a wind and a coefficient per cell."""
    w = jnp.pad(u, 1)
    return k * poisson(u) + 0.9 * (u - w[:-2, 1:-1]) + 0.5 * (u - w[1:-1, :-2])


def fields(n: int, seed: int = 2) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(0.5, 1.5, (n, n))), jnp.asarray(rng.normal(size=(n, n)))


def dense(f: Callable[[Any], Any], like: Any) -> np.ndarray:
    flat, unravel = ravel_pytree(like)
    return np.asarray(jax.vmap(lambda e: ravel_pytree(f(unravel(e)))[0])(jnp.eye(flat.size, dtype=flat.dtype))).T


def adjoint_solves(loss: Callable[[Any], Any], at: Any) -> tuple[Any, Any]:
    with adjoint.watch_solves() as log:
        value = jax.block_until_ready(jax.jit(jax.grad(loss))(at))
    return value, log


def test_jacobi_removes_the_sizes_of_rows() -> None:
    """Assert that CG on a badly scaled operator needs the iterations of the well scaled one, both ways."""
    _, b = fields(8)
    scale = 10.0 ** jnp.linspace(-3, 3, 64).reshape(8, 8)
    A = lambda u: scale * poisson(scale * u)
    solution = solvers.linear_solve(A, b, solvers.CG(preconditioner=jacobi()))
    plain = solvers.linear_solve(A, b, solvers.CG(), throw=False)
    assert int(solution.stats["iterations"]) < 80 < int(plain.stats["iterations"])
    given, found = jax.jit(lambda b: [M.prepare(A, b)(b) for M in (jacobi(diagonal=4 * scale**2), jacobi())])(b)
    np.testing.assert_allclose(given, found, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_blocks_solve_what_they_hold(dtype: Any) -> None:
    """Assert that block Jacobi inverts an operator of unsymmetric blocks at once, and its transpose in the adjoint."""
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=(7, 3, 3)) + 3 * np.eye(3)
    blocks = jnp.asarray(blocks + (1j * rng.normal(size=blocks.shape) if dtype == np.complex128 else 0), dtype)
    b = jnp.asarray(rng.normal(size=(7, 3)), dtype)
    method = solvers.GMRES(rtol=1e-5, preconditioner=jacobi(block=3))

    def loss(b: Any) -> Any:
        x = solvers.linear_solve(lambda u: jnp.einsum("nij,nj->ni", blocks, u), b, method).value
        return jnp.sum(x**3).real

    bar, log = adjoint_solves(loss, b)
    assert [record.iterations for record in log] == [1, 1]
    x = np.linalg.solve(np.asarray(blocks), np.asarray(b)[..., None])
    w = np.linalg.solve(np.swapaxes(np.asarray(blocks), 1, 2), 3 * x**2)[..., 0]
    np.testing.assert_allclose(bar, w, rtol=2e-4)


def test_a_zero_on_the_diagonal() -> None:
    """Assert that values of zero leave their part alone, and that a missing or given zero is an error."""
    k = jnp.array([0.0, 0.5, 3.0])
    apply = jax.jit(lambda v: jacobi().prepare(lambda u: k * u + jnp.roll(u, 1), v)(v))
    np.testing.assert_allclose(apply(jnp.array([2.0, 2.0, 2.0])), [2.0, 4.0, 2 / 3])
    singular = jnp.array([[[1.0, 2.0], [2.0, 4.0]], [[3.0, 1.0], [0.0, 2.0]]])
    apply = jax.jit(lambda v: jacobi(block=2).prepare(lambda u: jnp.einsum("nij,nj->ni", singular, u), v)(v))
    expected = np.stack([[1.0, 1.0], np.linalg.solve(singular[1], np.ones(2))])
    np.testing.assert_allclose(apply(jnp.ones((2, 2))), expected)
    with pytest.raises(ValueError, match="empty diagonal block"):
        solvers.linear_solve(lambda u: u[::-1], jnp.ones(4), solvers.CG(preconditioner=jacobi()))
    with pytest.raises(ValueError, match="entries that are zero"):
        jacobi(diagonal=jnp.array([1.0, 0.0]))


@pytest.mark.parametrize("method", [solvers.GMRES, pytest.param(solvers.BiCGStab, marks=pytest.mark.slow)])
def test_ilu_both_ways(method: Any) -> None:
    """Assert few iterations forward and in the adjoint, one factorisation for both, and the gradient."""
    k, b = fields(12)
    method = method(rtol=1e-11, preconditioner=ilu())
    loss = lambda k: jnp.sum(jnp.sin(solvers.linear_solve(lambda u: windy(k, u), b, method).value))
    bar, log = adjoint_solves(loss, k)
    assert [record.kind for record in log] == ["forward", "adjoint"]
    assert max(record.iterations for record in log) <= 8
    assert factor_statistics().factorisations == 1
    A = dense(lambda u: windy(k, u), b)
    x = np.linalg.solve(A, b.ravel()).reshape(12, 12)
    w = np.linalg.solve(A.T, np.cos(x).ravel()).reshape(12, 12)
    np.testing.assert_allclose(bar, -w * poisson(x), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("make", [ilu, lambda: jacobi(block=4), amg, lambda: amg(kind="ruge_stuben", cycle="W")])
def test_transposes(make: Any) -> None:
    """Assert that the preconditioner of the transposed operator is the transpose, or for AMG as near to its inverse."""
    k, b = fields(8)
    operator = lambda u: windy(k, u)
    transpose = lambda v: jax.linear_transpose(operator, b)(v)[0]
    M = make()
    assert isinstance(M, Structured)
    M = M.for_function(operator, b)
    forward = dense(jax.jit(M.prepare(operator, b)), b)
    back = dense(jax.jit(M.transposed(b).prepare(transpose, b)), b)
    A = dense(operator, b)
    assert abs(A - A.T).max() > 0.8
    if "AMG" in type(M).__name__:
        errors = [np.linalg.norm(np.eye(64) - X, 2) for X in (forward @ A, back @ A.T)]
        assert max(errors) < 0.7
    else:
        np.testing.assert_allclose(back, forward.T, rtol=1e-12, atol=1e-13)


def test_forgotten_factors_are_made_again() -> None:
    """Assert the same solution when the cache keeps one factor only and lanes need several; float32 too."""
    k, b = fields(8)
    method = solvers.BiCGStab(rtol=1e-5, preconditioner=ilu())

    @jax.jit
    @jax.vmap
    def solve(k: Any) -> Any:
        return solvers.linear_solve(lambda u: windy(k, u), b.astype(k.dtype), method).value

    ks = jnp.stack([k, k + 1, 2 * k]).astype(jnp.float32)
    kept = jax.block_until_ready(solve(ks))
    assert kept.dtype == jnp.float32
    assert factor_statistics().factorisations == 3
    clear_factors()
    limit_factors(0)
    np.testing.assert_array_equal(jax.block_until_ready(solve(ks)), kept)
    assert factor_statistics().kept == 1
    assert factor_statistics().factorisations > 3
    for k, x in zip(ks, kept, strict=True):
        np.testing.assert_allclose(windy(k, x), b, rtol=0, atol=1e-4)


def test_ilu_of_a_matrix_that_has_none() -> None:
    """Assert that a breakdown of the incomplete factorisation is met by a shift, and a NaN by its status."""
    null = lambda u: u - u[jnp.array([1, 0])]
    apply = ilu().prepare(null, jnp.ones(2))
    assert bool(jnp.all(jnp.isfinite(apply(jnp.ones(2)))))
    broken = solvers.linear_solve(
        lambda u: jnp.nan * u + 0 * u[::-1], jnp.ones(3), solvers.BiCGStab(preconditioner=ilu()), throw=False
    )
    assert bool(broken.status == adjoint.Status.nonfinite)


def test_amg_iterations_hardly_grow() -> None:
    """Assert that CG with AMG needs about as many iterations on four times the points, and the adjoint as many."""
    counts = []
    for n in (16, 32):
        _, b = fields(n)
        loss = lambda b: jnp.sum(solvers.linear_solve(poisson, b, solvers.CG(preconditioner=amg())).value ** 2)
        _, log = adjoint_solves(loss, b)
        counts += [record.iterations for record in log]
    assert max(counts) <= 12
    assert max(counts) - min(counts) <= 3
    assert factor_statistics().factorisations == 2


def test_amg_is_deterministic_and_leaves_random_numbers_alone() -> None:
    """Assert that equal matrices give equal cycles, and that NumPy's global generator goes on as before."""
    _, b = fields(16)
    np.random.seed(4)  # noqa: NPY002
    expected = np.random.rand(3)  # noqa: NPY002
    np.random.seed(4)  # noqa: NPY002
    first = amg().prepare(poisson, b)(b)
    np.testing.assert_array_equal(np.random.rand(3), expected)  # noqa: NPY002
    clear_factors()
    np.testing.assert_array_equal(amg().prepare(poisson, b)(b), first)


def test_a_root_with_a_preconditioned_iteration() -> None:
    """Assert that Newton-Krylov hands the structure on, and that the gradient is that of the implicit function."""
    k, b = fields(6)
    residual = lambda u, k: windy(k, u) + u**3 - b
    method = solvers.NewtonKrylov(linear=solvers.BiCGStab(preconditioner=ilu()))

    @jax.jit
    def root(k: Any) -> Any:
        u, pull = jax.vjp(lambda k: solvers.root_find(residual, b, k, method, throw=False).value, k)
        return u, pull(jnp.cos(u))[0]

    u, bar = root(k)
    J = dense(lambda v: jax.jvp(lambda u: residual(u, k), (u,), (v,))[1], u)
    w = np.linalg.solve(J.T, np.cos(u).ravel()).reshape(6, 6)
    np.testing.assert_allclose(bar, -w * poisson(u), rtol=1e-8, atol=1e-9)


def test_settings_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert one clear error for each setting out of range, and for pyamg where it is not installed."""
    for call, text in (
        (lambda: jacobi(block=0), "size of a block"),
        (lambda: jacobi(block=2, diagonal=jnp.ones(2)), "Leave one of them out"),
        (lambda: ilu(drop_tol=-1.0), "`drop_tol` must be at least 0"),
        (lambda: ilu(fill_factor=0.5), "`fill_factor` must be at least 1"),
        (lambda: amg(kind="classical"), "'smoothed_aggregation', 'ruge_stuben'"),
        (lambda: amg(cycle="X"), "`cycle` must be one of 'V', 'W', 'F'"),
        (lambda: jacobi(block=3).prepare(lambda u: u, jnp.ones(4)), "blocks of 3 for 4 unknowns"),
        (lambda: jacobi(diagonal=jnp.ones(2)).prepare(lambda u: u, jnp.ones(4)), "structure and shapes"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    monkeypatch.setitem(sys.modules, "pyamg", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install tapeless\[amg\]"):
        amg()
