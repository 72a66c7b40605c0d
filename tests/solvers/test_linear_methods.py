"""All linear methods on the systems they are for: values, derivatives of both orders, statuses, sizes, and misuse."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from helpers import equations, max_error
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from tapeless import solvers
from tapeless.adjoint import Status

N = 7
TREE = {"p": np.zeros(3), "q": np.zeros((2, 2))}
ROWS, COLUMNS = np.nonzero(np.ones((N, N)))


def generic(rng: Any, *shape: int, kind: str = "real") -> Any:
    x = rng.normal(size=shape)
    return x + 1j * rng.normal(size=shape) if kind == "complex tree" else x


def unsymmetric(rng: Any, kind: str) -> Any:
    return generic(rng, N, N, kind=kind) / 3 + 1.5 * np.eye(N)


def definite(rng: Any, kind: str) -> Any:
    A = generic(rng, N, N, kind=kind)
    return A @ A.conj().T / N + np.eye(N)


def indefinite(rng: Any, kind: str) -> Any:
    """Hermitian, with eigenvalues of both signs and of sizes between 1 and 2."""
    Q = np.linalg.qr(generic(rng, N, N, kind=kind))[0]
    return (Q * np.array([-2.0, -1.5, -1.0, 1.0, 1.3, 1.6, 2.0])) @ Q.conj().T


def banded(lower: int, upper: int) -> Callable[[Any, str], Any]:
    return lambda rng, kind: np.triu(np.tril(unsymmetric(rng, kind), upper), -lower)


# Each method with a system that it is for, and a status that a matrix of another kind provokes.
METHODS = {
    "cg": (solvers.CG(rtol=1e-13), definite),
    "minres": (solvers.MINRES(rtol=1e-13), indefinite),
    "gmres": (solvers.GMRES(rtol=1e-13), unsymmetric),
    "bicgstab": (solvers.BiCGStab(rtol=1e-13), unsymmetric),
    "lu": (solvers.LU(), unsymmetric),
    "cholesky": (solvers.Cholesky(), definite),
    "tridiagonal": (solvers.Tridiagonal(), banded(1, 1)),
    "banded": (solvers.Banded(lower=2, upper=1), banded(2, 1)),
}
KRYLOV = ["cg", "minres", "gmres", "bicgstab"]
KINDS = ["complex tree", "float32", "dense", "sparse"]
# Each method on one kind of system at every run, and on all of them in the slow ones.
CASES = [
    pytest.param(name, kind, marks=[] if kind == KINDS[i % 2] else pytest.mark.slow)
    for i, name in enumerate(METHODS)
    for kind in KINDS
]
LANES = [pytest.param(name, marks=[] if name in KRYLOV else pytest.mark.slow) for name in METHODS]


def operator(kind: str, A: Any) -> Any:
    """The same matrix as an array, with indices, and as a function that closes over it."""
    if kind in ("dense", "float32"):
        return A
    if kind == "sparse":
        return BCOO((A[ROWS, COLUMNS], jnp.stack([ROWS, COLUMNS], axis=1)), shape=A.shape)
    unravel = ravel_pytree(jax.tree.map(lambda x: x + 0j, TREE))[1]
    return lambda v: unravel(A @ ravel_pytree(v)[0])


def solution(kind: str, method: Any, A: Any, b: Any, **options: Any) -> Any:
    if kind == "complex tree":
        b = ravel_pytree(jax.tree.map(lambda x: x + 0j, TREE))[1](b)
    return ravel_pytree(solvers.linear_solve(operator(kind, A), b, method, **options).value)[0]


def by_numpy(A: Any, b: Any, db: Any, ct: Any, dA: Any) -> Any:
    """x, dx, Ā and b̄ by their equations, with transposes that conjugate nothing."""
    x = np.linalg.solve(A, b)
    w = np.linalg.solve(A.T, ct)
    return x, np.linalg.solve(A, db - dA @ x), -np.outer(w, x), w


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_value_tangent_and_cotangent(name: str, kind: str) -> None:
    """Assert value, tangent and cotangents (by b and by each entry of A) against dense solves; the dot test; jit."""
    rng = np.random.default_rng(3)
    method, make = METHODS[name]
    A, dA = make(rng, kind), generic(rng, N, N, kind=kind)
    args = A, *(generic(rng, N, kind=kind) for _ in range(3)), dA
    tolerance = 2e-12
    if kind == "float32":
        args, tolerance = [x.astype(np.float32) for x in args], 2e-5
        method = type(method)(rtol=1e-6) if name in KRYLOV else method

    def evaluate(A: Any, b: Any, db: Any, ct: Any, dA: Any) -> Any:
        x, tangent = jax.linearize(lambda A, b: solution(kind, method, A, b), A, b)
        return x, tangent(dA, db), *jax.linear_transpose(tangent, A, b)(ct)

    found = jax.jit(evaluate)(*args)
    assert {x.dtype for x in found} == {args[0].dtype}
    wide = [x.astype(np.result_type(x, np.float64)) for x in args]
    for ours, exact in zip(found, by_numpy(*wide), strict=True):
        assert max_error(ours, exact) < tolerance
    _, db, ct, dA = args[1:]
    _, dx, A_bar, b_bar = map(np.asarray, found)
    assert abs(ct @ dx - np.sum(A_bar * dA) - b_bar @ db) < tolerance * 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cg", "gmres"])
def test_second_order(name: str) -> None:
    """Assert forward over reverse and reverse over reverse through the operator's closure against dense solves."""
    rng = np.random.default_rng(5)
    method, make = METHODS[name]
    A, dA, v = make(rng, "real"), rng.normal(size=(N, N)), rng.normal(size=N)
    p, weight = rng.normal(size=N) / 10, rng.normal(size=N)

    def loss(solve: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        def of(p: Any) -> Any:
            matrix = A + jnp.diag(p**2) + 0.1 * p[0] * p[1] * (dA + dA.T if name == "cg" else dA)
            return jnp.vdot(weight, solve(matrix, 1 + jnp.sin(p)) ** 3)

        return of

    def second_order(f: Callable[[Any], Any]) -> Any:
        gradient = jax.grad(f)
        return jax.jvp(gradient, (p,), (v,))[1], jax.grad(lambda p: jnp.vdot(gradient(p), v))(p)

    exact, _ = second_order(loss(jnp.linalg.solve))
    found = second_order(loss(lambda A, b: solvers.linear_solve(lambda x: A @ x, b, method).value))
    for ours in found:
        assert max_error(ours, exact) < 1e-12


@pytest.mark.parametrize("name", LANES)
def test_lanes(name: str) -> None:
    """Assert that lanes with matrices of their own equal single solves in value, count, status and gradient.

    The first has nothing to do, and the third no solution: it fails alone, and its gradient alone is NaN.
    """
    rng = np.random.default_rng(7)
    method, make = METHODS[name]
    A = np.stack([make(rng, "real"), np.eye(N), np.zeros((N, N)), make(rng, "real")])
    b, weight = rng.normal(size=(4, N)) * np.array([[0], [1], [1], [1]]), rng.normal(size=N)

    def both(A: Any, b: Any) -> Any:
        def f(b: Any) -> Any:
            found = solvers.linear_solve(lambda v: A @ v, b, method, throw=False)
            return jnp.vdot(weight, found.value), found

        (_, found), gradient = jax.value_and_grad(f, has_aux=True)(b)
        return found.value, found.status == Status.converged, found.stats.get("iterations", 0), gradient

    x, converged, iterations, gradient = jax.jit(jax.vmap(both))(A, b)
    assert converged.tolist() == [True, True, False, True]
    for i in (0, 1, 3):
        assert max_error(x[i], np.linalg.solve(A[i], b[i])) < 1e-12
        assert max_error(gradient[i], np.linalg.solve(A[i].T, weight)) < 1e-12
    assert np.array_equal(x[0], np.zeros(N))
    assert np.all(np.isnan(gradient[2]))
    if name in KRYLOV:
        alone = [solvers.linear_solve(a, r, method, throw=False).stats["iterations"] for a, r in zip(A, b, strict=True)]
        assert iterations.tolist() == [int(count) for count in alone]
        assert iterations.tolist()[:2] == [0, 1]
        assert int(iterations[3]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_one_unknown_and_none(name: str) -> None:
    """Assert values and gradients of systems of one unknown and of none."""

    def f(A: Any, b: Any) -> Any:
        return jnp.sum(solvers.linear_solve(lambda v: A @ v, b, METHODS[name][0]).value)

    value, (by_A, by_b) = jax.value_and_grad(f, argnums=(0, 1))(np.array([[4.0]]), np.array([2.0]))
    assert (float(value), float(by_A[0, 0]), float(by_b[0])) == (0.5, -0.125, 0.25)
    value, (by_A, by_b) = jax.value_and_grad(f, argnums=(0, 1))(np.zeros((0, 0)), np.zeros(0))
    assert (float(value), by_A.shape, by_b.shape) == (0.0, (0, 0), (0,))


@pytest.mark.parametrize("name", KRYLOV)
def test_start_at_the_solution(name: str) -> None:
    """Assert no iterations and no residual from the solution (S29), few from near it, and none for no unknowns."""
    A = jnp.array([[4.0, 1.0], [2.0 if name in ("gmres", "bicgstab") else 1.0, 3.0]])
    exact = jnp.array([1.0, 2.0])
    method = METHODS[name][0]
    found = solvers.linear_solve(A, A @ exact, method, x0=exact)
    assert np.array_equal(found.value, exact)
    assert (int(found.stats["iterations"]), float(found.stats["residual"])) == (0, 0.0)
    near = solvers.linear_solve(A, A @ exact, method, x0=exact * (1 + 1e-14))
    assert int(near.stats["iterations"]) == 0
    empty = solvers.linear_solve(lambda v: v, jnp.zeros(0), method)
    assert (empty.value.shape, int(empty.stats["iterations"])) == ((0,), 0)


SINGULAR = np.diag([2.0, 3.0, 0.0, 1.0])
UNSYMMETRIC = np.eye(4) + np.diag([2.0, -1.0, 2.0], 1)  # in mirrored places, where a crude probe sees nothing
OUTSIDE = UNSYMMETRIC + np.eye(4, k=2)
# What each method must say of matrices that it is not for (one of several where rounding decides).
FAULTS = {
    "cg": [
        (np.diag([1.0, -2.0, 3.0, 4.0]), {"indefinite"}),
        (SINGULAR, {"indefinite"}),
        (UNSYMMETRIC, {"unsymmetric"}),
    ],
    "minres": [(UNSYMMETRIC, {"unsymmetric"}), (SINGULAR, {"stalled", "max_iterations"})],
    "gmres": [(SINGULAR, {"stalled"})],
    "bicgstab": [(SINGULAR, {"stalled", "max_iterations"}), (np.kron([[0, 1], [-1, 0]], np.eye(2)), {"stalled"})],
    "lu": [(SINGULAR, {"singular"})],
    "cholesky": [(SINGULAR, {"indefinite"}), (UNSYMMETRIC, {"unsymmetric"}), (-np.eye(4), {"indefinite"})],
    "tridiagonal": [(SINGULAR, {"singular"}), (OUTSIDE, {"unbanded"})],
    "banded": [(SINGULAR, {"singular"}), (OUTSIDE, {"unbanded"})],
}


STATUSES = ["converged", "max_iterations", "singular", "nonfinite", "stalled", "indefinite", "unsymmetric", "unbanded"]


def status_of(A: Any, b: Any, method: Any) -> str:
    """The name of the status of a solve, by its sentence."""
    status = solvers.linear_solve(jnp.asarray(A, float), jnp.asarray(b), method, throw=False).status
    sentence = Status[status]
    return next(name for name in STATUSES if Status[getattr(Status, name)] == sentence)


@pytest.mark.parametrize("name", METHODS)
def test_faults_are_told(name: str) -> None:
    """Assert the status of each kind of matrix that a method is not for, and of values that are no numbers."""
    b, method = np.array([1.0, -2.0, 0.5, 3.0]), METHODS[name][0]
    for A, expected in FAULTS[name]:
        assert status_of(A, b, method) in expected
    assert status_of(np.eye(4) * np.nan, b, method) == "nonfinite"
    assert status_of(np.eye(4), np.where(b > 2, np.inf, b), method) == "nonfinite"
    assert status_of(np.eye(4) * 1e-300, b * 1e100, method) != "converged"  # the solution overflows
    assert status_of(np.eye(4), b, method) == "converged"


@pytest.mark.parametrize("name", KRYLOV)
def test_limits_are_told(name: str) -> None:
    """Assert that a limit on iterations is kept and told, with the residual of the value that is returned."""
    rng = np.random.default_rng(13)
    A, b = METHODS[name][1](rng, "real"), rng.normal(size=N)
    found = solvers.linear_solve(A, b, type(METHODS[name][0])(rtol=1e-12, max_iters=3), throw=False)
    assert found.status == Status.max_iterations
    assert int(found.stats["iterations"]) == 3
    residual = np.linalg.norm(b - A @ np.asarray(found.value))
    assert 0 < residual <= np.linalg.norm(b)
    assert float(found.stats["residual"]) == pytest.approx(residual, rel=1e-12)


@pytest.mark.parametrize("name", ["lu", "cholesky", "tridiagonal", "banded"])
def test_singular_to_the_last_digit_is_told(name: str) -> None:
    """Assert that a singular matrix whose pivots are rounding errors, not zeros, is told; and bad scaling is not it."""
    conductivity = np.random.default_rng(0).uniform(0.5, 2, 19)
    difference = np.diff(np.eye(20), axis=0)
    neumann = difference.T @ (conductivity[:, None] * difference)
    b = np.sin(np.arange(20.0))
    assert status_of(neumann, b - b.mean(), METHODS[name][0]) == "singular"
    scales = 10.0 ** (10 * np.cos(np.arange(20)))
    regular = solvers.linear_solve(scales[:, None] * (neumann + np.eye(20)) * scales, scales * b, METHODS[name][0])
    assert max_error(regular.value * scales, np.linalg.solve(neumann + np.eye(20), b)) < 1e-13


def ill_conditioned(rng: Any, kind: str, count: int = 200, n: int = 12) -> Any:
    """Matrices of condition numbers from 1 to 10^17, and right-hand sides in their range and out of it."""
    Q, P = (np.linalg.qr(rng.normal(size=(count, n, n)))[0] for _ in range(2))
    d = 10.0 ** (-rng.uniform(0, 17, (count, 1)) * np.arange(n) / (n - 1))[:, None]
    if kind == "indefinite":
        d = d * np.where(rng.normal(size=d.shape) > 0, 1, -1)
    A = Q * d @ np.swapaxes(P if kind == "unsymmetric" else Q, 1, 2)
    A = A if kind == "unsymmetric" else (A + np.swapaxes(A, 1, 2)) / 2
    b = rng.normal(size=(count, n))
    b[::3] = np.einsum("kij,kj->ki", A, b)[::3]
    return A, b


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*KRYLOV, "lu", "cholesky"])
def test_converged_is_never_wrong(name: str, dtype: Any) -> None:
    """Assert for 200 matrices of all condition numbers that "converged" means what it says, in exact arithmetic.

    A product of A and x has a rounding error, which no solver can see below.
    """
    method, make = METHODS[name]
    rtol = 1e-10 if dtype == np.float64 else 1e-5
    method = type(method)(rtol=rtol) if name in KRYLOV else method
    A, b = (x.astype(dtype) for x in ill_conditioned(np.random.default_rng(17), make.__name__))

    def run(A: Any, b: Any) -> Any:
        found = solvers.linear_solve(A, b, method, throw=False)
        return found.value, found.status == Status.converged

    x, converged = map(np.asarray, jax.jit(jax.vmap(run))(A, b))
    wide = [y.astype(np.longdouble) for y in (A, b, x)]
    r, size = (
        np.linalg.norm(v.astype(float), axis=1) for v in (np.einsum("kij,kj->ki", wide[0], wide[2]) - wide[1], b)
    )
    rounding = np.finfo(dtype).eps * np.linalg.norm(x.astype(float), axis=1)  # A is of norm 1
    allowed = 1.5 * rtol * size + rounding if name in KRYLOV else 12 * (rounding + np.finfo(dtype).eps * size)
    assert np.all(r[converged] <= allowed[converged])
    assert np.sum(converged) > 40
    assert np.sum(~converged) > 5


