"""Declared null spaces of singular systems.

With orthonormal Z, A Z = 0, and W, Aᴴ W = 0, the system  (A + α W Zᴴ) x = (I - W Wᴴ) b  is regular; its solution is
that of A x = (I - W Wᴴ) b with Zᴴ x = 0. It is differentiated as it stands, so the adjoint is projected as well.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Inexact

from ..adjoint._trace import as_unknowns
from ._dense import generic_signs

Tree = Any


class NullSpace(eqx.Module):
    """Orthonormal bases of the null spaces of A and of its adjoint, as rows."""

    right: Inexact[Array, "k N"]
    left: Inexact[Array, "k N"]
    alpha: Float[Array, ""] | float = 1.0
    wrong: Bool[Array, ""] | bool = False  # whether A has other null spaces

    def is_inconsistent(self, b: Tree) -> jax.Array:
        """Whether b has more than a rounding error's part in the left null space, or A has other null spaces."""
        flat, _ = ravel_pytree(b)
        part = jnp.linalg.norm(jnp.conj(self.left) @ flat)
        return self.wrong | (part > jnp.finfo(flat.dtype).eps ** 0.5 * jnp.linalg.norm(flat))


def as_null_space(right: Any, left: Any, b: Tree) -> NullSpace | None:
    """What a user gave, as orthonormal bases; None if nothing was given."""
    if right is None:
        if left is not None:
            message = "`left_null_space` was given without `null_space`. Give both, or `null_space` alone if A = Aᵀ."
            raise ValueError(message)
        return None
    Z = _orthonormal("null_space", right, b)
    W = Z if left is None else _orthonormal("left_null_space", left, b)
    if Z.shape != W.shape:
        message = (
            f"`null_space` and `left_null_space` must have as many vectors: a square matrix has null spaces of one "
            f"dimension. Got {len(Z)} and {len(W)}."
        )
        raise ValueError(message)
    return NullSpace(Z, W)


def _orthonormal(name: str, vectors: Any, b: Tree) -> jax.Array:
    shapes, vectors = jax.tree.map(jnp.shape, b), lax.stop_gradient(as_unknowns(vectors))
    one = jax.tree.structure(vectors) == jax.tree.structure(b)
    leaves = list(zip(jax.tree.leaves(vectors), jax.tree.leaves(b), strict=True)) if one else []
    if one and all(v.shape == x.shape for v, x in leaves):
        vectors = jax.tree.map(lambda v: v[None], vectors)
    elif not (one and leaves and all(v.shape[1:] == x.shape and len(v) == len(leaves[0][0]) for v, x in leaves)):
        got = jax.tree.map(jnp.shape, vectors)
        message = (
            f"`{name}` must be a vector like `b`, of shapes {shapes}, or several with a leading axis; got {got}. For "
            "an operator without null space leave it out."
        )
        raise ValueError(message)
    dtype = ravel_pytree(b)[0].dtype
    flat = jax.vmap(lambda v: ravel_pytree(v)[0])(vectors).astype(dtype)
    return jnp.linalg.qr(flat.T)[0].T


def consistent_part(null: NullSpace, b: Tree) -> Tree:
    """(I - W Wᴴ) b."""
    flat, unravel = ravel_pytree(b)
    return unravel(flat - (jnp.conj(null.left) @ flat) @ null.left)


def regularised(null: NullSpace, x: Tree, Ax: Tree) -> Tree:
    """(A + α W Zᴴ) x."""
    flat, unravel = ravel_pytree(x)
    return jax.tree.map(jnp.add, Ax, unravel(null.alpha * (jnp.conj(null.right) @ flat) @ null.left))


def with_scale(null: NullSpace, apply: Any, like: Tree) -> NullSpace:
    """α of the size of A: ‖A p‖ / ‖p‖ for a generic p, so that the conditioning does not suffer.

    With it goes a look at what was declared: (A + α W Zᴴ) x = b has a solution for any Z and W, which is one of A x = b
    only if they are null spaces. Of Aᴴ W the products Wᴴ A p are seen.
    """
    flat, unravel = ravel_pytree(like)

    def product(v: jax.Array) -> jax.Array:
        return ravel_pytree(apply(unravel(v)))[0]

    p, z = generic_signs(flat.size, flat.dtype), generic_signs(len(null.right), flat.dtype) @ null.right
    Ap, Az = lax.stop_gradient((product(p), product(z)))
    size, small = jnp.linalg.norm(Ap) / jnp.linalg.norm(p), jnp.finfo(flat.dtype).eps ** 0.5
    wrong = jnp.linalg.norm(Az) > small * size * jnp.linalg.norm(z)
    wrong |= jnp.linalg.norm(jnp.conj(null.left) @ Ap) > small * jnp.linalg.norm(Ap)
    return NullSpace(null.right, null.left, jnp.where(size > 0, size, 1), wrong)
