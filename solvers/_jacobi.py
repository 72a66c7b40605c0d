"""Jacobi preconditioners: the diagonal, or blocks along it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ..adjoint._trace import as_unknowns, known_value
from ._preconditioner import AbstractPreconditioner
from ._structured import Structured


class Jacobi(Structured, AbstractPreconditioner):
    """What `jacobi` returns: the inverse of the diagonal, or of blocks along it, found for each operator."""

    block: int = eqx.field(default=1, static=True, kw_only=True)

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Invert the diagonal blocks."""
        pattern, values = self.nonzeros_of(matvec, like)
        k = self.block
        if pattern.size % k:
            message = f"`block` must divide the number of unknowns, got blocks of {k} for {pattern.size} unknowns."
            raise ValueError(message)
        inside = np.flatnonzero(pattern.rows // k == pattern.cols // k)
        rows, cols = pattern.rows[inside], pattern.cols[inside]
        if np.unique(rows).size < pattern.size:
            message = (
                "The operator has an empty diagonal block, on which jacobi() cannot be made: an equation without its "
                "own unknown, as in saddle-point systems. Use `ilu()`, larger blocks, or a preconditioner of your own."
            )
            raise ValueError(message)
        blocks = (
            jnp.zeros((pattern.size // k, k, k), values.dtype).at[rows // k, rows % k, cols % k].set(values[inside])
        )
        inverse = _inverse(jnp.swapaxes(blocks, 1, 2) if self.flipped else blocks)

        def apply(v: Any) -> Any:
            flat, unravel = ravel_pytree(v)
            return unravel(jnp.einsum("nij,nj->ni", inverse, flat.reshape(-1, k)).ravel())

        return apply


class GivenDiagonal(AbstractPreconditioner):
    """What `jacobi(diagonal=...)` returns."""

    diagonal: Any

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Divide by the diagonal."""
        del matvec
        shapes = jax.tree.map(jnp.shape, self.diagonal), jax.tree.map(jnp.shape, like)
        if shapes[0] != shapes[1]:
            message = f"`diagonal` must have the structure and shapes of the unknown, got {shapes[0]} for {shapes[1]}."
            raise ValueError(message)
        return lambda v: jax.tree.map(lambda x, d: (x / d).astype(x.dtype), v, self.diagonal)


def jacobi(*, block: int = 1, diagonal: Any = None, pattern: Any = None) -> AbstractPreconditioner:
    """The Jacobi preconditioner M = D⁻¹, with D the diagonal of the operator or the blocks along it.

    Choose it where rows differ in size (graded meshes, jumping coefficients, different units): it costs next to
    nothing. It does not help against many unknowns: use `amg()`, `multigrid(...)` or `ilu()` there. Choose blocks where
    several unknowns of one point act on each other (reactions, components of a displacement).

    Parameters
    ----------
    block
        Size of the blocks: so many consecutive entries of the flattened unknown (an array (points, block)).
    diagonal
        The diagonal, like the unknown, where you know it; else it is found by products with the operator, as many as
        the Jacobian's colouring needs.
    pattern
        A matrix with the structure of the operator (`BCOO`, SciPy sparse, NumPy), where it cannot be found from its
        equations.

    Raises
    ------
    ValueError
        A diagonal entry given is zero; the operator has no diagonal entry (block) in some row; the blocks do not divide
        the unknowns; or the structure cannot be found.

    Notes
    -----
    Where an entry that was found (or the determinant of a block) is zero in value, that part is left unscaled. The
    adjoint solve uses the transposed blocks.

    Source: Saad, *Iterative Methods for Sparse Linear Systems*, 2nd ed., SIAM 2003, Section 4.1,
    doi:10.1137/1.9780898718003.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> k = 10.0 ** jnp.linspace(0, 4, 30)
    >>> A = lambda u: k * (3 * u - 0.1 * jnp.roll(u, 1).at[0].set(0))
    >>> x = solvers.linear_solve(A, k, solvers.GMRES(rtol=1e-5, preconditioner=solvers.jacobi())).value
    >>> bool(jnp.all((x > 0.3) & (x < 0.4)))
    True
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        message = f"`block` must be the size of a block (an integer of at least 1), got {block!r}."
        raise ValueError(message)
    if diagonal is None:
        return Jacobi(pattern, block=block)
    if block != 1:
        message = "`diagonal` is for blocks of one entry, got `block` as well. Leave one of them out."
        raise ValueError(message)
    diagonal = as_unknowns(diagonal)
    if any((d := known_value(x)) is not None and bool(jnp.any(d == 0)) for x in jax.tree.leaves(diagonal)):
        message = "`diagonal` has entries that are zero, by which jacobi() cannot divide. Set them to one."
        raise ValueError(message)
    return GivenDiagonal(diagonal)


def _inverse(blocks: jax.Array) -> jax.Array:
    if blocks.shape[-1] == 1:
        return 1 / jnp.where(blocks == 0, 1, blocks)
    inverse = jnp.linalg.inv(blocks)
    regular = jnp.all(jnp.isfinite(inverse), axis=(1, 2), keepdims=True) | ~jnp.all(
        jnp.isfinite(blocks), axis=(1, 2), keepdims=True
    )
    return jnp.where(regular, inverse, jnp.eye(blocks.shape[-1], dtype=blocks.dtype))
