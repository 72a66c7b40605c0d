"""Least squares: certified values, derivatives by data, failures that are told."""

import csv
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, max_error
from tapeless import adjoint, solvers
from tapeless.solvers._gauss_newton import GaussNewton
from tapeless.solvers._least_squares import least_squares
from tapeless.solvers._levenberg_marquardt import LevenbergMarquardt

# Statistical Reference Datasets of the US National Institute of Standards and Technology, nonlinear regression,
# https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml (public domain): set, x, y.
ROWS = list(csv.DictReader((Path(__file__).parent / "nist_strd.csv").read_text().splitlines()))
# Model, two starts, certified values. Levels of difficulty: lower (Misra1a), average (MGH17), higher (the others).
NIST: dict[str, tuple[Any, Any, Any, Any]] = {
    "Misra1a": (
        lambda b, x: b[0] * (1 - jnp.exp(-b[1] * x)),
        [500.0, 0.0001],
        [250.0, 0.0005],
        [238.94212918, 0.00055015643181],
    ),
    "MGH17": (
        lambda b, x: b[0] + b[1] * jnp.exp(-x * b[3]) + b[2] * jnp.exp(-x * b[4]),
        [50.0, 150.0, -100.0, 1.0, 2.0],
        [0.5, 1.5, -1.0, 0.01, 0.02],
        [0.37541005211, 1.9358469127, -1.4646871366, 0.012867534640, 0.022122699662],
    ),
    "Thurber": (
        lambda b, x: (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3),
        [1000.0, 1000.0, 400.0, 40.0, 0.7, 0.3, 0.03],
        [1300.0, 1500.0, 500.0, 75.0, 1.0, 0.4, 0.05],
        [1288.13968, 1491.0792535, 583.23836877, 75.416644291, 0.96629502864, 0.39797285797, 0.049727297349],
    ),
    "MGH09": (
        lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
        [25.0, 39.0, 41.5, 39.0],
        [0.25, 0.39, 0.415, 0.39],
        [0.19280693458, 0.19128232873, 0.12305650693, 0.13606233068],
    ),
    "MGH10": (
        lambda b, x: b[0] * jnp.exp(b[1] / (x + b[2])),
        None,
        [0.02, 4000.0, 250.0],
        [0.005609636471, 6181.3463463, 345.22363462],
    ),
    "BoxBOD": (
        lambda b, x: b[0] * (1 - jnp.exp(-b[1] * x)),
        [1.0, 1.0],
        [100.0, 0.75],
        [213.80940889, 0.54723748542],
    ),
    "Eckerle4": (
        lambda b, x: (b[0] / b[1]) * jnp.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
        [1.0, 10.0, 500.0],
        [1.5, 5.0, 450.0],
        [1.5543827178, 4.0888321754, 451.54121844],
    ),
    "Rat43": (
        lambda b, x: b[0] / ((1 + jnp.exp(b[1] - b[2] * x)) ** (1 / b[3])),
        [100.0, 10.0, 1.0, 1.0],
        [700.0, 5.0, 0.75, 1.3],
        [699.6415127, 5.2771253025, 0.75962938329, 1.2792483859],
    ),
}

# A decay through data that it cannot follow: the residuals are large.
TIMES = jnp.array([0.0, 0.6, 1.1, 1.9, 2.7, 3.3])
DATA = jnp.array([2.3, 0.4, 1.9, -0.2, 0.9, 0.1])
START = jnp.array([1.6, 0.7])
DIRECTION = jnp.array([0.3, -0.7, 0.2, 0.5, -0.1, 0.4])
METHODS = {
    "LevenbergMarquardt": LevenbergMarquardt(rtol=1e-13, atol=1e-14),
    "GaussNewton": GaussNewton(rtol=1e-13, atol=1e-14),
    "matrix-free": LevenbergMarquardt(rtol=1e-13, atol=1e-14, linear=solvers.CG(rtol=1e-14)),
}
LINEAR = {"dense": solvers.Cholesky(), "matrix-free": solvers.CG()}


pytestmark = pytest.mark.slow  # compilation, for a minute


def decay(u: Any, y: Any) -> Any:
    return u[0] * jnp.exp(-u[1] * TIMES) - y


def fit(y: Any, method: Any = METHODS["LevenbergMarquardt"], **options: Any) -> Any:
    return least_squares(decay, START, y, method, **options).value


