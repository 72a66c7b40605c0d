"""Minimisation: equilibria, saddle points, rounding, derivatives, failures that are told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, max_error
from tapeless import adjoint, solvers
from tapeless.solvers._lbfgs import LBFGS
from tapeless.solvers._levenberg_marquardt import LevenbergMarquardt
from tapeless.solvers._minimize import minimize
from tapeless.solvers._newton_cg import NewtonCG

pytestmark = pytest.mark.slow  # compilation, for a minute

METHODS = {"NewtonCG": NewtonCG, "LBFGS": LBFGS}
TIGHT = {"rtol": 1e-12, "atol": 1e-13, "linear": solvers.CG(rtol=1e-13)}
both = pytest.mark.parametrize("family", METHODS.values(), ids=METHODS)
LOAD = jnp.array([0.3, 0.9, -0.4, 0.7, 1.1])
DIRECTION = jnp.array([0.4, -0.3, 0.8, 0.1, -0.6])


def chain(u: Any, load: Any) -> Any:
    """The energy of a chain of stiffening springs between two walls, under a load on each joint."""
    strain = jnp.diff(jnp.pad(u, 1))
    return jnp.sum(strain**2 / 2 + strain**4 / 4 + 0.1 * strain**3) - jnp.vdot(load, u)


def bratu(u: Any, strength: Any) -> Any:
    """The energy of Bratu's problem -u'' = λ eᵘ on (0, 1), its stable branch."""
    h = 1 / (u.size + 1)
    return jnp.sum(jnp.diff(jnp.pad(u, 1)) ** 2) / (2 * h) - h * jnp.sum(strength * jnp.exp(u))


@both
def test_rosenbrock_and_its_derivative(family: Any) -> None:
    """Assert the minimum of Rosenbrock's function (p, p²), and its derivatives, from the usual start."""

    def function(u: Any, p: Any) -> Any:
        return 100 * (u[1] - u[0] ** 2) ** 2 + (p - u[0]) ** 2

    def minimum(p: Any) -> Any:
        return minimize(function, jnp.array([-1.2, 1.0]), p, family(**TIGHT)).value

    u, slope = jax.jit(lambda p: jax.jvp(minimum, (p,), (1.0,)))(1.3)
    assert np.allclose(u, (1.3, 1.69), rtol=0, atol=1e-12)
    assert np.allclose(slope, (1.0, 2.6), rtol=0, atol=1e-10)


@both
def test_derivatives_of_an_equilibrium(family: Any) -> None:
    """Assert gradient, dot test and Hessian-vector products in both orders of the modes, against differences."""

    def equilibrium(load: Any) -> Any:
        return minimize(chain, jnp.zeros(5), load, family(**TIGHT)).value

    gradient = jax.grad(lambda load: jnp.sum(jnp.sin(equilibrium(load))))

    @jax.jit
    def first_order(load: Any) -> Any:
        return *jax.jvp(equilibrium, (load,), (DIRECTION,)), gradient(load)

    u, du, g = first_order(LOAD)
    h = 1e-4
    up, down = first_order(LOAD + h * DIRECTION), first_order(LOAD - h * DIRECTION)
    assert max_error(jax.grad(chain)(u, LOAD), jnp.zeros(5)) < 1e-12
    assert max_error(du, jnp.linalg.solve(jax.hessian(chain)(u, LOAD), DIRECTION)) < 1e-11
    assert float(jnp.vdot(g, DIRECTION)) == pytest.approx(float(jnp.vdot(jnp.cos(u), du)), abs=1e-11)
    assert max_error(du, (up[0] - down[0]) / (2 * h)) < 1e-7
    if family is NewtonCG:

        @jax.jit
        def second_order(load: Any) -> Any:
            backward = jax.grad(lambda load: jnp.vdot(gradient(load), DIRECTION))(load)
            return jax.jvp(gradient, (load,), (DIRECTION,))[1], backward

        forward, backward = second_order(LOAD)
        assert max_error(forward, (up[2] - down[2]) / (2 * h)) < 1e-6
        assert max_error(backward, forward) < 1e-11


