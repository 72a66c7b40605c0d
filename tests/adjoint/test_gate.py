"""Derivatives whose linear solve fails: an error where it can be one, and NaN where it must stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from tapeless import adjoint, solvers

A = np.diag([1.0, 2.0, 3.0]) + np.diag([0.3, 0.2], 1) - np.diag([0.5, 0.1], -1)
B, WEIGHT = np.array([1.0, -2.0, 0.5]), np.array([0.7, 1.1, -0.4])
FAILING = solvers.GMRES(rtol=1e-10, max_iters=1)
MESSAGE = r"linear_solve: a derivative came out of the solve that is not a number.*`adjoint=`"


def of_b(b: Any, **options: Any) -> Any:
    return jnp.vdot(WEIGHT, solvers.linear_solve(A, b, adjoint=FAILING, **options).value)


def of_matrix(A: Any, **options: Any) -> Any:
    return jnp.vdot(WEIGHT, solvers.linear_solve(A, B, adjoint=FAILING, **options).value)


def of_closure(p: Any, **options: Any) -> Any:
    return jnp.vdot(WEIGHT, solvers.linear_solve(lambda v: A @ v + p * v, B, adjoint=FAILING, **options).value)


ALL = [(of_b, B), (of_matrix, A), (of_closure, B)]


@pytest.mark.parametrize(("f", "x"), ALL, ids=["b", "matrix", "closure"])
def test_eager_gradients_raise(f: Any, x: Any) -> None:
    """Assert `SolveError` in an eager gradient by whatever the solve depends on, and NaN in jit."""
    with pytest.raises(adjoint.SolveError, match=MESSAGE):
        jax.grad(f)(x)
    assert np.all(np.isnan(jax.jit(jax.grad(f))(x)))


def test_without_throwing() -> None:
    """Assert NaN in an eager gradient with `throw=False`."""
    assert np.all(np.isnan(jax.grad(lambda p: of_closure(p, throw=False))(B)))


def test_jacobians_and_batched_pullbacks_raise() -> None:
    """Assert that a Jacobian by rows of a vector-valued solve raises, where all rows but one are right."""

    def solve(b: Any) -> Any:
        return solvers.linear_solve(jnp.diag(jnp.array([1.0, 1.0, 2.0])).at[0, 2].set(1.0), b, adjoint=FAILING).value

    with pytest.raises(adjoint.SolveError, match=MESSAGE):
        jax.jacrev(solve)(B)
    value, pullback = jax.vjp(solve, B)
    assert np.all(np.isfinite(value))
    with pytest.raises(adjoint.SolveError, match=MESSAGE):
        pullback(WEIGHT)
    assert max_error(jax.vmap(pullback)(np.eye(3)[1:2])[0], np.eye(3)[1:2]) < 1e-14


def test_lanes_stay_nan() -> None:
    """Assert that under vmap the lane whose adjoint solve fails is NaN, alone, in eager mode and under jit."""
    lanes = np.stack([np.eye(3), A, 2 * np.eye(3)])
    gradient = jax.vmap(jax.grad(of_matrix))
    for g in (gradient(lanes), jax.jit(gradient)(lanes)):
        assert np.all(np.isnan(g[1]))
        assert max_error(g[0], -np.outer(WEIGHT, B)) < 1e-12
        assert max_error(g[2], -np.outer(WEIGHT, B) / 4) < 1e-12


def test_lanes_inside_a_derivative() -> None:
    """Assert that a derivative around a batched solve is right, and that NaN from elsewhere is not blamed on it."""

    def f(A: Any, weight: Any) -> Any:
        solve = lambda b: solvers.linear_solve(A, b).value
        return jnp.vdot(weight, jax.vmap(solve)(np.stack([B, 2 * B]))[1])

    expected = -np.outer(np.linalg.solve(A.T, WEIGHT), np.linalg.solve(A, 2 * B))
    assert max_error(jax.grad(f)(A, WEIGHT), expected) < 1e-11
    assert np.all(np.isnan(jax.grad(f)(A, WEIGHT * np.nan)))


def test_tangents_raise() -> None:
    """Assert `SolveError` in an eager tangent whose solve fails though the forward one did not, and NaN in jit."""
    diagonal = jnp.diag(jnp.array([1.0, 2.0, 3.0]))
    solve = lambda b: solvers.linear_solve(diagonal, b, FAILING).value
    e = np.eye(3)[0]
    for derivative in (lambda: jax.jvp(solve, (e,), (WEIGHT,)), lambda: jax.vjp(solve, e)[1](WEIGHT)):
        with pytest.raises(adjoint.SolveError, match=MESSAGE):
            derivative()
    assert np.all(np.isnan(jax.jit(lambda b, t: jax.jvp(solve, (b,), (t,))[1])(e, WEIGHT)))
    assert max_error(jax.jvp(solve, (e,), (e,))[1], e) < 1e-14


def test_no_false_alarm() -> None:
    """Assert that NaN which comes in goes out, that good derivatives pass, and that several uses do not mix."""

    def solve(tree: Any) -> Any:
        found = solvers.linear_solve(lambda v: {"u": A @ v["u"], "w": 2 * v["w"]}, tree)
        return found.value

    tree = {"u": B, "w": WEIGHT}
    pullback = jax.vjp(solve, tree)[1]
    exact = {"u": np.linalg.solve(A.T, WEIGHT), "w": B / 2}
    poisoned = pullback({"u": WEIGHT * np.nan, "w": B})[0]
    assert np.all(np.isnan(poisoned["u"]))
    assert max_error(pullback({"u": WEIGHT, "w": B})[0], exact) < 1e-14
    twice = jax.grad(lambda t: jnp.vdot(WEIGHT, solve(solve(t))["u"]))(tree)["u"]
    assert max_error(twice, np.linalg.solve(A.T, np.linalg.solve(A.T, WEIGHT))) < 1e-13