@pytest.mark.parametrize("name", NIST)
def test_certified_values(name: str) -> None:
    """Assert nine digits of the certified parameters from both starts (of MGH10 from the nearer one)."""
    model, *starts, certified = NIST[name]
    x, y = (jnp.array([float(row[key]) for row in ROWS if row["set"] == name]) for key in "xy")

    def residual(b: Any, y: Any) -> Any:
        return model(b, x) - y

    for start in starts:
        if start is not None:
            solution = least_squares(residual, jnp.array(start), y)
            assert np.allclose(solution.value, certified, rtol=2e-10, atol=0)
            cost = float(jnp.sum(residual(solution.value, y) ** 2) / 2)
            assert float(solution.stats["cost"]) == pytest.approx(cost, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_derivative_by_data_at_large_residuals(method: str) -> None:
    """Assert the Jacobian by the data against refits, where the formula without second derivatives is far off."""

    def estimate(y: Any) -> Any:
        return fit(y, METHODS[method])

    both = jax.jit(lambda y: (estimate(y), jax.jacrev(estimate)(y), jax.jvp(estimate, (y,), (DIRECTION,))[1]))
    u, jacobian, tangent = both(DATA)
    assert max_error(tangent, jacobian @ DIRECTION) < 1e-12
    h = 1e-4
    refits = [(both(DATA + h * e)[0] - both(DATA - h * e)[0]) / (2 * h) for e in jnp.eye(6)]
    assert max_error(jacobian, jnp.stack(refits, axis=1)) < 1e-7
    J = jax.jacfwd(decay)(u, DATA)
    assert max_error(jnp.linalg.solve(J.T @ J, J.T), jacobian) > 0.05


def test_data_that_are_closed_over() -> None:
    """Assert the same derivative where the residual captures the data: eagerly, in jit and under vmap."""

    def loss(y: Any) -> Any:
        value = least_squares(lambda u, _: decay(u, y), START, None, METHODS["LevenbergMarquardt"]).value
        return value[0] * value[1]

    batch = jnp.stack([DATA, DATA + DIRECTION / 5])
    expected = jax.jit(jax.vmap(jax.grad(lambda y: fit(y)[0] * fit(y)[1])))(batch)
    assert max_error(jax.jit(jax.vmap(jax.grad(loss)))(batch), expected) < 1e-13
    assert max_error(jax.grad(loss)(DATA), expected[0]) < 1e-13


@pytest.mark.parametrize("method", ["LevenbergMarquardt", "matrix-free"])
def test_second_order(method: str) -> None:
    """Assert Hessian-vector products in both orders of the modes against differences of gradients."""
    gradient = jax.grad(lambda y: jnp.sum(fit(y, METHODS[method]) ** 3))

    @jax.jit
    def products(y: Any) -> Any:
        value, forward = jax.jvp(gradient, (y,), (DIRECTION,))
        return value, forward, jax.grad(lambda y: jnp.vdot(gradient(y), DIRECTION))(y)

    _, forward, backward = products(DATA)
    h = 1e-4
    differences = (products(DATA + h * DIRECTION)[0] - products(DATA - h * DIRECTION)[0]) / (2 * h)
    assert max_error(forward, differences) < 1e-6
    assert max_error(backward, forward) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_errors_are_below_the_tolerance(method: str) -> None:
    """Assert errors of value and gradient of at most the tolerance over eight decades, though the rate is linear."""
    linear = solvers.CG(rtol=1e-13) if method == "matrix-free" else solvers.Cholesky()
    family = GaussNewton if method == "GaussNewton" else LevenbergMarquardt

    @jax.jit
    def value_and_gradient(rtol: Any) -> Any:
        def loss(y: Any) -> Any:
            u = fit(y, family(rtol=rtol, atol=0.0, linear=linear))
            return u[0] * u[1], u

        return jax.value_and_grad(loss, has_aux=True)(DATA)

    (_, exact), gradient = value_and_gradient(2e-15 if method != "matrix-free" else 1e-14)
    for rtol in (1e-4, 1e-6, 1e-8, 1e-10, 1e-12):
        (_, u), got = value_and_gradient(rtol)
        assert float(jnp.max(jnp.abs(u / exact - 1))) <= rtol
        assert max_error(got, gradient) <= 3 * rtol


def test_structures_by_products_and_float32() -> None:
    """Assert pytrees of unknowns, residuals and parameters, a differentiable by-product, and no dtype but float32."""
    f32 = jnp.float32

    def residual(u: Any, p: Any) -> Any:
        r = u["a"] * jnp.exp(-u["b"][0] * p["t"]) - p["y"]
        return {"r": r * p["weight"], "prior": (u["b"] - 0.7, p["tag"](u["a"]))}, jnp.sum(r**2)

    def sums(y: Any) -> Any:
        p = {"t": TIMES.astype(y.dtype), "y": y, "weight": 2, "tag": lambda a: 0.1 * a, "none": None}
        guess = {"a": jnp.asarray(1.5, y.dtype), "b": jnp.ones(1, y.dtype)}
        solution = least_squares(residual, guess, p, has_aux=True)
        return solution.value, solution.aux

    both = jax.jit(lambda y: (sums(y), jax.jacrev(sums)(y)))
    exact, single = both(DATA), both(DATA.astype(f32))
    assert {x.dtype for x in jax.tree.leaves(single)} == {jnp.dtype(f32)}
    assert max_error(single, exact) < 1e-4
    (u, aux), slopes = exact
    assert float(aux) == pytest.approx(float(jnp.sum((u["a"] * jnp.exp(-u["b"][0] * TIMES) - DATA) ** 2)), rel=1e-14)
    h = 1e-5
    difference = (both(DATA + h * DIRECTION)[0][1] - both(DATA - h * DIRECTION)[0][1]) / (2 * h)
    assert float(slopes[1] @ DIRECTION) == pytest.approx(float(difference), rel=1e-8)


def test_lanes_end_at_different_times() -> None:
    """Assert each lane's own value and count under vmap, and NaN derivatives of the one that fails alone."""
    method = LevenbergMarquardt(max_iters=15)

    def solve(start: Any, y: Any) -> Any:
        solution = least_squares(decay, start, y, method, throw=False)
        return solution.value, (solution.status, solution.stats["iterations"])

    starts = jnp.array([[1.6, 0.7], [1.2, 0.3], [-900.0, 400.0]])
    data = jnp.stack([DATA, DATA + DIRECTION / 5, DATA])
    jacobian, (status, iterations) = jax.jit(jax.vmap(jax.jacrev(solve, argnums=1, has_aux=True)))(starts, data)
    assert list(map(bool, adjoint.failed(status))) == [False, False, True]
    assert len({*map(int, iterations)}) == 3
    assert np.all(np.isfinite(jacobian[:2]))
    assert np.all(np.isnan(jacobian[2]))
    alone, (_, count) = jax.jit(jax.jacrev(solve, argnums=1, has_aux=True))(starts[1], data[1])
    assert max_error(jacobian[1], alone) < 1e-12
    assert int(iterations[1]) == int(count)


@pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR)
def test_undetermined_unknowns_are_told(linear: Any) -> None:
    """Assert `singular` for fewer residuals than unknowns, and no derivative there."""
    method = LevenbergMarquardt(linear=linear)

    def circle(p: Any) -> Any:
        return least_squares(lambda u, p: u[0] ** 2 + u[1] ** 2 - p, jnp.array([1.0, 0.4]), p, method, throw=False)

    assert circle(1.7).status == adjoint.Status.singular
    with pytest.raises(adjoint.SolveError, match="derivative was asked for"):
        jax.grad(lambda p: jnp.sum(circle(p).value))(1.7)