@both
def test_a_stationary_start_that_is_no_minimum_is_left(family: Any) -> None:
    """Assert that a saddle point and a maximum, where the gradient vanishes, end in a minimum."""

    def saddle(u: Any, p: Any) -> Any:
        return u[0] ** 2 + u[1] ** 4 / 4 - p * u[1] ** 2 / 2

    solve = jax.jit(lambda start: minimize(saddle, start, 0.49, family()).value)
    for start in ([0.0, 0.0], [0.8, 0.0], [0.8, 2.0]):
        u = solve(jnp.array(start))
        assert float(u[0]) == pytest.approx(0, abs=1e-12)
        assert abs(float(u[1])) == pytest.approx(0.7, abs=1e-12)


@both
def test_no_derivative_where_the_curvature_vanishes(family: Any) -> None:
    """Assert failures for a free translation, a degenerate minimum and an energy without bound."""

    def energy(u: Any, p: Any) -> Any:
        stretch = jnp.diff(u) - p[1]
        return p[0] * jnp.sum(stretch**2 + stretch**4) + p[2] * jnp.sum((u - 3) ** 4) - p[3] * jnp.sum(u**2)

    method, start = family(max_iters=120), jnp.array([0.0, 0.4, 1.5])

    def solve(p: Any) -> Any:
        return minimize(energy, start, p, method, throw=False)

    assert solve((1.0, 0.8, 0.0, 0.0)).status == adjoint.Status.singular
    assert bool(adjoint.failed(solve((0.0, 0.8, 1.0, 0.0)).status))
    assert bool(adjoint.failed(solve((0.0, 0.8, 0.0, 1.0)).status))
    with pytest.raises(adjoint.SolveError, match="derivative was asked for"):
        jax.grad(lambda p: solve((1.0, p, 0.0, 0.0)).value[2])(0.8)


@both
def test_errors_are_below_the_tolerance(family: Any) -> None:
    """Assert errors of value and gradient of at most the tolerance, over five of its decades and more."""
    n = 24
    load = 0.1 + 0.02 * jnp.sin(jnp.arange(n) * 1.3)

    @jax.jit
    def value_and_gradient(rtol: Any) -> Any:
        def loss(load: Any) -> Any:
            method = family(rtol=rtol, atol=0.1 * rtol, linear=solvers.CG(rtol=1e-12))
            u = minimize(chain, jnp.zeros(n), load, method).value
            return jnp.sum(jnp.sin(u)), u

        return jax.value_and_grad(loss, has_aux=True)(load)

    (_, exact), gradient = value_and_gradient(1e-13)
    for rtol in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12):
        (_, u), got = value_and_gradient(rtol)
        assert float(jnp.max(jnp.abs(u / exact - 1))) <= rtol
        assert max_error(got, gradient) <= 3 * rtol


@both
def test_rounding_of_the_objective_does_not_stop_it(family: Any) -> None:
    """Assert full accuracy though the objective has lost the digits: a constant of 1e8 is added."""
    load = LOAD * 1e-2
    u = minimize(lambda u, p: p[0] + chain(u, p[1]), jnp.zeros(5), (1e8, load), family(rtol=1e-10)).value
    hessian = jax.hessian(chain)(u, load)
    assert max_error(jnp.linalg.solve(hessian, jax.grad(chain)(u, load)) / u, jnp.zeros(5)) < 1e-11


