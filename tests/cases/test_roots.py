"""Trouble cases S37 to S44 of nonlinear solves, with the values given there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from tapeless import adjoint, solvers

TIGHT = solvers.Newton(rtol=1e-13, atol=1e-14)


def root(residual: Any, guess: Any, params: Any = None, **options: Any) -> Any:
    return solvers.root_find(residual, guess, params, TIGHT, **options)


def test_s37_one_equation_already_solved() -> None:
    """Assert that a singular Jacobian at the start is a status, and that no derivative is returned."""

    def residual(y: Any, p: Any) -> Any:
        return jnp.stack([(y[0] - 1) ** 2, (y[1] - p) ** 2])

    solution = root(residual, jnp.array([2.0, 2.0]), 2.0, throw=False)
    assert solution.status == adjoint.Status.singular
    with pytest.raises(adjoint.SolveError, match="singular"):
        root(residual, jnp.array([2.0, 2.0]), 2.0)
    with pytest.raises(adjoint.SolveError, match="derivative was asked for"):
        jax.grad(lambda p: root(residual, jnp.array([2.0, 2.0]), p, throw=False).value[1])(2.0)


@pytest.mark.parametrize("guess", [(2.0, 2.0), (2.0, 3.0)], ids=["one equation solved", "generic"])
def test_s37_a_double_root_is_found_and_has_no_derivative(guess: tuple[float, float]) -> None:
    """Assert that the trust region converges to the double root, and that its derivative is an error, or NaN."""

    def root(p: Any) -> Any:
        f = lambda y, p: jnp.stack([(y[0] - 1) ** 2, (y[1] - p) ** 2])
        return solvers.root_find(f, jnp.array(guess), p, solvers.TrustRegion())

    solution = root(2.0)
    assert solution.status == adjoint.Status.converged
    assert np.allclose(solution.value, (1.0, 2.0), rtol=0, atol=1e-9)
    with pytest.raises(adjoint.SolveError, match="no finite derivative exists"):
        jax.grad(lambda p: root(p).value[1])(2.0)
    assert np.isnan(jax.jit(jax.grad(lambda p: root(p).value[1]))(2.0))


def test_s38_start_on_the_root() -> None:
    """Assert convergence in at most one iteration, with first and second derivatives."""

    def f(p: Any) -> Any:
        return root(lambda x, p: x**2 - p, np.sqrt(2.0), p).value

    solution = root(lambda x, p: x**2 - p, np.sqrt(2.0), 2.0)
    assert int(solution.stats["iterations"]) <= 1
    assert float(f(2.0)) == pytest.approx(1.4142135623731, abs=1e-13)
    assert float(jax.grad(f)(2.0)) == pytest.approx(0.353553390593274, abs=1e-14)
    assert float(jax.grad(jax.grad(f))(2.0)) == pytest.approx(-0.0883883476483184, abs=1e-14)


@pytest.mark.parametrize(
    ("shift", "offset", "start"), [(1.0, 1.0, 1.0), (1.6668, 2.0, 1.66703)], ids=["stationary", "nearly"]
)
def test_s39_stationary_start_is_never_a_success(shift: float, offset: float, start: float) -> None:
    """Assert that success means a residual of zero: never where |F| is about 1."""
    solution = root(lambda x, _: (x - shift) ** 2 - offset, start, throw=False)
    residual = abs((float(solution.value) - shift) ** 2 - offset)
    assert (solution.status == adjoint.Status.converged) == (residual < 1e-10)
    if start == shift:
        assert solution.status == adjoint.Status.singular


@pytest.mark.parametrize(("shift", "start"), [(1.0, 1.0), (1.6668, 1.66703)], ids=["stationary", "nearly"])
def test_s39_the_trust_region_stalls_or_finds_a_root(shift: float, start: float) -> None:
    """Assert that the dogleg leaves a point that is nearly stationary, and tells one that is."""
    offset = 1.0 if shift == 1.0 else 2.0
    f = lambda x, _: (x - shift) ** 2 - offset
    solution = solvers.root_find(f, start, None, solvers.TrustRegion(), throw=False)
    if start == shift:
        assert solution.status == adjoint.Status.stalled
    else:
        assert abs(abs(float(solution.value) - shift) - 1.4142135623731) < 1e-12


def test_s40_a_root_at_the_midpoint() -> None:
    """Assert that a zero residual ends the search at once, at the root."""
    method = lambda upper: solvers.Chandrupatla(0.0, upper)
    solution = solvers.root_find(lambda x, p: x - p, 0.9, 0.5, method(1.0))
    assert float(solution.value) == 0.5
    assert int(solution.stats["iterations"]) == 1
    x0 = jnp.linspace(0.4, 0.6, 11)
    found = jax.vmap(lambda p: solvers.root_find(lambda x, p: x - p, 0.0, p, method(2 * p)))(x0)
    assert np.array_equal(found.value, x0)
    assert np.array_equal(found.stats["residual"], np.zeros(11))


@pytest.mark.parametrize("method", [TIGHT, solvers.Chandrupatla(0.0, 1.0, rtol=1e-14, atol=1e-15)], ids=["N", "C"])
def test_s41_second_derivatives(method: Any) -> None:
    """Assert first and second derivatives of an implicit function, in every order of the modes, whatever the method."""

    def x(y: Any, a: Any, b: Any) -> Any:
        f = lambda x, p: (p[1] * x**2 + p[2] * x) / (p[1] + p[2]) - p[0]
        return solvers.root_find(f, 0.5, (y, a, b), method).value

    at = (0.5, 1.0, 2.0)
    assert float(x(*at)) == pytest.approx(0.58113883008419, abs=1e-14)
    gradient = jax.grad(x, argnums=(0, 1, 2))(*at)
    assert np.allclose(gradient, (0.948683298050514, 0.0513167019494862, -0.0256583509747431), rtol=0, atol=1e-14)
    second = (-0.569209978830308, -0.0632455532033676, 0.0316227766016838)
    for outer, inner in ((jax.grad, jax.grad), (jax.jacfwd, jax.grad), (jax.jacrev, jax.jacfwd)):
        got = outer(inner(x), argnums=(0, 1, 2))(*at)
        assert np.allclose(got, second, rtol=0, atol=1e-13)


def test_s42_a_conserved_total() -> None:
    """Assert that the rank loss is told, and that the declared total gives the steady state with all derivatives."""
    p = {"k1": 0.3, "k2": 0.7, "M": 2.0}

    def rates(u: Any, p: Any) -> Any:
        flow = p["k1"] * u["a"] - p["k2"] * u["b"]
        return {"a": -flow, "b": flow}

    guess = {"a": 1.0, "b": 0.5}
    total = lambda u, p: u["a"] + u["b"] - p["M"]
    undeclared = solvers.root_find(rates, guess, p, throw=False)
    assert undeclared.status == adjoint.Status.singular
    assert "conserved=" in adjoint.sentence(undeclared.status)

    def a(p: Any) -> Any:
        return solvers.root_find(rates, guess, p, conserved=total).value["a"]

    expected = {"k1": -1.4, "k2": 0.6, "M": 0.7}
    assert float(a(p)) == pytest.approx(1.4, abs=1e-14)
    for gradient in (jax.grad(a), jax.jacfwd(a)):
        assert {k: float(v) for k, v in gradient(p).items()} == pytest.approx(expected, abs=1e-14)
    growth = lambda u, p: {"a": u["a"] - 1, "b": u["b"] - 2}
    wrong = solvers.root_find(growth, guess, p, conserved=total, throw=False)
    assert wrong.status == adjoint.Status.unconserved


def test_s43_captured_parameter_and_integer_by_product() -> None:
    """Assert the derivatives of a root whose parameter is captured, with an integer count returned beside it."""

    def z(p: Any) -> Any:
        solution = root(lambda z, _: p * z - 6, 5.0)
        return solution.value, solution.stats["iterations"]

    for wrap in (lambda f: f, jax.jit):
        value, slope = wrap(jax.value_and_grad(z, has_aux=True))(2.0)
        assert float(value[0]) == pytest.approx(3.0, abs=1e-14)
        assert jnp.issubdtype(value[1].dtype, jnp.integer)
        assert float(slope) == pytest.approx(-1.5, abs=1e-14)
        assert float(wrap(jax.grad(jax.grad(lambda p: z(p)[0])))(2.0)) == pytest.approx(1.5, abs=1e-13)
    batch = jax.vmap(jax.grad(lambda p: z(p)[0]))(jnp.array([1.0, 2.0, 3.0]))
    assert np.allclose(batch, (-6.0, -1.5, -2 / 3), rtol=0, atol=1e-13)


def test_s44_matrix_free_inner_solve_in_both_modes() -> None:
    """Assert forward and reverse mode through conjugate gradients, no matrix built."""
    A = jnp.array([[2.0, 1.0, 0.0], [0.0, 1.0, -1.0], [1.0, 0.0, 3.0]])
    method = solvers.Newton(rtol=1e-13, linear=solvers.CG(rtol=1e-14))

    def y(p: Any) -> Any:
        return solvers.root_find(lambda y, p: y + jnp.sin(y) - A @ p, jnp.zeros(3), p, method).value

    p = jnp.array([0.5, -0.3, 0.2])
    assert np.allclose(y(p), (0.3536632984439, -0.2513186245241, 0.5647745825765), rtol=0, atol=1e-12)
    expected = (1.5740238662067, 1.0239455046424, 1.1182935307893)
    assert np.allclose(jax.jit(jax.grad(lambda p: jnp.sum(y(p))))(p), expected, rtol=0, atol=1e-12)
    assert np.allclose(jax.jacfwd(lambda p: jnp.sum(y(p)))(p), expected, rtol=0, atol=1e-12)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(y(p))))(p)
    assert not [e for e in equations(jaxpr) if e.primitive.name == "lu"]


@pytest.mark.parametrize("wrap", ["eager", "jit", "vmap"])
def test_a_missed_tolerance_gives_no_gradient(wrap: str) -> None:
    """Assert that differentiating an unconverged root raises; under vmap the failed lane alone is NaN."""

    def x(guess: Any, p: Any) -> Any:
        method = solvers.Newton(max_iters=4)
        return solvers.root_find(lambda x, p: x**2 - p, guess, p, method, throw=False).value

    gradient = jax.grad(x, argnums=1)
    if wrap == "eager":
        with pytest.raises(adjoint.SolveError, match=r"derivative was asked for.*iteration limit"):
            gradient(1e6, 2.0)
    elif wrap == "jit":
        with pytest.raises(jax.errors.JaxRuntimeError, match="derivative was asked for"):
            jax.block_until_ready(jax.jit(gradient)(1e6, 2.0))
    else:
        lanes = jax.jit(jax.vmap(gradient))(jnp.array([1.4, 1e6]), jnp.array([2.0, 2.0]))
        assert float(lanes[0]) == pytest.approx(0.353553390593274, abs=1e-12)
        assert np.isnan(lanes[1])


def test_nonfinite_residuals_are_told() -> None:
    """Assert a status of its own for a residual that is NaN."""
    solution = root(lambda x, _: jnp.sqrt(x) + 1, -1.0, throw=False)
    assert solution.status == adjoint.Status.nonfinite
    assert "NaN" in adjoint.Status[solution.status]


def test_tolerances_do_not_change_the_graph() -> None:
    """Assert as many equations in the gradient's jaxpr for a tolerance of 1e-4 as for 1e-12."""

    def count(rtol: float) -> int:
        method = solvers.Newton(rtol=rtol)
        f = jax.grad(lambda p: solvers.root_find(lambda x, p: x**3 - p, 1.0, p, method).value)
        return sum(1 for _ in equations(jax.make_jaxpr(f)(2.0)))

    assert count(1e-4) == count(1e-12)