def test_redundant_unknowns_are_told() -> None:
    """Assert a failure where the data determine the product of two unknowns only, at large residuals."""
    solution = least_squares(lambda u, p: u[0] * u[1] * TIMES - p, jnp.array([1.0, 0.4]), DATA, throw=False)
    assert bool(adjoint.failed(solution.status))


@pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR)
def test_what_is_no_minimum_is_never_a_success(linear: Any) -> None:
    """Assert that a maximum of the cost is left, that a degenerate minimum is not converged, and NaN is told."""
    method = LevenbergMarquardt(linear=linear)

    def solve(start: list[float], p: float) -> Any:
        return least_squares(lambda u, p: (u - 3) ** 2 - p, jnp.array(start), p, method, throw=False)

    solution = solve([3.0, 3.9], 2.0)
    assert solution.status == adjoint.Status.converged
    assert np.allclose(np.abs(solution.value - 3), np.sqrt(2), rtol=0, atol=1e-14)
    assert bool(adjoint.failed(solve([2.1, 3.5], 0.0).status))
    assert solve([2.1, 3.5], np.nan).status == adjoint.Status.nonfinite


def test_gauss_newton_tells_a_deficient_rank() -> None:
    """Assert `singular` for a Jacobian without full rank on the way, where Levenberg's damping helps."""

    def residual(u: Any, p: Any) -> Any:
        return jnp.stack([u[0] - 1, u[0] * u[1] - p, 2 * u[0] * u[1] - 2 * p])

    start = jnp.array([0.0, 0.3])
    assert least_squares(residual, start, 2.0, GaussNewton(), throw=False).status == adjoint.Status.singular
    assert np.allclose(least_squares(residual, start, 2.0).value, (1.0, 2.0), rtol=0, atol=1e-14)


def test_zero_residuals_and_a_start_on_the_solution() -> None:
    """Assert the exact solution of a consistent problem, from afar and from itself."""
    exact = jnp.array([1.7, 0.45])
    y = decay(exact, 0.0)
    solution = least_squares(decay, START, y)
    assert max_error(solution.value, exact) < 1e-14
    again = least_squares(decay, exact, y)
    assert int(again.stats["iterations"]) <= 2
    assert max_error(again.value, exact) < 1e-14


