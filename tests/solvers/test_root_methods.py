"""Methods for roots and fixed points: values, derivatives in all modes, tolerances, and what failures say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, max_error
from tapeless import adjoint, solvers

RNG = np.random.default_rng(3)
N = 5
A = jnp.asarray(RNG.normal(size=(N, N)) / 4)
P, W = (jnp.asarray(RNG.normal(size=N)) for _ in range(2))


def contraction(u: Any, p: Any) -> Any:
    """A map with one fixed point; unsymmetric, on a pytree."""
    v = jnp.concatenate([u["x"], u["y"]])
    v = jnp.tanh(A @ v) * p + 0.3 * jnp.sin(p)
    return {"x": v[:2], "y": v[2:]}


def residual(u: Any, p: Any) -> Any:
    """The same as equations."""
    return jax.tree.map(lambda g, u: 2 * (u - g), contraction(u, p), u)


def jacobian(u: Any, p: Any) -> Any:
    """Its matrix."""
    return 2 * jnp.eye(N) - 2 * (p / jnp.cosh(A @ u) ** 2)[:, None] * A


GUESS = {"x": jnp.full(2, 0.5), "y": jnp.full(3, -0.5)}
TIGHT = {"rtol": 1e-13, "atol": 1e-14}
METHODS = {
    "Newton": solvers.Newton(**TIGHT),
    "Newton, Jacobian": solvers.Newton(**TIGHT, jacobian=jacobian),
    "Newton, GMRES": solvers.Newton(**TIGHT, linear=solvers.GMRES(rtol=1e-13)),
    "NewtonKrylov": solvers.NewtonKrylov(**TIGHT, linear=solvers.GMRES(rtol=1e-13)),
    "TrustRegion": solvers.TrustRegion(**TIGHT),
    "Picard": solvers.Picard(**TIGHT, damping=0.6, linear=solvers.GMRES(rtol=1e-13)),
    "Anderson": solvers.Anderson(**TIGHT, linear=solvers.GMRES(rtol=1e-13)),
}


def solve(method: Any, p: Any, **options: Any) -> Any:
    if isinstance(method, solvers.Picard | solvers.Anderson):
        return solvers.fixed_point(contraction, GUESS, p, method, **options)
    return solvers.root_find(residual, GUESS, p, method, **options)


def loss(method: Any, p: Any, **options: Any) -> Any:
    u = solve(method, p, **options).value
    return jnp.vdot(W, jnp.cos(jnp.concatenate([u["x"], u["y"]])))


def reference(p: Any) -> Any:
    """The loss at the root, found and differentiated in plain JAX: Newton's steps are exact to second order."""
    u = jnp.concatenate([GUESS["x"], GUESS["y"]])
    F = lambda u: 2 * (u - jnp.tanh(A @ u) * p - 0.3 * jnp.sin(p))
    for _ in range(8):
        u = u - jnp.linalg.solve(jacobian(u, p), F(u))
    return jnp.vdot(W, jnp.cos(u))


@pytest.fixture(scope="module")
def expected() -> Any:
    """Value, gradient, Hessian."""
    return reference(P), jax.grad(reference)(P), jax.hessian(reference)(P)


@pytest.mark.parametrize("name", METHODS)
def test_values_and_derivatives(name: str, expected: Any) -> None:
    """Assert value, gradient in both modes, and the Hessian, of every method against plain JAX."""
    f = lambda p: loss(METHODS[name], p)
    both = jax.jit(lambda p: (f(p), jax.grad(f)(p), jax.jacfwd(f)(p), jax.jacfwd(jax.grad(f))(p)))
    value, reverse, forward, hessian = both(P)
    assert float(value) == pytest.approx(float(expected[0]), abs=1e-12)
    assert max_error(reverse, expected[1]) < 1e-11
    assert max_error(forward, expected[1]) < 1e-11
    assert max_error(hessian, expected[2]) < 1e-10


def test_hessian_against_differences_of_gradients() -> None:
    """Assert that second derivatives through a root agree with central differences of gradients to 1e-6."""
    gradient = jax.jit(jax.grad(lambda p: loss(METHODS["Newton"], p)))
    v, h = jnp.asarray(np.random.default_rng(8).normal(size=N)), 1e-5
    difference = (gradient(P + h * v) - gradient(P - h * v)) / (2 * h)
    reverse = jax.grad(lambda p: jnp.vdot(v, gradient(p)))(P)
    assert max_error(reverse, difference) < 1e-6