@both
def test_matrix_free_field(family: Any) -> None:
    """Assert Bratu's energy with 1000 unknowns: value, gradient by a field, no array of 1000 by 1000."""
    n = 1000
    x = jnp.linspace(0, 1, n + 2)[1:-1]
    strength = 1.2 + 0.3 * jnp.sin(5 * x)

    def poisson(v: Any) -> Any:  # (-d²/dx²)⁻¹ by two summations: the Hessian's greater part
        s = jnp.cumsum(jnp.cumsum(v))
        return ((jnp.arange(n) + 1) / (n + 1) * s[-1] - jnp.concatenate([jnp.zeros(1), s[:-1]])) / (n + 1)

    linear = solvers.CG(rtol=1e-9, preconditioner=solvers.preconditioner(poisson, transpose=poisson))

    def loss(strength: Any) -> Any:
        return jnp.sum(minimize(bratu, jnp.zeros(n), strength, family(rtol=1e-9, linear=linear)).value ** 2) / n

    jaxpr = jax.make_jaxpr(jax.grad(loss))(strength)
    sizes = [v.aval.size for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "size")]
    assert max(sizes) <= 12 * n
    value_and_gradient = jax.jit(jax.value_and_grad(loss))
    _, gradient = value_and_gradient(strength)
    v, h = jnp.cos(3 * x), 1e-4
    difference = (value_and_gradient(strength + h * v)[0] - value_and_gradient(strength - h * v)[0]) / (2 * h)
    assert float(jnp.vdot(gradient, v)) == pytest.approx(float(difference), rel=1e-7)


def test_the_preconditioner_pays() -> None:
    """Assert far fewer inner iterations with a preconditioner, for the same minimum and gradient."""
    n = 200
    stiffness = jnp.exp(jnp.linspace(0, 9, n))

    def energy(u: Any, p: Any) -> Any:
        return jnp.sum(stiffness * (u**2 / 2 + u**4 / 4) - p * u) + jnp.sum(jnp.diff(u) ** 2)

    p = jnp.sqrt(stiffness)

    def solve(linear: Any) -> Any:
        def value(p: Any) -> Any:
            solution = minimize(energy, jnp.zeros(n), p, NewtonCG(linear=linear))
            return jnp.sum(solution.value), (solution.value, solution.stats["linear_iterations"])

        return jax.jit(jax.grad(value, has_aux=True))(p)

    plain, (u, many) = solve(solvers.CG(rtol=1e-11))
    scaled, (v, few) = solve(solvers.CG(rtol=1e-11, preconditioner=lambda r: r / stiffness))
    assert max_error(u, v) < 1e-9
    assert max_error(plain, scaled) < 1e-9
    assert int(few) < int(many) / 3


@pytest.mark.slow
def test_structures_by_products_captures_and_float32() -> None:
    """Assert pytrees, a by-product with derivatives, captured arrays, lanes of a vmap, and nothing but float32."""
    f32 = jnp.float32

    def solve(load: Any) -> Any:
        def energy(u: Any, p: Any) -> Any:
            joined = jnp.concatenate([u["left"], u["right"][0]])
            return p["k"] * chain(joined / p["scale"], load), joined[2] ** 2

        guess = {"left": jnp.zeros(2, load.dtype), "right": (jnp.zeros(3, load.dtype),)}
        solution = minimize(energy, guess, {"k": 2.0, "scale": 1, "none": None}, has_aux=True)
        return solution.value, solution.aux

    batch = jnp.stack([LOAD, -2 * LOAD])
    lanes = jax.jit(jax.vmap(lambda load: (solve(load), jax.jacrev(solve)(load))))
    (u, aux), slopes = lanes(batch)
    assert max_error(jnp.concatenate([u["left"], u["right"][0]], axis=1)[:, 2] ** 2, aux) < 1e-15
    single = jax.jit(lambda load: (solve(load), jax.jacrev(solve)(load)))(LOAD.astype(f32))
    assert {x.dtype for x in jax.tree.leaves(single)} == {jnp.dtype(f32)}
    assert max_error(single, jax.tree.map(lambda x: x[0], ((u, aux), slopes))) < 1e-4
    plain = jax.jit(jax.jacrev(lambda p: minimize(chain, jnp.zeros(5), p).value))(LOAD / 2)
    one = jax.jit(jax.grad(lambda load: solve(load)[0]["left"][1]))(LOAD)
    h = 1e-4
    ends = [lanes(jnp.stack([LOAD, LOAD + t * DIRECTION]))[0][0]["left"][1, 1] for t in (h, -h)]
    assert float(jnp.vdot(one, DIRECTION)) == pytest.approx(float((ends[0] - ends[1]) / (2 * h)), abs=1e-7)
    assert max_error(plain, plain.T) < 1e-9  # the inverse of a Hessian is symmetric


