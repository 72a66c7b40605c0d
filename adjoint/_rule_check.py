"""Are a node's rules the derivative of its function? Differences and dot tests, argument by argument."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._check import plateau
from ._trace import as_unknowns, differentiable, replaced

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ArgumentCheck:
    """One derivative ⟨w, f′(args) v⟩ along a random direction v of one argument, found in up to three ways.

    Attributes
    ----------
    argument
        Its position.
    differences, uncertainty
        By central differences at the best of several steps, and how well the neighbouring steps agree.
    jvp, vjp
        ⟨w, jvp(v)⟩ and ⟨vjp(w), v⟩; None where there is no rule.
    verdict
        ``"right"``, ``"wrong"`` or ``"cannot tell"``.
    reason
        One sentence.
    """

    argument: int
    differences: float
    uncertainty: float
    jvp: float | None
    vjp: float | None
    verdict: str
    reason: str


@dataclasses.dataclass(frozen=True)
class RuleReport:
    """The evidence and the verdict on a node's rules; `print(report)` shows both.

    Attributes
    ----------
    what
        The node's name.
    arguments
        An `ArgumentCheck` for each argument that carries derivatives.
    """

    what: str
    arguments: tuple[ArgumentCheck, ...]

    @property
    def verdict(self) -> str:
        """``"right"`` for all arguments, or the worst that was found for any."""
        found = {a.verdict for a in self.arguments}
        return next(v for v in ("wrong", "cannot tell", "right") if v in found)

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``"right"``."""
        return self.verdict == "right"

    def __str__(self) -> str:
        """The table and the verdict."""
        lines = ["argument          differences   good to                  jvp                  vjp"]
        for a in self.arguments:
            jvp, vjp = ("not given" if x is None else f"{x:+.12e}" for x in (a.jvp, a.vjp))
            lines.append(f"{a.argument:8d}  {a.differences:+.12e}  {a.uncertainty:.1e}  {jvp:>19}  {vjp:>19}")
        lines += [f"Argument {a.argument}: {a.verdict}; {a.reason}" for a in self.arguments]
        return "\n".join([*lines, f"The rules of {self.what}: {self.verdict}."])


def check_rules(f: Function, args: Sequence[Any], what: str, forward: bool, reverse: bool, *, seed: int) -> RuleReport:
    """Check `f` at `args` in `forward` and in `reverse` mode, where it has them."""
    rng = np.random.default_rng(seed)
    varying = [i for i, x in enumerate(args) if any(map(_varies, jax.tree.leaves(x)))]
    out = [np.asarray(x) for x in jax.tree.leaves(f(*args) if varying else None)]
    if not any(map(differentiable, out)):
        message = (
            f"{what}: a check needs a floating-point or complex argument and result, got arguments "
            f"{[type(x).__name__ for x in args]}. Integers have no derivative; pass 2.0 for 2."
        )
        raise ValueError(message)
    weights = [_random(rng, x).astype(x.dtype) if differentiable(x) else np.zeros(x.shape, int) for x in out]
    lines = [_Line(f, args, i, weights, rng) for i in varying]
    return RuleReport(what, tuple(line.check(forward, reverse) for line in lines))