def test_lanes_end_when_they_are_done() -> None:
    """Assert that under vmap each lane has its own iterations, status and NaN where it failed."""
    method = solvers.Newton(rtol=1e-12, max_iters=8)
    starts = jnp.array([2.0, 1.5, 1e6])
    f = jax.vmap(lambda x: solvers.root_find(lambda u, p: u**2 - p, x, 2.0, method, throw=False))
    found = f(starts)
    assert np.all(np.diff(found.stats["iterations"]) != 0)
    assert [bool(x) for x in adjoint.failed(found.status)] == [False, False, True]
    slope = jax.vmap(
        jax.grad(lambda p, x: solvers.root_find(lambda u, p: u**2 - p, x, p, method, throw=False).value), (None, 0)
    )(2.0, starts)
    assert np.allclose(slope[:2], 0.5 / np.sqrt(2.0), rtol=0, atol=1e-14)
    assert np.isnan(slope[2])


@pytest.mark.parametrize("name", ["Newton", "NewtonKrylov", "TrustRegion", "Anderson"])
def test_the_gradients_error_follows_the_tolerance(name: str, expected: Any) -> None:
    """Assert that the error of value and gradient is at most a constant times the tolerance, from 1e-2 to 1e-12."""
    kind = type(METHODS[name])
    # The tolerance is an array of the method: one compilation serves all.
    both = jax.jit(jax.value_and_grad(lambda p, rtol: loss(kind(rtol=rtol, atol=rtol), p)))
    for rtol in 10.0 ** -np.arange(2, 13, 2):
        value, gradient = both(P, rtol)
        assert abs(float(value - expected[0])) < 5 * rtol + 1e-14
        assert max_error(gradient, expected[1]) < 20 * rtol + 1e-13


def test_two_iterations_are_not_enough() -> None:
    """Assert that a solve stopped early raises, and so does its derivative."""
    for kind in (solvers.Newton, solvers.NewtonKrylov, solvers.TrustRegion, solvers.Picard, solvers.Anderson):
        method = kind(max_iters=2)
        with pytest.raises(adjoint.SolveError, match="iteration limit"):
            solve(method, P)
        with pytest.raises(adjoint.SolveError, match="derivative was asked for"):
            jax.grad(lambda p, method=method: loss(method, p, throw=False))(P)


def test_iterations_do_not_change_the_graph() -> None:
    """Assert that value and gradient take as many equations for 5 iterations as for 50."""

    def count(kind: Any, most: int) -> int:
        f = jax.value_and_grad(lambda p: loss(kind(max_iters=most), p))
        return sum(1 for _ in equations(jax.make_jaxpr(f)(P)))

    for kind in (solvers.Newton, solvers.NewtonKrylov, solvers.Anderson):
        assert count(kind, 5) == count(kind, 50)


def test_new_numbers_compile_nothing() -> None:
    """Assert one trace and one compilation over twenty gradient calls, tolerances and parameters changing."""
    traces, compiled = [], []

    def counted(u: Any, p: Any) -> Any:
        traces.append(1)
        return u**3 + u - p

    def gradient(p: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(solvers.root_find(counted, jnp.ones(3), p).value))(p)

    jax.block_until_ready(gradient(jnp.full(3, 2.0)))
    first = len(traces)
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for i in range(20):
            jax.block_until_ready(gradient(jnp.full(3, 2.0 + i)))
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(traces) == first
    assert not compiled


def test_adjoint_method_of_its_own(expected: Any) -> None:
    """Assert that `adjoint=` is what solves the adjoint system, and that its failure is an error or NaN."""
    good = solvers.BiCGStab(rtol=1e-13)
    with adjoint.watch_solves() as log:
        gradient = jax.grad(lambda p: loss(METHODS["Newton"], p, adjoint=good))(P)
    assert max_error(gradient, expected[1]) < 1e-11
    assert [(r.kind, r.method) for r in log] == [("forward", "Newton"), ("adjoint", "BiCGStab")]
    bad = solvers.GMRES(rtol=1e-13, max_iters=1)
    with pytest.raises(adjoint.SolveError, match="missed its tolerance"):
        jax.grad(lambda p: loss(METHODS["Newton"], p, adjoint=bad))(P)
    quiet = jax.grad(lambda p: loss(METHODS["Newton"], p, adjoint=bad, throw=False))(P)
    jitted = jax.jit(jax.grad(lambda p: loss(METHODS["Newton"], p, adjoint=bad)))(P)
    assert np.isnan(quiet).all()
    assert np.isnan(jitted).all()


def test_the_adjoint_is_as_tight_as_the_root(expected: Any) -> None:
    """Assert that a loose inner tolerance does not spoil the gradient of a tight root."""
    loose = solvers.Newton(rtol=1e-11, linear=solvers.GMRES(rtol=1e-2), max_iters=100)
    assert max_error(jax.grad(lambda p: loss(loose, p))(P), expected[1]) < 1e-9


