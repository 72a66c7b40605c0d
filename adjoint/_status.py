"""What became of a computation, as a value that passes through jit and vmap."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer

from ._loops import in_shard_map


class Status(eqx.Enumeration):
    """The outcome of a solve or a simulation; every member is a sentence that says what to change.

    Compare with `status == Status.converged` (an array of truth values under `vmap`);
    `Status[status]` is the sentence.
    """

    converged = "Converged."
    max_iterations = (
        "The iteration limit was reached before the tolerance was met. Start from a better guess, raise "
        "`max_iters`, or loosen `rtol`/`atol`."
    )
    singular = (
        "The Jacobian (or matrix) is singular at the point reached, to the digits of the dtype: no step can be found "
        "and no derivative exists there. Check for unknowns that no equation determines (declare the totals of a "
        "closed network by `conserved=`), start away from stationary points, or use `TrustRegion()`."
    )
    nonfinite = (
        "A value became infinite or NaN. Look for a division by zero, a root or logarithm of a negative number, "
        "or an overflow; for a simulation, try a smaller `dt`."
    )
    stalled = (
        "The iteration stopped making progress before the tolerance was met. The tolerance may be below what the "
        "dtype can resolve (use float64, or loosen `rtol`/`atol`), or there is no root near the guess."
    )
    nonlinear = (
        "The operator is not linear: it changes by other amounts than its derivative says. Use `root_find` for "
        "nonlinear equations, or check that `v -> A v` does not clip, square or branch on v."
    )
    indefinite = (
        "A direction of non-positive curvature was met: the operator is not symmetric positive "
        "definite (or the preconditioner is not). Use `MINRES()`, `GMRES()` or `LU()`, or check the sign."
    )
    unsymmetric = (
        "The operator is not symmetric (Hermitian), and the method is for symmetric ones. Use `GMRES()`, `BiCGStab()` "
        "or `LU()`, or check how boundary conditions enter the operator."
    )
    unbanded = (
        "The operator has entries outside the band that was declared. Use a wider `Banded(lower, upper)`, `SparseLU()` "
        "or `LU()`, or check the order of the unknowns."
    )
    incomplete = (
        "The operator has entries outside the sparsity pattern, or none that a decomposition can resolve. Leave "
        "`pattern` out so that it is found, or use `LU()`."
    )
    inconsistent = (
        "The right-hand side has a part in the declared null space, so the system has no solution; the value is the "
        "least-squares one. Subtract that part from the right-hand side (for a Neumann problem, its mean)."
    )
    unbracketed = (
        "The residual has the same sign at both ends of the bracket. Choose `lower` and `upper` so that the sign "
        "changes between them."
    )
    unconserved = (
        "A declared total is not conserved by the equations: no root of both exists near the point reached. Check the "
        "signs and coefficients of `conserved`, which must hold whatever the unknowns are."
    )


class SolveError(RuntimeError):
    """A numerical failure, raised because `throw=True` or because a gradient of a failed solve was asked for."""


def failed(status: Status) -> jax.Array:
    """Whether `status` is anything but converged (elementwise under `vmap`)."""
    return jnp.logical_not(status == Status.converged)


def sentence(status: Status) -> str:
    """The sentence of a concrete status; of the worst lane if there are several."""
    codes = jnp.ravel(jnp.asarray(jax.tree.leaves(status)[0]))
    bad = codes[codes != jax.tree.leaves(Status.converged)[0]]
    worst = bad[0] if bad.size else codes[0]
    member = eqx.tree_at(lambda s: jax.tree.leaves(s)[0], status, worst)
    text = Status[member]
    return text if bad.size <= 1 else f"{bad.size} of {codes.size} lanes failed. The first: {text}"


def poison(values: Any, bad: jax.Array) -> Any:
    """Replace floating-point leaves by NaN where `bad` (a scalar truth value) holds."""
    return jax.tree.map(lambda x: jnp.where(bad, jnp.asarray(jnp.nan, x.dtype), x), values)


def fail_at_run_time(value: Any, bad: jax.Array, message: str) -> Any:
    """Raise `message` from a compiled program where `bad` holds; inside `shard_map`, poison the failed devices."""
    if in_shard_map():
        return poison(value, bad)
    return eqx.error_if(value, bad, message)


def raise_if_failed(value: Any, status: Status, what: str) -> Any:
    """Return `value`, or raise `SolveError` with the sentence of a failed `status`.

    A concrete status raises a Python exception. Under an outer jit or vmap the check runs with the compiled
    program and the runtime reports the sentence.
    """
    code = jax.tree.leaves(status)[0]
    if not isinstance(code, Tracer):
        if bool(jnp.any(failed(status))):
            message = f"{what}: {sentence(status)}"
            raise SolveError(message)
        return value
    if in_shard_map():
        return poison(value, failed(status))
    return status.error_if(value, failed(status))
