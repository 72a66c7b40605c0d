"""The check of a node's rules: every kind of wrong rule is caught, and named."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tapeless.adjoint._external import node

X = jnp.array([0.3, -0.7, 1.9])


def sine(**options: Any) -> Any:
    rules = {
        "jvp": lambda args, out, dots: np.cos(args[0]) * dots[0],
        "vjp": lambda args, out, bar: (np.cos(args[0]) * bar,),
    }
    return node("sine", np.sin, like=lambda x: x, **(rules | options))


MATRIX = np.array([[2.0, 0.3, -0.5], [0.7, 1.5, 0.2], [-0.4, 0.9, 1.1]])


def matvec_rules(fault: str) -> dict[str, Any]:
    """Rules of A x + p² x, with a fault in one of them."""

    def tangent(args: Any, out: Any, dots: Any) -> Any:
        (x, p), (dx, dp) = args, dots
        factor = 2 if fault == "factor" else 1
        return factor * (MATRIX @ dx + p**2 * dx) + 2 * p * dp * x

    def cotangent(args: Any, out: Any, bar: Any) -> Any:
        x, p = args
        A = MATRIX if fault == "transpose" else MATRIX.T
        p_bar = (-1 if fault == "sign" else 1) * 2 * p * (x @ bar)
        return A @ bar + p**2 * bar, None if fault == "forgotten" else p_bar

    return {"jvp": tangent, "vjp": cotangent}


@pytest.mark.parametrize(
    ("fault", "rule", "argument", "ratio"),
    [("factor", "jvp", 0, 2), ("transpose", "vjp", 0, None), ("sign", "vjp", 1, -1), ("forgotten", "vjp", 1, 0)],
)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("host", [True, "forward"])
def test_wrong_rules_are_caught(fault: str, rule: str, argument: int, ratio: Any, alone: bool, host: Any) -> None:
    """Assert that a check tells which rule is wrong, for which argument, by which factor; and nothing else."""
    rules = matvec_rules(fault)
    if alone and host is True:
        rules = {rule: rules[rule]}
    f = node("matvec", lambda x, p: MATRIX @ x + p**2 * x, host=host, like=lambda x, p: x, **rules)
    report = f.check(X, 1.3)
    assert report.verdict == "wrong"
    assert not report.passed
    assert [a.argument for a in report.arguments if a.verdict == "wrong"] == [argument]
    found = report.arguments[argument]
    assert f"`{rule}` gives" in found.reason
    assert "-0 times" not in found.reason
    assert f"Argument {argument}: wrong" in str(report)
    if ratio is not None:
        assert getattr(found, rule) / found.differences == pytest.approx(ratio, abs=1e-8)


def test_right_rules_pass_the_check() -> None:
    """Assert a right verdict at several seeds, with differences and a dot test as good as the arithmetic."""
    f = node("matvec", lambda x, p: MATRIX @ x + p**2 * x, like=lambda x, p: x, **matvec_rules("none"))
    for seed in range(2):
        report = f.check(X, 1.3, seed=seed)
        assert report.passed
        for a in report.arguments:
            assert a.jvp == pytest.approx(a.vjp, rel=1e-13, abs=1e-14)
            assert a.differences == pytest.approx(a.vjp, rel=1e-9)
    assert f.check(X.astype(jnp.float32), jnp.float32(1.3)).passed
    assert "not given" in str(sine(vjp=None).check(X))


def test_a_small_fault_and_noise_are_told() -> None:
    """Assert that a dot test below the reach of differences is wrong, and that noise is no verdict."""
    almost = sine(vjp=lambda args, out, bar: (np.cos(args[0]) * bar * (1 + 1e-8),))
    assert "are the same number" in almost.check(X).arguments[0].reason
    assert almost.check(X).verdict == "wrong"
    rng = np.random.default_rng(0)
    noisy = node("noisy", lambda x: np.sin(x) + 0.1 * rng.standard_normal(3), vjp=sine().vjp, like=lambda x: x)
    assert noisy.check(X).verdict == "cannot tell"
