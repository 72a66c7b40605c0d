"""Sparse Jacobians: where the nonzeros are, found once from the equations, and their values from a few products.

Columns that share no row have one colour, and one product finds all of them. The pattern and its colours depend on
the equations alone, never on numbers, so that they are static while a program is traced.
"""

import functools
import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import lax
from jax.core import Tracer
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Inexact

from ._fold import evaluate_folded
from ._loops import vary_together
from ._trace import known_value

_KEEP = 64  # patterns
_DENSE_FROM = 1000  # unknowns from which on a pattern that is a quarter full is refused
_LARGEST = 3e7  # nonzeros
_SAMPLE = 8  # columns
# Stencils of shifts and sums are never dense; what else there is may be.
_MIXING = ("gather", "scatter", "dynamic", "reduce", "cum", "dot", "while", "scan", "cond", "sort", "top_k", "lu", "qr")
_MIXING = (*_MIXING, "cholesky", "svd", "eig", "triangular", "pure_callback", "custom", "unvmap", "nonbatchable")
_AT_ONCE = 2**23  # numbers in the products that are found at the same time
_FOUND: OrderedDict[Any, tuple["Pattern", Any]] = OrderedDict()
_LOCK = threading.Lock()


def _asdex() -> Any:
    """The package that detects and colours, with its compiler behind it: loaded when it is needed first."""
    import asdex

    return asdex


