"""Conjugate gradients that stop at the edge of a trust region or at a direction of non-positive curvature."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..adjoint._loops import while_loop
from ._dense import largest
from ._krylov import safe_quotient

Flat = Callable[[Any], Any]
# A curvature below this part of the largest one met is rounding noise: the operator is singular there.
_FLAT = 16


class Truncated(NamedTuple):
    """What `truncated_cg` reports.

    `step` minimises the model within the region, `residual` is ‖H d + g‖/‖g‖, `edge` tells that the region or the
    curvature ended the iteration. Along `direction` the curvature is non-positive if `flat`, and truly so if
    `negative`.
    """

    step: Float[Array, " N"]
    residual: Float[Array, ""]
    iterations: Int[Array, ""]
    edge: Bool[Array, ""]
    flat: Bool[Array, ""]
    negative: Bool[Array, ""]
    direction: Float[Array, " N"]
    length: Float[Array, ""]  # ‖d‖ in the norm of M⁻¹


class _State(NamedTuple):
    d: Float[Array, " N"]
    r: Float[Array, " N"]
    p: Float[Array, " N"]
    rz: Float[Array, ""]
    dd: Float[Array, ""]  # ⟨d, d⟩, ⟨d, p⟩ and ⟨p, p⟩ in the inner product of M⁻¹
    dp: Float[Array, ""]
    pp: Float[Array, ""]
    greatest: Float[Array, ""]  # curvature met
    iterations: Int[Array, ""]
    edge: Bool[Array, ""]
    flat: Bool[Array, ""]
    negative: Bool[Array, ""]


def truncated_cg(
    H: Flat, M: Flat | None, g: Any, rtol: Any, limit: int, *, radius: Any = jnp.inf, asked: Any = True
) -> Truncated:
    """Minimise g·d + d·H d / 2 for ‖d‖ ≤ `radius` in the norm of M⁻¹, until ‖H d + g‖ ≤ `rtol` ‖g‖.

    Without a radius, the iteration stays where it meets non-positive curvature. Unless `asked`, nothing is done.

    Source: Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer.
    Anal. 20 (1983), doi:10.1137/0720042; with a preconditioner: Conn, Gould and Toint, *Trust-Region Methods*,
    Algorithm 7.5.1, doi:10.1137/1.9780898719857.
    """
    # Squared norms of a gradient near the ends of the number range would vanish or overflow.
    size = largest(g)
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    b, bound = g / size, (radius / size) ** 2
    target = rtol * jnp.linalg.norm(b)
    floor = _FLAT * jnp.finfo(b.dtype).eps

    def conditioned(r: jax.Array) -> jax.Array:
        return r if M is None else M(r)

    def continues(s: _State) -> jax.Array:
        return asked & ~s.edge & (jnp.linalg.norm(s.r) > target) & (s.rz > 0) & (s.iterations < limit)

    def step(s: _State) -> _State:
        q = H(s.p)
        curvature = jnp.vdot(s.p, q) / s.pp
        greatest = jnp.maximum(s.greatest, jnp.abs(curvature))
        flat = ~(curvature > floor * greatest)
        alpha = s.rz / jnp.where(flat, 1, curvature * s.pp)
        dd = s.dd + alpha * (2 * s.dp + alpha * s.pp)
        edge = flat | (dd >= bound)
        to_edge = (bound - s.dd) / (s.dp + jnp.sqrt(s.dp**2 + s.pp * (bound - s.dd)))
        to_edge = jnp.where(jnp.isfinite(to_edge), to_edge, 0)
        length = jnp.where(edge, to_edge, alpha)
        r = s.r + length * q
        z = conditioned(r)
        rz = jnp.vdot(r, z)
        beta = safe_quotient(rz, s.rz)
        return _State(
            d=s.d + length * s.p,
            r=r,
            p=jnp.where(edge, s.p, beta * s.p - z),
            rz=rz,
            dd=jnp.where(edge, bound, dd),
            dp=beta * (s.dp + alpha * s.pp),
            pp=rz + beta**2 * s.pp,
            greatest=greatest,
            iterations=s.iterations + 1,
            edge=edge,
            flat=flat,
            negative=curvature < -floor * greatest,
        )

    z = conditioned(b)
    rz, zero, no = jnp.vdot(b, z), jnp.zeros((), b.dtype), jnp.array(False)
    start = _State(jnp.zeros_like(b), b, -z, rz, zero, zero, rz, zero, jnp.zeros((), jnp.int32), no, no, no)
    end = while_loop(continues, step, start)
    residual = safe_quotient(jnp.linalg.norm(end.r), jnp.linalg.norm(b))
    length = size * jnp.sqrt(end.dd)
    return Truncated(size * end.d, residual, end.iterations, end.edge, end.flat, end.negative, end.p, length)