class _Line:
    """φ(h) = Re Σ w f(args + h v), with v along one argument."""

    def __init__(self, f: Function, args: Sequence[Any], argument: int, weights: list[Any], rng: np.random.Generator):
        leaves, tree = jax.tree.flatten(args[argument])
        places = [i for i, x in enumerate(leaves) if _varies(x)]
        self.argument, self.weights = argument, weights
        self.at = as_unknowns([leaves[i] for i in places])
        self.v = [_size(x) * _random(rng, x) for x in self.at]

        def of_values(values: Any) -> Any:
            moved = jax.tree.unflatten(tree, replaced(leaves, places, values))
            return jax.tree.leaves(f(*replaced(args, [argument], [moved])))

        self.f = of_values
        self.eps = max(float(np.finfo(x.dtype).eps) for x in (*self.at, *map(np.asarray, weights)) if differentiable(x))

    def check(self, forward: bool, reverse: bool) -> ArgumentCheck:
        differences, uncertainty, noise = self._differences()
        found = {"jvp": self._forward()} if forward else {}
        found |= {"vjp": self._reverse()} if reverse else {}
        values = {rule: value for rule, (value, _) in found.items()}
        terms = max(size for _, size in found.values())
        size = max(abs(differences), noise, *map(abs, values.values()))
        verdict, reason = _judge(differences, uncertainty, values, size, self.eps, terms)
        return ArgumentCheck(
            self.argument, differences, uncertainty / size, values.get("jvp"), values.get("vjp"), verdict, reason
        )

    def _differences(self) -> tuple[float, float, float]:
        """The best central difference, how well its neighbours agree, and a size below which all is rounding."""
        steps = 1e-2 * 10.0 ** (-0.5 * np.arange(int(2 * np.log10(1e-2 / (10 * self.eps))) + 1))
        plus, minus = (np.array([self._along(sign * h) for h in steps]) for sign in (1, -1))
        terms = np.max(np.abs([plus[:, 1], minus[:, 1]]), axis=0)
        central = (plus[:, 0] - minus[:, 0]) / (2 * steps)
        best, uncertainty = plateau(central, self.eps * terms / steps)
        return float(central[best]), uncertainty, max(self.eps**0.6 * terms[-1], np.finfo(float).tiny)

    def _along(self, h: float) -> tuple[float, float]:
        return _paired(
            self.weights, self.f([x + jnp.asarray(h * v, x.dtype) for x, v in zip(self.at, self.v, strict=True)])
        )

    def _forward(self) -> tuple[float, float]:
        dots = [jnp.asarray(v, x.dtype) for x, v in zip(self.at, self.v, strict=True)]
        return _paired(self.weights, jax.jvp(self.f, (self.at,), (dots,))[1])

    def _reverse(self) -> tuple[float, float]:
        out, pullback = jax.vjp(self.f, self.at)
        bars = [
            jnp.asarray(w, x.dtype) if differentiable(x) else np.zeros(x.shape, jax.dtypes.float0)
            for x, w in zip(out, self.weights, strict=True)
        ]
        return _paired(self.v, pullback(bars)[0])


def _paired(weights: Sequence[Any], values: Sequence[Any]) -> tuple[float, float]:
    """Re Σ w x, and the sum of the moduli of its terms."""
    terms = [np.real(w * np.asarray(x)) for w, x in zip(weights, values, strict=True) if differentiable(x)]
    return float(sum(map(np.sum, terms))), float(sum(np.sum(np.abs(t)) for t in terms))


def _random(rng: np.random.Generator, like: Any) -> np.ndarray:
    x = rng.standard_normal(like.shape)
    return x + 1j * rng.standard_normal(like.shape) if np.iscomplexobj(like) else x


def _size(x: Any) -> float:
    rms = float(np.sqrt(np.mean(np.abs(np.asarray(x)) ** 2))) if x.size else 0.0
    return rms if rms > 0 else 1.0


def _varies(x: Any) -> bool:
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and differentiable(x))


def _judge(
    differences: float, uncertainty: float, found: dict[str, float], size: float, eps: float, terms: float
) -> tuple[str, str]:
    asked = max(1e-6, eps**0.4)
    errors = {rule: abs(value - differences) / size for rule, value in found.items()}
    clear = np.isfinite(differences) and uncertainty <= 1e-2 * size
    wrong = [rule for rule, error in errors.items() if clear and error > max(asked, 10 * uncertainty / size)]
    apart = abs(found["jvp"] - found["vjp"]) if len(found) == 2 else 0.0
    if not np.isfinite(list(found.values())).all():
        return "wrong", "a derivative is NaN or infinite."
    if wrong:
        ratios = [
            f"`{rule}` gives {found[rule] / differences + 0.0 if differences else np.inf:.6g} times" for rule in wrong
        ]
        return "wrong", f"{' and '.join(ratios)} the derivative, which is {differences:.6g} by differences."
    if apart > eps**0.6 * max(terms, size):
        return "wrong", f"⟨w, jvp(v)⟩ and ⟨vjp(w), v⟩ are the same number for right rules, and differ by {apart:.1e}."
    if not clear:
        return "cannot tell", (
            f"differences scatter by {uncertainty / size:.1e} at every step: `forward` is noisy, not smooth or not "
            "finite near here. Tighten its tolerances, or try another point or `seed`."
        )
    if max(errors.values()) > asked:
        return "cannot tell", f"differences are good to {uncertainty / size:.1e} only, and agree within that."
    return "right", f"it agrees with central differences to {max(errors.values()):.1e}."