class Pattern:
    """Where a square matrix may have nonzeros: `rows` and `cols`, row by row. Compared and hashed by content."""

    def __init__(self, rows: Any, cols: Any, size: int):
        places = np.unique(np.asarray(rows, np.int64) * size + np.asarray(cols, np.int64))
        self.rows, self.cols = (places // max(size, 1)).astype(np.int32), (places % max(size, 1)).astype(np.int32)
        self.size, self.count = size, places.size
        self.digest = hashlib.blake2b(places.tobytes() + str(size).encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Pattern({self.count} nonzeros of a {self.size} x {self.size} matrix)"

    @functools.cached_property
    def row_ends(self) -> np.ndarray:
        """Where each row begins and ends among the nonzeros, as SciPy's CSR format wants it."""
        return np.searchsorted(self.rows, np.arange(self.size + 1)).astype(np.int32)

    @functools.cached_property
    def colours(self) -> np.ndarray:
        """A colour of each column; columns of one colour share no row."""
        asdex = _asdex()
        found = asdex.SparsityPattern.from_coo(self.rows, self.cols, (self.size, self.size))
        return np.maximum(np.asarray(asdex.color_cols(found)[0], np.int32), 0)

    @functools.cached_property
    def transposed(self) -> "Pattern":
        """The pattern of the transposed matrix."""
        return Pattern(self.cols, self.rows, self.size)

    @functools.cached_property
    def from_transposed(self) -> np.ndarray:
        """Where each nonzero stands among those of the transposed pattern."""
        places = np.empty(self.count, np.int32)
        places[np.lexsort((self.rows, self.cols))] = np.arange(self.count, dtype=np.int32)
        return places

    @functools.cached_property
    def symmetric(self) -> bool:
        """Whether the structure (not the values) is symmetric."""
        return self == self.transposed

    def matrix(self, values: np.ndarray) -> scipy.sparse.csr_array:
        """The matrix with these nonzeros."""
        return scipy.sparse.csr_array((values, self.cols, self.row_ends), shape=(self.size, self.size))


def as_pattern(given: Any) -> Pattern | None:
    """What a user gave as the structure of a matrix: `BCOO`, SciPy's sparse formats or a dense array."""
    if given is None or isinstance(given, Pattern):
        return given
    if isinstance(given, BCOO):
        found = pattern_of_matrix(given)
        if found is not None:
            return found
        message = "`pattern` must be known while the program is traced, got a traced BCOO. Make it outside of jax.jit."
        raise ValueError(message)
    if not (scipy.sparse.issparse(given) or isinstance(given, np.ndarray)):
        message = (
            "`pattern` must be a matrix with the structure of the operator: a BCOO, a SciPy sparse matrix or a NumPy "
            f"array, got {type(given).__name__}."
        )
        raise TypeError(message)
    coo: Any = scipy.sparse.coo_array(given)
    if coo.ndim != 2 or coo.shape[0] != coo.shape[1]:
        message = f"`pattern` must be a square matrix, got shape {coo.shape}."
        raise ValueError(message)
    return Pattern(coo.row, coo.col, coo.shape[0])


def pattern_of_matrix(matrix: Any) -> Pattern | None:
    """The structure of a dense matrix or `BCOO` if it is known while tracing, else None."""
    sparse = isinstance(matrix, BCOO)
    known = known_value(matrix.indices if sparse else matrix)
    if known is None:
        return None
    size = matrix.shape[0]
    if sparse:
        i, j = np.asarray(known).T
        inside = (i < size) & (j < size)  # BCOO pads with indices beyond the end
        return Pattern(i[inside], j[inside], size)
    i, j = np.nonzero(np.asarray(known))
    return Pattern(i, j, size)


def detect_pattern(f: Callable[[Any], Any], like: Any) -> Pattern:
    """The pattern of the Jacobian of `f` at pytrees like `like`, from its equations; no number is looked at.

    Integers that `f` closes over (the connectivity of a mesh) are part of its structure if they are known while
    tracing. The pattern is kept: functions with the same equations find it again.
    """
    closed, out = jax.make_jaxpr(f, return_shape=True)(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    )
    size = sum(x.size for x in jax.tree.leaves(like))
    if sum(x.size for x in jax.tree.leaves(out)) != size:
        message = f"a Jacobian to be solved with must be square, got {size} unknowns and values {out}."
        raise ValueError(message)
    indices = [i for i, x in enumerate(closed.consts) if _is_structure(x)]
    known = [np.asarray(closed.consts[i]) for i in indices]
    inner = tuple(id(const) for each in _inner(closed.jaxpr) for const in each.consts)
    key = str(closed.jaxpr), tuple(indices), tuple(map(_digest, known)), inner
    with _LOCK:
        if key in _FOUND:
            _FOUND.move_to_end(key)
            return _FOUND[key][0]
    pattern = _detected(closed, dict(zip(indices, known, strict=True)), size)
    with _LOCK:
        # Kept with its equations: what the key tells by identity must not be freed.
        _FOUND[key] = pattern, closed.jaxpr
        if len(_FOUND) > _KEEP:
            _FOUND.popitem(last=False)
    return pattern


def _is_structure(x: Any) -> bool:
    exact = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    return exact and not isinstance(x, Tracer)


def _digest(x: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()


def _inner(jaxpr: jex.Jaxpr) -> Iterator[jex.ClosedJaxpr]:
    """The jaxprs of loops, branches and calls, at any depth."""
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, jex.ClosedJaxpr | jex.Jaxpr):
                    closed = inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())
                    yield closed
                    yield from _inner(closed.jaxpr)


def _may_mix(jaxpr: jex.Jaxpr) -> bool:
    """Whether any equation may read all of an array for each of its results."""
    every = (jaxpr, *(closed.jaxpr for closed in _inner(jaxpr)))
    names = {eqn.primitive.name for each in every for eqn in each.eqns}
    return any(name.startswith(_MIXING) for name in names)


def _detected(closed: jex.ClosedJaxpr, structure: dict[int, np.ndarray], size: int) -> Pattern:
    if size == 0:
        return Pattern([], [], 0)
    free = [i for i in range(len(closed.consts)) if i not in structure]

    def f(unknowns: list[Any], numbers: list[Any]) -> list[Any]:
        values = structure | dict(zip(free, numbers, strict=True))
        return evaluate_folded(closed.jaxpr, [values[i] for i in range(len(closed.consts))], unknowns)

    try:
        unknowns = [_blank(v.aval) for v in closed.jaxpr.invars]
        numbers = [_blank(closed.jaxpr.constvars[i].aval) for i in free]
        with jax.ensure_compile_time_eval():
            if size >= _DENSE_FROM and _may_mix(closed.jaxpr):
                _refuse_dense(f, unknowns, numbers, size)
            found = _asdex().jacobian_sparsity(f, unknowns, numbers, argnums=0)
    except _DenseError:
        raise
    except Exception as error:
        message = (
            "The sparsity of the Jacobian could not be found from its equations "
            f"({type(error).__name__}: {_first_line(error)}). {_WAYS_ROUND}"
        )
        raise ValueError(message) from error
    return Pattern(found.rows, found.cols, size)


class _DenseError(ValueError):
    """A pattern that is too full to be worked with."""


def _refuse_dense(f: Callable[..., Any], unknowns: list[Any], numbers: list[Any], size: int) -> None:
    """Look at a few columns first: the sets of a dense pattern of many unknowns would fill the memory."""
    chosen = np.sort(np.random.default_rng(0).choice(size, _SAMPLE, replace=False))
    ends = np.cumsum([0, *(u.size for u in unknowns)])
    places = [chosen[(chosen >= a) & (chosen < b)] - a for a, b in itertools.pairwise(ends)]

    def of_few(few: list[Any], unknowns: list[Any], numbers: list[Any]) -> list[Any]:
        moved = [
            u.ravel().at[i].set(x).reshape(u.shape) if i.size else u
            for u, i, x in zip(unknowns, places, few, strict=True)
        ]
        return f(moved, numbers)

    few = [np.zeros(i.size, u.dtype) for u, i in zip(unknowns, places, strict=True)]
    in_column = _asdex().jacobian_sparsity(of_few, few, unknowns, numbers, argnums=0).nnz / _SAMPLE
    if in_column > size / 4 or in_column * size > _LARGEST:
        message = (
            f"The Jacobian looks dense: about {in_column:.0f} of the {size} entries in each column may be nonzero. If "
            f"it is sparse, its equations read the unknowns at indices that are not known while tracing. {_WAYS_ROUND}"
        )
        raise _DenseError(message)


def _blank(aval: Any) -> np.ndarray:
    """An array of the right shape that takes no memory: asdex looks at shapes only."""
    return np.broadcast_to(np.zeros((), aval.dtype), aval.shape)


_WAYS_ROUND = (
    "Give the structure as `pattern=` (a BCOO or SciPy sparse matrix), close over integer index arrays as NumPy arrays "
    "(in `params` they are traced), or use `LU()` for a small system and `GMRES()` for a large one."
)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def nonzeros(matvec: Callable[[Any], Any], pattern: Pattern, like: Any) -> Inexact[Array, " nonzeros"]:
    """The nonzeros of a linear operator on pytrees like `like`, in the order of its pattern."""
    flat, unravel = ravel_pytree(like)
    if pattern.size != flat.size:
        message = f"`pattern` does not fit the unknowns. Expected {flat.size} rows, got {pattern.size}."
        raise ValueError(message)
    if pattern.count == 0:
        return jnp.zeros(0, flat.dtype)
    colours = jnp.asarray(pattern.colours)
    count = int(pattern.colours.max()) + 1

    def product(colour: jax.Array) -> jax.Array:
        seed, _ = vary_together(((colours == colour).astype(flat.dtype), flat))
        return ravel_pytree(matvec(unravel(seed)))[0].astype(flat.dtype)

    together = max(1, _AT_ONCE // flat.size)
    every = jnp.arange(count, dtype=colours.dtype)
    products = jax.vmap(product)(every) if count <= together else lax.map(product, every, batch_size=together)
    return products[pattern.colours[pattern.cols], pattern.rows]