def test_auxiliary_outputs_have_derivatives() -> None:
    """Assert value and first two derivatives of what the residual returns beside its equations."""

    def f(u: Any, p: Any) -> Any:
        return u**3 - p, {"product": u * p, "count": jnp.array(3)}

    def product(p: Any) -> Any:
        return solvers.root_find(f, 1.0, p, has_aux=True).aux["product"]

    assert float(product(2.0)) == pytest.approx(2 ** (4 / 3), abs=1e-13)
    assert float(jax.grad(product)(2.0)) == pytest.approx(4 / 3 * 2 ** (1 / 3), abs=1e-13)
    assert float(jax.grad(jax.grad(product))(2.0)) == pytest.approx(4 / 9 * 2 ** (-2 / 3), abs=1e-13)
    with pytest.raises(ValueError, match="pair"):
        solvers.root_find(lambda u, p: u, 1.0, has_aux=True)


def test_a_wrong_jacobian_costs_iterations_only(expected: Any) -> None:
    """Assert that a user's Jacobian steers the iteration and never the derivative; one of other shape is refused."""
    wrong = solvers.Newton(rtol=1e-12, jacobian=lambda u, p: 1.3 * jacobian(u, p), max_iters=100)
    right = solve(METHODS["Newton, Jacobian"], P)
    assert int(solve(wrong, P).stats["iterations"]) > int(right.stats["iterations"])
    assert max_error(jax.grad(lambda p: loss(wrong, p))(P), expected[1]) < 1e-10
    with pytest.raises(ValueError, match=r"Expected shape \(5, 5\), got \(2, 2\)"):
        solve(solvers.Newton(jacobian=lambda u, p: jnp.eye(2)), P)


@pytest.mark.parametrize(
    ("function", "status"),
    [
        (lambda u, p: 1 / (u - 0.3), "stalled"),
        (lambda u, p: jnp.where(u > 0.3, 1.0, -1.0) + u, "stalled"),
        (lambda u, p: u * u + 1, "unbracketed"),
        (lambda u, p: jnp.sqrt(u - 0.5), "nonfinite"),
    ],
    ids=["pole", "jump", "no change of sign", "NaN"],
)
def test_brackets_without_a_root(function: Any, status: str) -> None:
    """Assert that a change of sign is not taken for a root."""
    solution = solvers.root_find(function, 0.0, None, solvers.Chandrupatla(0.0, 1.7), throw=False)
    assert solution.status == getattr(adjoint.Status, status)


def test_a_root_of_third_order_has_no_derivative() -> None:
    """Assert that a bracketed root at which the slope vanishes is found, and its derivative NaN."""
    f = lambda p: solvers.root_find(lambda u, p: (u - p) ** 3, 0.0, p, solvers.Chandrupatla(0.0, 1.7)).value
    assert float(f(0.3)) == pytest.approx(0.3, abs=1e-9)
    assert np.isnan(jax.jit(jax.grad(f))(0.3))


def test_float32() -> None:
    """Assert that every method meets its default tolerance in float32."""
    p, expected = jnp.asarray(P, jnp.float32), jax.grad(reference)(P)
    guess = jax.tree.map(lambda x: x.astype(jnp.float32), GUESS)
    cast = lambda u: jnp.concatenate([u["x"], u["y"]])
    A32, W32 = A.astype(jnp.float32), W.astype(jnp.float32)

    def g(u: Any, p: Any) -> Any:
        v = jnp.tanh(A32 @ cast(u)) * p + jnp.float32(0.3) * jnp.sin(p)
        return {"x": v[:2], "y": v[2:]}

    for method in (solvers.Newton(), solvers.NewtonKrylov(), solvers.TrustRegion(), solvers.Anderson()):
        f = lambda p, m=method: jnp.vdot(W32, jnp.cos(cast(solvers.fixed_point(g, guess, p, m).value)))
        gradient = jax.grad(f)(p)
        assert gradient.dtype == jnp.float32
        assert max_error(gradient, expected) < 1e-3


def test_misuse() -> None:
    """Assert one sentence each for what does not fit."""
    with pytest.raises(TypeError, match="must be a Krylov method"):
        solvers.NewtonKrylov(linear=solvers.LU())
    with pytest.raises(ValueError, match="Expected a guess of size 1, got 2"):
        solvers.root_find(lambda u, p: u, jnp.zeros(2), None, solvers.Chandrupatla(0.0, 1.0))
    with pytest.raises(ValueError, match="positive integer"):
        solvers.Anderson(memory=0)
    with pytest.raises(TypeError, match="`adjoint` must be an instance"):
        solvers.root_find(lambda u, p: u, 1.0, adjoint=solvers.Newton())  # pyright: ignore
