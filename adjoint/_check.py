"""`check_gradient`: is this gradient right? A verdict that does not rest on one step size."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ._trace import as_unknowns, differentiable, replaced

_SLOPE_POINTS = 5
_ABOVE_NOISE = 100.0


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """The evidence and the verdict; `print(report)` shows both.

    Attributes
    ----------
    steps
        Step sizes h along the direction, largest first, in units of each leaf's own magnitude.
    central
        Central differences (φ(x + h d) - φ(x - h d)) / 2h.
    remainders
        Taylor remainders |φ(x + h d) - φ(x) - h φ'(x) d|.
    reverse, forward
        The directional derivative by reverse and by forward mode.
    best
        Index of the step at which neighbouring differences agree best.
    difference_error
        |central[best] - reverse| relative to the larger of the two.
    difference_uncertainty
        How well the neighbouring differences agree at the best step, relative: what they can tell.
    slope
        Slope of log remainder over log step just above the rounding noise: 2 for a right gradient, 1 for a wrong
        one, NaN where the remainders are all noise (a function that is linear along the direction).
    forward_reverse
        |forward - reverse|, relative: the dot-product test ⟨c, J d⟩ = ⟨Jᵀc, d⟩.
    verdict
        ``"right"``, ``"wrong"`` or ``"cannot tell"``.
    reason
        One sentence.
    """

    steps: np.ndarray
    central: np.ndarray
    remainders: np.ndarray
    reverse: float
    forward: float
    best: int
    difference_error: float
    difference_uncertainty: float
    slope: float
    forward_reverse: float
    verdict: str
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``"right"``."""
        return self.verdict == "right"

    def __str__(self) -> str:
        """The table and the verdict."""
        lines = ["     step h   central difference   relative error   Taylor remainder    slope"]
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.diff(np.log(self.remainders)) / np.diff(np.log(self.steps))
        scale = max(abs(self.reverse), np.finfo(float).tiny)
        for i, h in enumerate(self.steps):
            slope = f"{slopes[i - 1]:8.2f}" if i and np.isfinite(slopes[i - 1]) else " " * 8
            mark = " <- best" if i == self.best else ""
            lines.append(
                f"{h:11.2e}   {self.central[i]:+18.10e}   {abs(self.central[i] - self.reverse) / scale:14.2e}   "
                f"{self.remainders[i]:16.3e} {slope}{mark}"
            )
        lines += [
            f"directional derivative   reverse {self.reverse:+.15e}   forward {self.forward:+.15e}",
            f"forward against reverse  {self.forward_reverse:.1e}",
            f"against differences      {self.difference_error:.1e} (differences are good to "
            f"{self.difference_uncertainty:.1e})",
            f"Taylor slope             {self.slope:.3f} (2 expected)",
            f"The gradient is {self.verdict}: {self.reason}"
            if self.verdict != "cannot tell"
            else f"Cannot tell: {self.reason}",
        ]
        return "\n".join(lines)


def check_gradient(f: Callable[..., Any], *args: Any, seed: int = 0, tolerance: float | None = None) -> GradientReport:
    """Check the derivatives of `f` at `args` along a random direction.

    Use it before you trust a gradient: once for each new model, at a generic point. (At a symmetric or stationary
    point the check cannot fail.) It compares reverse mode with central differences over a sweep of step sizes, with
    the slope of Taylor remainders, and with forward mode.

    Parameters
    ----------
    f
        Function of pytrees, returning a pytree of real numbers. An output that is no scalar is contracted with a
        fixed random vector. It must be differentiable in both modes.
    *args
        The point. Floating-point leaves are varied, each in proportion to its root mean square (a leaf of zeros by
        1); everything else is left alone.
    seed
        Of the random direction.
    tolerance
        Relative error up to which differences count as agreement; 1e-6 by default, or the eps^(2/5) of a lower
        precision.

    Returns
    -------
    GradientReport
        Print it; `.verdict`, `.passed` and the numbers are attributes.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import adjoint
    >>> adjoint.check_gradient(lambda x: jnp.sum(jnp.sin(x) * x), jnp.array([0.3, -1.2, 2.0])).verdict
    'right'

    References
    ----------
    Farrell, Ham, Funke and Rognes, "Automated derivation of the adjoint of high-level transient finite element
    programs", SIAM J. Sci. Comput. 35 (2013), doi:10.1137/120873558, Section 5.1, for the Taylor test.
    """
    line = _Line(f, args, seed)
    eps = line.eps
    tolerance = max(1e-6, eps**0.4) if tolerance is None else tolerance
    smallest = 10 * eps
    count = int(2 * np.log10(0.1 / smallest)) + 1
    steps = 0.1 * 10.0 ** (-0.5 * np.arange(count))
    value = line.value(0.0)
    plus = np.array([line.value(h) for h in steps])
    minus = np.array([line.value(-h) for h in steps])
    forward, reverse = line.forward(), line.reverse()
    central = (plus - minus) / (2 * steps)
    remainders = np.abs(plus - value - steps * reverse)
    # No difference is better than the rounding of the two values that it is made of.
    floor = eps * np.maximum(np.abs(plus), np.abs(minus)) / steps
    best, uncertainty = plateau(central, floor)
    size = max(abs(reverse), abs(central[best]), np.finfo(float).tiny)
    evidence = {
        "difference_error": abs(central[best] - reverse) / size,
        "difference_uncertainty": uncertainty / size,
        "slope": _slope(steps, remainders),
        "forward_reverse": abs(forward - reverse) / max(abs(forward), abs(reverse), np.finfo(float).tiny),
    }
    verdict, reason = _judge(
        **evidence, tolerance=tolerance, eps=eps, finite=bool(np.isfinite([value, forward, reverse]).all())
    )
    return GradientReport(
        steps, central, remainders, reverse, forward, best, **evidence, verdict=verdict, reason=reason
    )


