"""Preconditioners: approximate inverses that a Krylov method is given, and their transposes for the adjoint solve."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..adjoint._trace import define_by_run


class AbstractPreconditioner(eqx.Module):
    """M ≈ A⁻¹, linear in v.

    One that is made from the operator (`jacobi()`, `ilu()`) is made anew for the transposed operator, and so is its own
    `transposed`.
    """

    @abc.abstractmethod
    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Return `v -> M v` for the operator `matvec` on pytrees like `like`."""

    def transposed(self, like: Any) -> "AbstractPreconditioner":
        """The preconditioner of the transposed operator."""
        del like
        return self

    def hoisted(self, like: Any) -> "AbstractPreconditioner":
        """The same, with arrays that it closes over as leaves."""
        del like
        return self


class Given(AbstractPreconditioner):
    """A user's function `v -> M v`, and its transpose if JAX cannot find it."""

    apply: Callable[[Any], Any]
    transpose: Callable[[Any], Any] | None = None

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """The function itself."""
        del matvec, like
        return self.apply

    def transposed(self, like: Any) -> "Given":
        """The given transpose, or the one that JAX derives."""
        return Given(self._derived(like) if self.transpose is None else self.transpose, self.apply)

    def _derived(self, like: Any) -> Callable[[Any], Any]:
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        try:
            transpose = jax.linear_transpose(self.apply, avals)
            jax.eval_shape(transpose, avals)
        except Exception as error:
            message = (
                "The adjoint solve needs the transpose of the preconditioner, and JAX cannot transpose this one "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Give it as "
                "`preconditioner=solvers.preconditioner(apply, transpose=...)` (the same function if M is symmetric), "
                "or say `adjoint=` with another method."
            )
            raise ValueError(message) from error
        return lambda v: transpose(v)[0]

    def hoisted(self, like: Any) -> "Given":
        """The functions with what they close over as leaves."""
        if define_by_run():
            return self
        transpose = None if self.transpose is None else eqx.filter_closure_convert(self.transpose, like)
        return Given(eqx.filter_closure_convert(self.apply, like), transpose)


def preconditioner(apply: Callable[[Any], Any], *, transpose: Callable[[Any], Any] | None = None) -> Given:
    """A preconditioner of your own, with its transpose.

    Choose it where JAX cannot transpose your function (it calls the host, or holds a loop with a condition). A function
    that JAX can transpose is given to the method as it is: `CG(preconditioner=f)`.

    Parameters
    ----------
    apply
        `v -> M v` with M ≈ A⁻¹, linear, on pytrees like the right-hand side. Arrays that it closes over are constants:
        the solution does not depend on the preconditioner, and has no derivative by it.
    transpose
        `v -> Mᵀ v`, without complex conjugation; `apply` itself if M is symmetric. Derived by JAX if not given.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> A, d = jnp.array([[4.0, 1.0], [1.0, 3.0]]), jnp.array([4.0, 3.0])
    >>> scale = lambda v: v / d
    >>> M = solvers.preconditioner(scale, transpose=scale)
    >>> x = solvers.linear_solve(A, jnp.array([5.0, 4.0]), solvers.CG(preconditioner=M)).value
    >>> [f"{float(each):.3f}" for each in x]
    ['1.000', '1.000']
    """
    return Given(apply, transpose)


def as_preconditioner(given: Any) -> AbstractPreconditioner | None:
    """What a user gave, as a preconditioner."""
    if given is None or isinstance(given, AbstractPreconditioner):
        return given
    if callable(given):
        return Given(given)
    message = (
        f"`preconditioner` must be a function v -> M v, solvers.preconditioner(...), or one of jacobi(), ilu(), amg(), "
        f"multigrid(...); got {given!r}."
    )
    raise TypeError(message)
