"""`check_gradient` tells right from wrong, and both from what it cannot tell."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tapeless import adjoint


def spoiled(f: Any, factor: float) -> Any:
    """`f` with a derivative that is off by `factor` in both modes."""

    @jax.custom_jvp
    def g(*args: Any) -> Any:
        return f(*args)

    @g.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y, dot = jax.jvp(f, primals, tangents)
        return y, factor * dot

    return g


def wiggle(x: Any) -> Any:
    return jnp.sum(jnp.exp(0.3 * x) * jnp.sin(2 * x))


X = jnp.array([0.3, -1.2, 2.0, 0.7])


def test_a_right_gradient() -> None:
    """Assert the verdict with the figures that a right gradient has in float64."""
    report = adjoint.check_gradient(wiggle, X)
    assert report.verdict == "right"
    assert report.passed
    assert report.difference_error < 1e-8
    assert report.forward_reverse < 1e-14
    assert report.slope == pytest.approx(2.0, abs=0.02)
    table = str(report)
    assert "central difference" in table
    assert "Taylor slope" in table
    assert "<- best" in table


@pytest.mark.parametrize("factor", [1.1, 1.001, 0.0, -1.0])
def test_a_wrong_gradient(factor: float) -> None:
    """Assert that a derivative off by a tenth, a thousandth, its sign or all of it is called wrong."""
    report = adjoint.check_gradient(spoiled(wiggle, factor), X)
    assert report.verdict == "wrong"
    assert "differs from central differences" in report.reason


def test_s64_a_small_error_shows_in_the_slope() -> None:
    """Assert case S64: slope 2 for the right gradient, 1 for one whose second entry is 3 % off."""

    def f(v: Any) -> Any:
        return jnp.exp(v[0]) + v[0] * v[1] ** 2

    @jax.custom_jvp
    def g(v: Any) -> Any:
        return f(v)

    @g.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y, pull = jax.vjp(f, *primals)
        return y, jnp.sum(pull(jnp.ones_like(y))[0] * jnp.array([1.0, 1.03]) * tangents[0])

    at = jnp.array([0.3, -0.7])
    assert np.allclose(jax.grad(f)(at), (1.839858807576, -0.42), rtol=0, atol=1e-12)
    assert adjoint.check_gradient(f, at).slope == pytest.approx(2.0, abs=0.02)
    wrong = adjoint.check_gradient(g, at)
    assert wrong.verdict == "wrong"
    assert wrong.slope == pytest.approx(1.0, abs=0.05)


def test_modes_that_disagree_are_wrong() -> None:
    """Assert that a transpose which is not the tangent's is caught by the dot product."""

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sum(x**2)

    f.defvjp(lambda x: (f(x), x), lambda x, c: (2 * c * x,))
    with pytest.raises(TypeError, match="custom_vjp"):
        adjoint.check_gradient(f, X)

    def lopsided(x: Any) -> Any:
        return adjoint.linear_node(
            lambda r, z: [z[0] * 2], lambda r, c: [c[0] * 2.001], [], [jnp.sum(jnp.sin(x))], "lopsided"
        )[0]

    report = adjoint.check_gradient(lopsided, X)
    assert report.verdict == "wrong"
    assert "forward and reverse mode differ" in report.reason


def test_noise_and_nan_are_told() -> None:
    """Assert `cannot tell` for a function that is noise at every step, and `wrong` for NaN."""

    def noisy(x: Any) -> Any:
        return jnp.sum(x) + jax.lax.stop_gradient(jnp.sum(jnp.floor(1e13 * jnp.sin(1e5 * x)) % 7))

    report = adjoint.check_gradient(noisy, X)
    assert report.verdict == "cannot tell"
    assert "noisy" in report.reason
    assert "Cannot tell" in str(report)
    nan = adjoint.check_gradient(lambda x: jnp.sqrt(jnp.sum(x**2)), jnp.zeros(3))
    assert nan.verdict == "wrong"
    assert "NaN" in nan.reason


def test_linear_functions_and_zero_gradients() -> None:
    """Assert that a linear function is right without a slope, and that a constant one cannot be told."""
    linear = adjoint.check_gradient(lambda x: 3 * jnp.sum(x), X)
    assert linear.verdict == "right"
    assert np.isnan(linear.slope)
    assert adjoint.check_gradient(lambda x: jnp.sum(0 * x) + 1.0, X).verdict in ("right", "cannot tell")


def test_outputs_and_arguments_of_any_kind() -> None:
    """Assert that pytrees of outputs are contracted, that integers and None are left alone, and float32 works."""

    def f(params: Any, n: Any) -> Any:
        return {"a": params["k"] ** n * X, "b": [jnp.sin(params["k"]), None]}

    assert adjoint.check_gradient(f, {"k": 1.3, "none": None}, 3).passed
    single = adjoint.check_gradient(wiggle, X.astype(jnp.float32))
    assert single.passed
    assert not adjoint.check_gradient(spoiled(wiggle, 1.1), X.astype(jnp.float32)).passed
    with pytest.raises(ValueError, match="at least one floating-point argument"):
        adjoint.check_gradient(lambda n: n, 3)
    with pytest.raises(ValueError, match="must return real numbers"):
        adjoint.check_gradient(lambda x: jnp.int32(1), 1.0)


def test_offsets_noise_and_mixed_precision() -> None:
    """Assert that a right gradient is never called wrong because its function is coarse, noisy or of mixed dtypes."""
    assert adjoint.check_gradient(lambda x: 3 * jnp.sum(x) + 1e6, X).verdict == "right"
    assert adjoint.check_gradient(lambda x: wiggle(x) + 1e10, X).verdict == "cannot tell"
    assert adjoint.check_gradient(lambda x, y: jnp.sum(x * y), X, X.astype(jnp.float32)).verdict == "right"
    for size, verdict in ((1e-10, "right"), (1e-6, "cannot tell")):
        f = lambda x, size=size: wiggle(x) + jax.lax.stop_gradient(size * jnp.sin(1e9 * wiggle(x)))
        assert adjoint.check_gradient(f, X).verdict == verdict
    assert adjoint.check_gradient(lambda x: jnp.sum(jnp.sin(1e8 * x)), X).verdict == "cannot tell"
