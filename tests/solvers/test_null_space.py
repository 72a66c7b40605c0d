"""Singular systems with declared null spaces: solutions, gradients by the pseudo-inverse, and misuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from tapeless import adjoint, solvers
from tapeless.adjoint import Status

N = 9
RNG = np.random.default_rng(4)
KRYLOV = solvers.GMRES(rtol=1e-13)


def singular(rng: Any, nullity: int, *, complex_numbers: bool = False) -> Any:
    """An unsymmetric matrix, and bases of its null space and of that of its conjugate transpose, as rows."""

    def orthogonal() -> Any:
        x = rng.normal(size=(N, N))
        return np.linalg.qr(x + 1j * rng.normal(size=(N, N)) if complex_numbers else x)[0]

    U, V = orthogonal(), orthogonal()
    A = (U[:, nullity:] * np.linspace(1, 3, N - nullity)) @ V[:, nullity:].conj().T
    mixed = rng.normal(size=(2, nullity, nullity))  # neither orthogonal nor of length one
    return A, mixed[0] @ V[:, :nullity].T, mixed[1] @ U[:, :nullity].T


def directions(A: Any) -> Any:
    """Changes of A that leave both null spaces as they are: those that a gradient by A is defined for."""
    pinv = np.linalg.pinv(A)
    return [A @ RNG.normal(size=(N, N)) @ A / 3, A @ pinv @ RNG.normal(size=(N, N)) @ pinv @ A]


@pytest.mark.parametrize(("method", "nullity"), [(KRYLOV, 1), (solvers.LU(), 3)])
def test_unsymmetric(method: Any, nullity: int) -> None:
    """Assert solution, tangent and cotangents of a matrix whose left null space is another, by the pseudo-inverse."""
    A, Z, W = singular(np.random.default_rng(6), nullity)
    Z, W = (Z[0], W[0]) if nullity == 1 else (Z, W)
    b, weight = A @ RNG.normal(size=N), RNG.normal(size=N)
    db = RNG.normal(size=N)
    pinv = np.linalg.pinv(A)

    def f(A: Any, b: Any) -> Any:
        found = solvers.linear_solve(lambda v: A @ v, b, method, null_space=Z, left_null_space=W)
        return jnp.vdot(weight, found.value), found.value

    @jax.jit
    def all_of(A: Any, b: Any, db: Any) -> Any:
        (_, x), gradients = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(A, b)
        return x, gradients, jax.jvp(lambda b: f(A, b)[1], (b,), (db,))[1]

    x, (by_A, by_b), dx = all_of(A, b, db)
    assert max_error(x, pinv @ b) < 1e-12
    assert max_error(np.atleast_2d(Z) @ x, np.zeros(nullity)) < 1e-12
    assert max_error(by_b, pinv.T @ weight) < 1e-12
    assert max_error(dx, pinv @ db) < 1e-12
    for dA in directions(A):
        step = 1e-6
        both = [np.linalg.pinv(A + sign * step * dA, rcond=1e-9) @ b @ weight for sign in (1, -1)]
        assert float(np.sum(by_A * dA)) == pytest.approx((both[0] - both[1]) / (2 * step), rel=1e-7)


@pytest.mark.slow
def test_symmetric_by_conjugate_gradients() -> None:
    """Assert that CG and MINRES need the null space once only, with a preconditioner and lanes, in float32 too."""
    L = 2 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1)
    L[0, 0] = L[-1, -1] = 1
    b, weight = np.cos(np.pi * (np.arange(N) + 0.5) / N), np.arange(N) * 1.0
    pinv = np.linalg.pinv(L)

    def run(b: Any, scale: Any, method: Any) -> Any:
        ones = jnp.ones_like(b)
        f = lambda b: jnp.vdot(
            weight.astype(b.dtype),
            solvers.linear_solve(lambda v: scale * (L.astype(b.dtype) @ v), b, method, null_space=ones).value,
        )
        return jax.value_and_grad(f)(b)

    for method in (solvers.CG(rtol=1e-12), solvers.MINRES(rtol=1e-12, preconditioner=lambda v: v / 2)):
        value, by_b = jax.jit(jax.vmap(lambda b, s: run(b, s, method)))(np.stack([b, 0 * b]), np.array([1.0, 1e6]))
        assert max_error(value, np.array([weight @ pinv @ b, 0.0])) < 1e-11
        for ours, scale in zip(by_b, (1.0, 1e6), strict=True):
            assert max_error(ours * scale, pinv @ weight) < 1e-10
    value, by_b = run(b.astype(np.float32), np.float32(1), solvers.CG(rtol=1e-5))
    assert by_b.dtype == np.float32
    assert max_error(by_b, pinv @ weight) < 1e-4


def test_complex_and_pytrees() -> None:
    """Assert that the left null space is that of Aᴴ for complex numbers, and that both may be pytrees."""
    A, Z, W = singular(np.random.default_rng(8), 2, complex_numbers=True)
    b = A @ (RNG.normal(size=N) + 1j * RNG.normal(size=N))
    split = lambda v: {"p": v[..., :4], "q": v[..., 4:]}
    join = lambda v: jnp.concatenate([v["p"], v["q"]], axis=-1)
    found = solvers.linear_solve(
        lambda v: split(A @ join(v)), split(b), KRYLOV, null_space=split(Z), left_null_space=split(W)
    )
    assert max_error(join(found.value), np.linalg.pinv(A) @ b) < 1e-12


def test_inconsistent_right_hand_sides() -> None:
    """Assert the status by lane, the least-squares value all the same, an error by default, and no derivative."""
    A, Z, W = singular(np.random.default_rng(6), 1)
    good = A @ RNG.normal(size=N)
    bad = good + 1e-3 * W[0]

    def run(b: Any, throw: bool = False) -> Any:
        return solvers.linear_solve(A, b, null_space=Z[0], left_null_space=W[0], throw=throw)

    found = jax.vmap(run)(np.stack([good, bad]))
    assert (found.status == Status.inconsistent).tolist() == [False, True]
    assert (found.status == Status.converged).tolist() == [True, False]
    assert max_error(found.value, np.stack([np.linalg.pinv(A) @ good] * 2)) < 1e-12
    with pytest.raises(adjoint.SolveError, match="a part in the declared null space"):
        run(bad, throw=True)
    with pytest.raises(adjoint.SolveError, match="the solve failed"):
        jax.grad(lambda b: jnp.sum(run(b).value))(bad)


def test_what_is_no_null_space_is_told() -> None:
    """Assert a failure for vectors that A or Aᵀ does not map to zero, where the completed system has a solution."""
    A, Z, W = singular(np.random.default_rng(6), 1)
    regular = A + np.outer(W[0], Z[0])
    y = RNG.normal(size=N)
    other = np.linalg.qr(np.stack([y, Z[0]]).T)[0].T
    b = A @ y - (A @ y @ other[0]) * other[0]

    def failed(A: Any, b: Any, **spaces: Any) -> bool:
        return bool(adjoint.failed(solvers.linear_solve(A, b, throw=False, **spaces).status))

    assert not failed(A, A @ y, null_space=Z, left_null_space=W)
    assert failed(regular, A @ y, null_space=Z, left_null_space=W)
    assert failed(A, b, null_space=other[:1], left_null_space=W)
    assert failed(A, b, null_space=Z, left_null_space=other[:1])
    assert failed(A, A @ y, null_space=Z)  # the left null space is another
    assert failed(A, A @ y, null_space=np.stack([Z[0], 2 * Z[0]]), left_null_space=np.stack([W[0], 3 * W[0]]))


def test_misuse() -> None:
    """Assert one error each: a left null space alone, other counts, other shapes, and what is no null space."""
    A, b = jnp.diag(jnp.array([0.0, 1.0, 2.0])), jnp.array([0.0, 1.0, 1.0])
    e = np.eye(3)
    with pytest.raises(ValueError, match="`left_null_space` was given without `null_space`"):
        solvers.linear_solve(A, b, left_null_space=e[0])
    with pytest.raises(ValueError, match=r"must have as many vectors: .* Got 1 and 2"):
        solvers.linear_solve(A, b, null_space=e[0], left_null_space=e[:2])
    with pytest.raises(ValueError, match=r"`null_space` must be a vector like `b`, of shapes \(3,\).*got \(4,\)"):
        solvers.linear_solve(A, b, null_space=np.ones(4))
    with pytest.raises(ValueError, match=r"`left_null_space` must be a vector like `b`.*got \(2, 2\)"):
        solvers.linear_solve(A, b, null_space=e[0], left_null_space=np.ones((2, 2)))
    with pytest.raises(ValueError, match="`null_space` must be a vector like `b`"):
        solvers.linear_solve(A, b, null_space={"u": e[0]})