def test_lanes_end_at_different_times() -> None:
    """Assert each lane's own count under vmap, and a NaN derivative of the one that fails alone."""
    method = NewtonCG(max_iters=12)

    def solve(load: Any) -> Any:
        solution = minimize(chain, jnp.zeros(5), load, method, throw=False)
        return jnp.sum(solution.value), (solution.status, solution.stats["iterations"])

    loads = jnp.stack([0.01 * LOAD, LOAD, 1e9 * LOAD])
    gradient, (status, iterations) = jax.jit(jax.vmap(jax.grad(solve, has_aux=True)))(loads)
    assert list(map(bool, adjoint.failed(status))) == [False, False, True]
    assert int(iterations[0]) < int(iterations[1]) < int(iterations[2]) == 12
    assert np.all(np.isfinite(gradient[:2]))
    assert np.all(np.isnan(gradient[2]))


def test_arrays_that_are_closed_over() -> None:
    """Assert the eager gradient by an array that the function closes over."""
    load = jnp.array([0.6, -1.7])

    def total(load: Any) -> Any:
        return jnp.sum(minimize(lambda u, p: jnp.sum(jnp.cosh(u)) - jnp.vdot(load, u), jnp.ones(2)).value)

    assert max_error(jax.grad(total)(load), 1 / jnp.sqrt(1 + load**2)) < 1e-11  # u = arsinh(load)


@both
def test_iterations_do_not_change_the_graph(family: Any) -> None:
    """Assert as many equations in the gradient's jaxpr for every tolerance and limit."""

    def count(method: Any) -> int:
        gradient = jax.grad(lambda p: jnp.sum(minimize(chain, jnp.zeros(5), p, method).value))
        return sum(1 for _ in equations(jax.make_jaxpr(gradient)(LOAD)))

    assert count(family(rtol=1e-3, max_iters=4)) == count(family(rtol=1e-12, max_iters=900))


def test_misuse_is_one_error() -> None:
    """Assert one sentence for each mistake."""
    ok = jnp.ones(3)
    with pytest.raises(TypeError, match="must be a function function"):
        minimize("chain", ok)  # pyright: ignore
    with pytest.raises(TypeError, match=r"instance such as solvers.NewtonCG\(\), got"):
        minimize(chain, ok, ok, solvers.Newton())  # pyright: ignore
    with pytest.raises(TypeError, match=r"minimises sums of squares: use solvers.least_squares"):
        minimize(chain, ok, ok, LevenbergMarquardt())
    with pytest.raises(TypeError, match="needs an objective and cannot solve equations"):
        solvers.root_find(lambda u, p: u - 1, 0.0, None, NewtonCG())
    with pytest.raises(TypeError, match=r"must be solvers.CG\(...\).* got LU"):
        LBFGS(linear=solvers.LU())
    with pytest.raises(ValueError, match="`history` must be at least 1"):
        LBFGS(history=0)
    with pytest.raises(ValueError, match=r"one real number. Expected shape \(\).* got \(3,\)"):
        minimize(lambda u, p: u**2, ok)
    with pytest.raises(ValueError, match="unknowns must be real"):
        minimize(chain, ok * 1j, ok)
    with pytest.raises(ValueError, match="must return a pair"):
        minimize(chain, ok, ok, has_aux=True)