@pytest.mark.parametrize("name", KRYLOV)
def test_matrix_free_both_ways(name: str) -> None:
    """Assert that value and gradient hold nothing of the size of a matrix, nor more equations for more iterations."""
    n = 2000

    def gradient(max_iters: int, rtol: float) -> Any:
        def total(shift: Any, b: Any) -> Any:
            def A(v: Any) -> Any:
                return (2.1 + shift) * v - jnp.pad(v[1:], (0, 1)) - jnp.pad(v[:-1], (1, 0))

            method = type(METHODS[name][0])(rtol=rtol, max_iters=max_iters)
            return jnp.sum(solvers.linear_solve(A, b, method).value)

        return list(equations(jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1)))(jnp.ones(n), jnp.ones(n))))

    few = gradient(5, 1e-3)
    sizes = [v.aval.size for eqn in few for v in eqn.outvars if hasattr(v.aval, "size")]
    assert n <= max(sizes) <= 40 * n
    assert len(few) == len(gradient(500, 1e-12))


def test_misuse_is_told() -> None:
    """Assert one error each, with expected and got, for what `test_linear.py` leaves: tolerances, matrices, bands."""
    A, b = jnp.eye(2), jnp.ones(2)
    with pytest.raises(
        ValueError, match=r"`rtol` must be reachable in float32: expected at least 4.8e-07, got 1.0e-10"
    ):
        solvers.linear_solve(A.astype(jnp.float32), b.astype(jnp.float32), solvers.CG(rtol=1e-10))
    with pytest.raises(ValueError, match=r"`rtol` must be reachable in float32"):
        solvers.linear_solve(A.astype(jnp.float32), b.astype(jnp.float32), adjoint=solvers.GMRES(rtol=1e-10))
    with pytest.raises(TypeError, match=r"`adjoint` must be an instance such as solvers.CG\(\).*got 'gmres'"):
        solvers.linear_solve(lambda v: 2 * v, b, adjoint="gmres")  # pyright: ignore
    with pytest.raises(TypeError, match=r"`method` must be an instance such as solvers.CG\(\)"):
        solvers.linear_solve(A, b, solvers.CG)  # pyright: ignore
    with pytest.raises(TypeError, match=r"got csr_matrix. .*BCOO.from_scipy_sparse"):
        solvers.linear_solve(scipy.sparse.csr_matrix(np.eye(2)), b)  # pyright: ignore
    with pytest.raises(ValueError, match=r"Expected shapes \(N, N\) and \(N,\), got \(2, 2\) and \(3,\)"):
        solvers.linear_solve(A, jnp.ones(3))
    with pytest.raises(ValueError, match=r"got \(2, 2\) and \(2, 4\). For several right-hand sides use jax.vmap"):
        solvers.linear_solve(A, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"square matrix and a vector"):
        solvers.linear_solve(BCOO.fromdense(jnp.ones((2, 3))), b)
    with pytest.raises(ValueError, match=r"structure and shapes of `b`. Expected {'u': \(2,\)}, got \(2,\)"):
        solvers.linear_solve(lambda v: v["u"], {"u": b})
    with pytest.raises(ValueError, match=r"`restart` must be an integer of at least 1, got 0"):
        solvers.GMRES(restart=0)
    with pytest.raises(ValueError, match=r"`lower` must be a number of diagonals .*got -1"):
        solvers.Banded(lower=-1, upper=0)
    with pytest.raises(TypeError, match=r"`preconditioner` must be a function v -> M v.*got 3"):
        solvers.linear_solve(A, b, solvers.CG(preconditioner=3))
