"""The verbs of the two families of methods."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..adjoint import Status, failed
from ..adjoint._tolerance import resolve_tolerance
from ..adjoint._watch import watch
from ._user_matrix import KnownMatrix


class Outcome(NamedTuple):
    """What a method reports: the value, its status and its counts, and whether a root there has a derivative."""

    value: Any
    status: Status
    stats: dict[str, Any]
    regular: Any = True


class AbstractLinearMethod(eqx.Module):
    """A way to solve A x = b, where A is a function on pytrees."""

    @abc.abstractmethod
    def resolve(self, dtype: jnp.dtype) -> "AbstractLinearMethod":
        """The method with the tolerances that it uses in `dtype`; `ValueError` for one out of reach."""

    @abc.abstractmethod
    def solve(self, matvec: Callable[[Any], Any], b: Any, reference: Any) -> Outcome:
        """Solve A x = b. Tolerances are relative to the norm of `reference` (b itself, as a rule)."""

    def for_matrix(self, matrix: Any) -> Self:
        """The method for an operator whose matrix is known, dense or `BCOO`."""
        del matrix
        return self

    def for_function(self, f: Callable[[Any], Any], like: Any) -> Self:
        """The method for operators that are derivatives of `f` at arguments like `like`."""
        del f, like
        return self

    def hoisted(self, like: Any) -> Self:
        """The method with arrays that its functions close over as leaves; `like` is an unknown."""
        del like
        return self

    def transposed(self, like: Any) -> Self:
        """The method for the transposed operator, whose preconditioner is transposed too."""
        del like
        return self

    def for_iteration(self) -> Self:
        """The method for corrections in an iteration that looks at its own residual."""
        return self

    def tightened(self, rtol: Any) -> Self:
        """The method for a derivative's solves, with a relative tolerance of at most `rtol`."""
        del rtol
        return self


class AbstractRootMethod(eqx.Module):
    """A way to solve F(u) = 0, F from a pytree to a pytree of the same structure."""

    rtol: eqx.AbstractVar[float | None]
    atol: eqx.AbstractVar[float | None]
    linear: eqx.AbstractVar[AbstractLinearMethod]

    @abc.abstractmethod
    def solve(self, f: Callable[[Any], Any], guess: Any, params: Any = None) -> Outcome:
        """Find a root near `guess`; `params` are for functions that the user gave to the method."""

    def resolve(self, dtype: jnp.dtype) -> Self:
        """The method with the tolerances that it uses in `dtype`; `ValueError` for one out of reach."""
        rtol = resolve_tolerance("rtol", self.rtol, 1e-10, dtype)
        atol = resolve_tolerance("atol", self.atol, 1e-12, dtype, reachable=False)
        return dataclasses.replace(self, rtol=rtol, atol=atol, linear=self.linear.resolve(dtype))

    def weight(self, u: jax.Array) -> jax.Array:
        """The error allowed in each entry, atol + rtol |u|."""
        assert self.atol is not None and self.rtol is not None  # noqa: PT018 (`resolve` has set them)
        return self.atol + self.rtol * jnp.abs(u)

    def weighted(self, d: jax.Array, u: jax.Array) -> jax.Array:
        """The size of a correction in units of the tolerances, max |dᵢ| / (atol + rtol |uᵢ|)."""
        # 0 / 0 where both tolerance and correction vanish: no correction means converged.
        return jnp.max(jnp.where(d == 0, 0, jnp.abs(d) / self.weight(u)), initial=0.0)

    def hoisted(self, like: Any) -> Self:
        """The method with arrays that its functions close over as leaves; `like` is an unknown."""
        return dataclasses.replace(self, linear=self.linear.hoisted(like))

    def for_function(self, f: Callable[[Any], Any], like: Any) -> Self:
        """The method for a residual `f` at unknowns like `like`, whose structure its linear method may look at."""
        return dataclasses.replace(self, linear=self.linear.for_function(f, like))

    def of_derivative(self) -> AbstractLinearMethod:
        """The linear method of the derivative's solves, as tight as the root."""
        assert self.rtol is not None
        return self.linear.tightened(self.rtol)


def linear_solver(
    method: AbstractLinearMethod, kind: str = "tangent", *, transposed: bool = False
) -> Callable[..., tuple[Any, jax.Array]]:
    """The method as `adjoint.implicit_root` wants it: `(matvec, b) -> (x, converged)`.

    If `transposed`, the method is that of the forward solve, and the operator's transpose is to be solved with.
    """

    def solve(matvec: Callable[[Any], Any], b: Any) -> tuple[Any, jax.Array]:
        outcome = (method.transposed(b) if transposed else method).solve(matvec, b, b)
        watch(kind, method, outcome.status, outcome.stats)
        return outcome.value, ~failed(outcome.status)

    return solve


def root_solver(method: AbstractRootMethod, params: Any = None) -> Callable[..., tuple[Any, Any]]:
    """The method as `adjoint.implicit_root` wants it: `(f, guess) -> (u, (converged, (status, stats)))`."""

    def solve(f: Callable[[Any], Any], guess: Any) -> tuple[Any, Any]:
        outcome = method.solve(f, guess, params)
        watch("forward", method, outcome.status, outcome.stats)
        return outcome.value, (~failed(outcome.status) & outcome.regular, (outcome.status, outcome.stats))

    return solve


def on_flat(f: Callable[[Any], Any], unravel: Callable[[Any], Any], dtype: Any) -> Callable[[Any], Any]:
    """A function between pytrees of one structure, as one between flat arrays."""
    return lambda v: ravel_pytree(f(unravel(v)))[0].astype(dtype)


def solve_flat(
    linear: AbstractLinearMethod, operator: Callable[[Any], Any], b: jax.Array, unravel: Callable[[Any], Any]
) -> Outcome:
    """Solve for a flat correction; the method and its preconditioner see the structure of the unknowns."""
    if isinstance(operator, KnownMatrix):
        return linear.solve(operator, b, b)
    tree = unravel(b)
    outcome = linear.solve(lambda v: unravel(operator(ravel_pytree(v)[0])), tree, tree)
    return outcome._replace(value=ravel_pytree(outcome.value)[0])


def status_where(pairs: list[tuple[jax.Array, Any]], otherwise: Any) -> Status:
    """The status of the first condition that holds."""
    status = otherwise
    for condition, value in reversed(pairs):
        status = Status.where(condition, value, status)
    return status


def all_finite(x: jax.Array) -> jax.Array:
    """Whether a flat array holds neither infinities nor NaN."""
    return jnp.all(jnp.isfinite(x))