def test_wrong_shapes_are_refused() -> None:
    """Assert one error for a residual of other shapes, and for a tolerance that float32 cannot reach."""
    with pytest.raises(ValueError, match=r"one value for each unknown. Expected .*\[2\].*got .*\[3\]"):
        solvers.root_find(lambda u, p: jnp.zeros(3), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"reachable in float32: expected at least .* got 1.0e-12.*x64"):
        solvers.root_find(lambda u, p: u, jnp.zeros(2, jnp.float32), None, solvers.Newton(rtol=1e-12))


@pytest.mark.parametrize(
    ("residual", "guess"),
    [
        (lambda u, p: 1 / (u - 1), 1 + 1e-11),
        (lambda u, p: 1e13 * (u - 1) + jnp.where(u >= 1, 1.0, -1.0), 0.5),
        (lambda u, p: u**2 + 1, 1.0),
        (lambda u, p: jnp.exp(-u), 0.0),
        (lambda u, p: u**2, 1.0),
    ],
    ids=["pole", "jump", "no root", "root at infinity", "double root"],
)
def test_no_success_where_there_is_no_simple_root(residual: Any, guess: float) -> None:
    """Assert that small corrections at a pole, a jump, far out or at a double root are not taken for convergence."""
    solution = root(residual, guess, throw=False)
    assert bool(adjoint.failed(solution.status))


def test_the_linear_methods_own_status_is_kept() -> None:
    """Assert that conjugate gradients on a rotation speak of the iteration, not of a singular Jacobian."""
    A = jnp.array([[0.1, 2.0], [-2.0, 0.1]])
    method = solvers.Newton(linear=solvers.CG())
    solution = solvers.root_find(lambda u, p: A @ u - 1, jnp.ones(2), None, method, throw=False)
    assert bool(adjoint.failed(solution.status))
    assert solution.status != adjoint.Status.singular


def test_misuse_is_one_error() -> None:
    """Assert one sentence for a class, a name or a number in the place of a method or function."""
    for wrong in (solvers.Newton, "newton", solvers.LU()):
        with pytest.raises(TypeError, match=r"instance such as solvers.Newton\(\), got"):
            solvers.root_find(lambda u, p: u, 1.0, None, wrong)  # pyright: ignore
    with pytest.raises(TypeError, match="must be a function residual"):
        solvers.root_find(3.0, 1.0)  # pyright: ignore