def smooth(u: Any, p: Any) -> Any:
    """A field from noisy data: misfit and roughness."""
    return {"misfit": u + 0.1 * u**3 - p, "roughness": 3 * jnp.diff(u)}


def test_matrix_free_builds_no_matrix() -> None:
    """Assert value and gradient of a field of 1000 unknowns, without any array of 1000 by 1000."""
    n = 1000
    p = jnp.sin(jnp.arange(n) * 0.013) + 0.2 * jnp.cos(jnp.arange(n) * 1.7)
    weights = jnp.cos(jnp.arange(n) * 0.31)
    method = LevenbergMarquardt(rtol=1e-11, linear=solvers.CG(rtol=1e-12))

    def loss(p: Any) -> Any:
        return jnp.vdot(weights, least_squares(smooth, jnp.zeros(n), p, method).value)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(p)
    sizes = [x.aval.size for eqn in equations(jaxpr) for x in eqn.outvars if hasattr(x.aval, "size")]
    assert max(sizes) <= 2 * n
    value_and_gradient, h = jax.jit(jax.value_and_grad(loss)), 1e-4
    v = jnp.sin(jnp.arange(n) * 0.7)
    difference = (value_and_gradient(p + h * v)[0] - value_and_gradient(p - h * v)[0]) / (2 * h)
    assert float(jnp.vdot(value_and_gradient(p)[1], v)) == pytest.approx(float(difference), rel=1e-7)


def test_iterations_do_not_change_the_graph() -> None:
    """Assert as many equations in the gradient's jaxpr for every tolerance and limit."""

    def count(method: Any) -> int:
        return sum(1 for _ in equations(jax.make_jaxpr(jax.grad(lambda y: fit(y, method)[0]))(DATA)))

    assert count(LevenbergMarquardt(rtol=1e-4, max_iters=3)) == count(LevenbergMarquardt(rtol=1e-12, max_iters=400))


@pytest.mark.slow
def test_define_by_run() -> None:
    """Assert value and gradient under `jax.disable_jit()`, where the residual sees numbers."""
    seen = []

    def residual(u: Any, y: Any) -> Any:
        seen.append(isinstance(u, jax.core.Tracer))
        return jnp.stack([3 * u - y, u - 1.0])

    with jax.disable_jit():
        value, slope = jax.value_and_grad(lambda y: least_squares(residual, 1.3, y).value)(2.0)
    assert float(value) == pytest.approx(0.7, abs=1e-14)
    assert float(slope) == pytest.approx(0.3, abs=1e-14)
    assert not all(seen)


def test_the_adjoint_has_its_own_method() -> None:
    """Assert that `adjoint=` is used for the cotangent's solve, and seen by `watch_solves`."""
    with adjoint.watch_solves() as log:
        gradient = jax.jit(jax.grad(lambda y: jnp.sum(fit(y, adjoint=solvers.MINRES(rtol=1e-13)))))(DATA)
    assert [record.method for record in log] == ["LevenbergMarquardt", "MINRES"]
    assert all(record.converged for record in log)
    J, h = jax.jacfwd(decay)(fit(DATA), DATA), jax.hessian(lambda u: jnp.sum(decay(u, DATA) ** 2) / 2)(fit(DATA))
    assert max_error(gradient, jnp.linalg.solve(h, jnp.ones(2)) @ J.T) < 1e-11


def test_misuse_is_one_error() -> None:
    """Assert one sentence for each mistake: functions, methods, complex numbers, shapes of by-products."""
    ok = jnp.ones(2)
    with pytest.raises(TypeError, match="must be a function residual"):
        least_squares(3.0, ok)  # pyright: ignore
    with pytest.raises(TypeError, match=r"instance such as solvers.LevenbergMarquardt\(\), got"):
        least_squares(decay, ok, DATA, solvers.Newton())  # pyright: ignore
    with pytest.raises(TypeError, match=r"Cholesky\(\) or solvers.LU\(\) .*CG.* got GMRES"):
        LevenbergMarquardt(linear=solvers.GMRES())
    with pytest.raises(TypeError, match="needs an objective and cannot solve equations"):
        solvers.root_find(lambda u, p: u - 1, 0.0, None, LevenbergMarquardt())
    with pytest.raises(ValueError, match="unknowns must be real"):
        least_squares(decay, ok + 1j, DATA)
    with pytest.raises(ValueError, match="must return real numbers"):
        least_squares(lambda u, p: u * 1j, ok)
    with pytest.raises(ValueError, match="must return a pair"):
        least_squares(decay, ok, DATA, has_aux=True)
    with pytest.raises(ValueError, match="reachable in float32"):
        least_squares(lambda u, p: u, jnp.ones(2, jnp.float32), None, LevenbergMarquardt(rtol=1e-12))