class _Line:
    """φ(h) = ⟨c, f(x + h d)⟩ and its derivative at 0 in both modes."""

    def __init__(self, f: Callable[..., Any], args: Any, seed: int):
        leaves, tree = jax.tree.flatten(args)
        numbers = [i for i, x in enumerate(leaves) if _varies(x)]
        if not numbers:
            message = (
                "check_gradient needs at least one floating-point argument; got none. Integers are not varied; pass "
                "the real and imaginary parts of complex numbers apart."
            )
            raise ValueError(message)
        at = as_unknowns([leaves[i] for i in numbers])
        rng = np.random.default_rng(seed)
        direction = [jnp.asarray(rng.standard_normal(x.shape) * _size(x), x.dtype) for x in at]

        def of_numbers(values: Any) -> Any:
            return ravel_pytree(f(*jax.tree.unflatten(tree, replaced(leaves, numbers, values))))[0]

        out = jax.eval_shape(of_numbers, at)
        if not jnp.issubdtype(out.dtype, jnp.floating) or out.size == 0:
            message = (
                f"`f` must return real numbers. Expected a floating-point output, got {out.dtype}{list(out.shape)}."
            )
            raise ValueError(message)
        c = jnp.asarray(np.ones(1) if out.size == 1 else rng.standard_normal(out.size), out.dtype)
        self.eps = max(float(jnp.finfo(x.dtype).eps) for x in (*at, out))

        def moved(h: Any) -> Any:
            return [x + jnp.asarray(h, x.dtype) * d for x, d in zip(at, direction, strict=True)]

        def phi(values: Any) -> Any:
            return c @ of_numbers(values)

        def reverse() -> Any:
            bars = jax.grad(phi)(at)
            return sum(jnp.vdot(b.astype(out.dtype), d) for b, d in zip(bars, direction, strict=True))

        value = jax.jit(lambda h: phi(moved(h)))
        self.value = lambda h: float(value(jnp.asarray(h, at[0].dtype)))
        self.forward = lambda: float(jax.jit(lambda: jax.jvp(phi, (at,), (direction,))[1])())
        self.reverse = lambda: float(jax.jit(reverse)())


def _varies(x: Any) -> bool:
    return isinstance(x, float) or (hasattr(x, "dtype") and differentiable(x) and not jnp.iscomplexobj(x))


def _size(x: Any) -> float:
    rms = float(jnp.sqrt(jnp.mean(jnp.square(x)))) if x.size else 0.0
    return rms if rms > 0 else 1.0


def plateau(central: np.ndarray, floor: np.ndarray) -> tuple[int, float]:
    """The step at which the differences agree best with their neighbours, and how well."""
    gaps = np.abs(np.diff(central))
    disagreement = np.maximum(gaps[:-1], gaps[1:]) + floor[1:-1]
    disagreement = np.where(np.isfinite(disagreement), disagreement, np.inf)
    i = int(np.argmin(disagreement))
    return i + 1, float(disagreement[i])


def _slope(steps: np.ndarray, remainders: np.ndarray) -> float:
    """Slope of the remainders at the smallest steps that stand clear of the rounding noise."""
    noise = np.median(remainders[-4:])
    clear = np.flatnonzero(np.isfinite(remainders) & (remainders > _ABOVE_NOISE * noise))
    if len(clear) < _SLOPE_POINTS:
        return float("nan")
    window = clear[-_SLOPE_POINTS:]
    return float(np.polyfit(np.log(steps[window]), np.log(remainders[window]), 1)[0])


def _judge(
    *,
    difference_error: float,
    difference_uncertainty: float,
    slope: float,
    forward_reverse: float,
    tolerance: float,
    eps: float,
    finite: bool,
) -> tuple[str, str]:
    if not finite:
        return "wrong", "the value or a derivative is NaN or infinite."
    if forward_reverse > eps**0.6:
        return "wrong", f"forward and reverse mode differ by {forward_reverse:.1e}; they are the same number."
    if difference_uncertainty > 1e-2:
        return "cannot tell", (
            f"differences scatter by {difference_uncertainty:.1e} at every step; the function is noisy, not smooth "
            "here, or does not change along this direction. Tighten its tolerances, or try another point or `seed`."
        )
    if difference_error > max(tolerance, 10 * difference_uncertainty):
        if abs(slope - 2) < 0.2:
            return "cannot tell", (
                f"it differs from central differences by {difference_error:.1e}, but Taylor remainders fall with slope "
                f"{slope:.2f}: the function has features on very different scales. Scale it, or try another point."
            )
        return "wrong", (
            f"it differs from central differences by {difference_error:.1e}, and they are good to "
            f"{difference_uncertainty:.1e}."
        )
    if difference_error > tolerance:
        return "cannot tell", (
            f"differences are good to {difference_uncertainty:.1e} only, and agree within that. Scale the "
            "arguments, or use float64."
        )
    return "right", (
        f"it agrees with central differences to {difference_error:.1e} (to within {tolerance:.1e} was asked for) and "
        f"with forward mode to {forward_reverse:.1e}."
    )
