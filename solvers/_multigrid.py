"""Geometric multigrid on regular grids, as a preconditioner."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact

from ..adjoint._trace import define_by_run
from ._preconditioner import AbstractPreconditioner

Grid = Inexact[Array, "..."]


class Level(eqx.Module):
    """One grid: the operator on it, and the weights of its smoother, ω over the diagonal."""

    apply: Callable[[Grid], Grid]
    weight: Grid

    def transposed(self) -> Callable[[Grid], Grid]:
        """The transposed operator."""
        transpose = jax.linear_transpose(self.apply, self.weight)
        return lambda v: transpose(v)[0]


class Hierarchy(AbstractPreconditioner):
    """Grids from the finest to the coarsest, where the inverse matrix is known."""

    levels: tuple[Level, ...]
    inverse: Inexact[Array, "n n"]
    sweeps: int = eqx.field(static=True)
    beyond: str = eqx.field(static=True)
    flipped: bool = eqx.field(default=False, static=True)

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Return one V-cycle from zero."""
        del matvec, like
        return lambda r: _cycle(self, 0, r)

    def transposed(self, like: Any) -> "Hierarchy":
        """The transposed cycle."""
        del like
        return dataclasses.replace(self, flipped=not self.flipped)


class Multigrid(AbstractPreconditioner):
    """What `multigrid` returns: a V-cycle on grids that are made when the unknown's shape is known."""

    operator: Callable[[Any, int], Any]
    sweeps: int = eqx.field(static=True)
    omega: float = eqx.field(static=True)
    coarsest: int = eqx.field(static=True)
    beyond: str = eqx.field(static=True)
    flipped: bool = eqx.field(default=False, static=True)

    def prepare(self, matvec: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
        """Make the grids, and return one V-cycle from zero."""
        return self.hoisted(like).prepare(matvec, like)

    def transposed(self, like: Any) -> "Multigrid":
        """The transposed cycle."""
        del like
        return dataclasses.replace(self, flipped=not self.flipped)

    def hoisted(self, like: Any) -> Hierarchy:
        """The grids with their diagonals, made once for a solve and its derivatives."""
        if not (hasattr(like, "ndim") and like.ndim >= 1):
            message = (
                f"multigrid(...) is for an unknown that is one array on a grid, got {jax.tree.structure(like)}. For "
                "several fields write a preconditioner of your own that calls one cycle for each."
            )
            raise TypeError(message)
        grids = [jnp.zeros(like.shape, like.dtype)]
        while max(grids[-1].shape) > self.coarsest:
            grids.append(jax.eval_shape(lambda v: _restricted(v, self.beyond), grids[-1]))
        levels = tuple(self._level(grid, depth) for depth, grid in enumerate(grids))
        last = grids[-1]
        basis = jnp.eye(last.size, dtype=last.dtype).reshape(last.size, *last.shape)
        matrix = jax.vmap(levels[-1].apply)(basis).reshape(last.size, last.size).T
        return Hierarchy(levels, jnp.linalg.inv(matrix), self.sweeps, self.beyond, self.flipped)

    def _level(self, grid: Any, depth: int) -> Level:
        zero = jnp.zeros(grid.shape, grid.dtype)

        def apply(v: Grid) -> Grid:
            Av = self.operator(v, depth)
            if jnp.shape(Av) != v.shape:
                message = (
                    f"`operator(v, level)` must return the shape that it is given, on every grid. Expected {v.shape} "
                    f"on level {depth}, got {jnp.shape(Av)}."
                )
                raise ValueError(message)
            return Av.astype(v.dtype)

        diagonal = _diagonal(apply, zero)
        weight = jnp.where(diagonal == 0, 0, self.omega / jnp.where(diagonal == 0, 1, diagonal))
        return Level(apply if define_by_run() else eqx.filter_closure_convert(apply, zero), weight)


def multigrid(
    operator: Callable[[Any, int], Any],
    *,
    sweeps: int = 1,
    omega: float = 0.8,
    coarsest: int = 8,
    beyond: str = "zero",
) -> Multigrid:
    """A geometric multigrid V-cycle, for elliptic operators on a regular grid in one, two or three dimensions.

    Choose it for Poisson-like problems: the iterations of `CG(preconditioner=multigrid(...))` do not grow with the
    size of the grid. Each cycle costs about as much as ten products with a five-point operator.

    Parameters
    ----------
    operator
        `operator(v, level)`: the operator on the grid of v, whose points are 2**level times as far apart as those of
        the unknown. On level 0 it need be close to the system's operator only: a Laplacian will do for a Laplacian
        with further terms. Its stencil may reach one point in each direction, diagonals included. Arrays that it
        closes over are constants.
    sweeps
        Smoothing sweeps of damped Jacobi before and after each correction.
    omega
        Damping of the smoother (dimensionless): 0.8 in two dimensions, 0.67 in one, 0.86 in three.
    coarsest
        Grids of at most so many points each way are solved directly.
    beyond
        What interpolation takes for values beyond the boundary: "zero" (Dirichlet) or "edge" (the nearest: Neumann).

    Notes
    -----
    An axis of 2m + 1 points is coarsened to m of them (points on the boundary are not unknowns), one of 2m points to m
    cells of two. Interpolation is linear and restriction its transpose, so that the cycle of a symmetric operator is
    symmetric. The adjoint solve uses the transposed cycle. Axes of 2^k - 1 points (or of 2^k cells) converge best.
    A singular operator (all Neumann) needs a regular one here: add a small multiple of v.

    Source: Briggs, Henson and McCormick, *A Multigrid Tutorial*, 2nd ed., SIAM 2000, Chapters 3 and 4,
    doi:10.1137/1.9780898719505.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from tapeless import solvers
    >>> def laplacian(v, level):
    ...     w = jnp.pad(v, 1)
    ...     around = w[2:, 1:-1] + w[:-2, 1:-1] + w[1:-1, 2:] + w[1:-1, :-2]
    ...     return (4 * v - around) / 4**level
    >>> method = solvers.CG(rtol=1e-3, preconditioner=solvers.multigrid(laplacian))
    >>> solution = solvers.linear_solve(lambda v: laplacian(v, 0), jnp.ones((63, 63)), method)
    >>> int(solution.stats["iterations"]) < 10
    True
    """
    if not callable(operator):
        message = f"`operator` must be a function operator(v, level), got {operator!r}."
        raise TypeError(message)
    if beyond not in ("zero", "edge"):
        message = f'`beyond` must be "zero" or "edge", got {beyond!r}.'
        raise ValueError(message)
    return Multigrid(operator, sweeps, omega, coarsest, beyond)


def _cycle(grids: Hierarchy, depth: int, r: Grid) -> Grid:
    """One V-cycle. Its transpose is that of transposed operators: R is Pᵀ up to a factor, smoothers are diagonal."""
    if depth == len(grids.levels) - 1:
        inverse = grids.inverse.T if grids.flipped else grids.inverse
        return (inverse @ r.ravel()).reshape(r.shape)
    level = grids.levels[depth]
    apply = level.transposed() if grids.flipped else level.apply
    x = level.weight * r
    for _ in range(grids.sweeps - 1):
        x = x + level.weight * (r - apply(x))
    coarse = _restricted(r - apply(x), grids.beyond)
    x = x + _interpolated(_cycle(grids, depth + 1, coarse), r.shape, grids.beyond)
    for _ in range(grids.sweeps):
        x = x + level.weight * (r - apply(x))
    return x


# Transfers are convolutions, which the compiler keeps apart: fused into the smoother's stencil, they would be computed
# anew for each of its points, on each grid for each point of the grid below (measured: ten times slower).


class _Transfer(NamedTuple):
    """Along one axis: weights of the mean, and of interpolation for each of the points that a coarse one stands for."""

    mean: tuple[float, ...]
    pad: int
    phases: tuple[tuple[float, ...], ...]
    stride: int = 2


_CELLS = _Transfer((1 / 8, 3 / 8, 3 / 8, 1 / 8), 1, ((1 / 4, 3 / 4, 0.0), (0.0, 3 / 4, 1 / 4)))
_POINTS = _Transfer((1 / 4, 1 / 2, 1 / 4), 0, ((1 / 2, 1 / 2), (0.0, 1.0)))
_SINGLE = _Transfer((1.0,), 0, ((1.0,),), 1)


def _transfers(shape: tuple[int, ...]) -> list[_Transfer]:
    return [_SINGLE if n == 1 else (_POINTS if n % 2 else _CELLS) for n in shape]


def _restricted(fine: Grid, beyond: str) -> Grid:
    """Weighted means: along each axis the transpose of linear interpolation, halved."""
    axes = _transfers(fine.shape)
    if beyond == "edge" and _POINTS in axes:
        shape = tuple(-(-n // a.stride) - (a is _POINTS) for n, a in zip(fine.shape, axes, strict=True))
        coarse = jax.ShapeDtypeStruct(shape, fine.dtype)
        transpose = jax.linear_transpose(lambda v: _interpolated(v, fine.shape, beyond), coarse)
        return transpose(fine)[0] / math.prod(a.stride for a in axes)
    kernel = jnp.asarray(functools.reduce(np.multiply.outer, [a.mean for a in axes]), fine.dtype)
    padded = _padded(fine, [a.pad for a in axes], beyond)
    return lax.conv_general_dilated(padded[None, None], kernel[None, None], [a.stride for a in axes], "VALID")[0, 0]


def _padded(v: Grid, widths: list[int], beyond: str) -> Grid:
    return jnp.pad(v, [(w, w) for w in widths], mode="edge" if beyond == "edge" else "constant")


def _interpolated(coarse: Grid, shape: tuple[int, ...], beyond: str) -> Grid:
    """Linear interpolation: one convolution for each position of a fine point among the coarse ones."""
    axes, d = _transfers(shape), len(shape)
    kernel = functools.reduce(np.multiply.outer, [np.asarray(a.phases) for a in axes])
    kernel = kernel.transpose([*range(0, 2 * d, 2), *range(1, 2 * d, 2)])
    counts, taps = kernel.shape[:d], kernel.shape[d:]
    kernel = jnp.asarray(kernel.reshape(-1, 1, *taps), coarse.dtype)
    padded = _padded(coarse, [int(a is not _SINGLE) for a in axes], beyond)
    phases = lax.conv_general_dilated(padded[None, None], kernel, [1] * d, "VALID")[0]
    lengths = phases.shape[1:]
    order = [axis for k in range(d) for axis in (d + k, k)]
    woven = phases.reshape(*counts, *lengths).transpose(order)
    woven = woven.reshape([c * n for c, n in zip(counts, lengths, strict=True)])
    return woven[tuple(slice(n) for n in shape)]


def _diagonal(apply: Callable[[Grid], Grid], like: Grid) -> Grid:
    """The diagonal of an operator that reaches one point: points three apart do not see each other."""
    colour = jnp.zeros(like.shape, jnp.int32)
    for axis, n in enumerate(like.shape):
        ramp = jnp.arange(n).reshape([-1 if k == axis else 1 for k in range(like.ndim)])
        colour = 3 * colour + ramp % 3

    def add(k: Any, diagonal: Grid) -> Grid:
        probe = (colour == k).astype(like.dtype)
        return diagonal + probe * apply(probe)

    return lax.fori_loop(0, 3**like.ndim, add, like)
