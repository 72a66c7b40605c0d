"""Factors of sparse matrices on the host, kept by the content of the matrix in a cache that is bounded in bytes."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ..adjoint._sparse import Pattern
from ._host import on_host

_BLOCKS = 64
_SAME = 1e-8  # a relative difference that no preconditioner notices
Key = tuple[Any, bytes]


class FactorStatistics(NamedTuple):
    """Counts since the start or the last `clear_factors()`, over all threads.

    `factorisations` that were made, `solves` with a factor (refinements included), `hits` (solves of `SparseLU` with a
    matrix whose factor was kept), `neighbours` (with the factor of a similar matrix), factors `kept` now and their size
    in `bytes`.
    """

    factorisations: int
    solves: int
    hits: int
    neighbours: int
    kept: int
    bytes: int


class _Entry(NamedTuple):
    factor: Any
    size: int
    sketch: np.ndarray


class FactorCache:
    """Factors by (group, content): the least recently used go first. Threads may share it."""

    def __init__(self, limit: int):
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._counts = {"factorisations": 0, "solves": 0, "hits": 0, "neighbours": 0}
        self._limit, self._size = limit, 0

    def find(self, key: Key) -> Any:
        """The factor of exactly this matrix, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.factor

    def nearest(self, group: Any, values: np.ndarray, within: float = np.inf) -> Key | None:
        """The key of the most similar matrix of a group, if it differs by at most `within` of its size; or None."""
        wanted = _sketch(values)

        def distance(key: Key) -> float:
            return float(np.max(np.abs(self._entries[key].sketch - wanted)))

        with self._lock:
            found = [key for key in reversed(self._entries) if key[0] == group]
            key = min(found, key=distance, default=None)  # of equals the most recently used
            return None if key is None or distance(key) > within * np.max(np.abs(wanted)) else key

    def keep(self, key: Key, values: np.ndarray, factor: Any, size: int) -> None:
        """Count a factorisation and keep it; the latest one stays whatever its size."""
        entry = _Entry(factor, size, _sketch(values))
        with self._lock:
            self._counts["factorisations"] += 1
            old = self._entries.pop(key, None)
            self._size += size - (0 if old is None else old.size)
            self._entries[key] = entry
            self._evict()

    def count(self, name: str, number: int = 1) -> None:
        """Count what was done with the factors."""
        with self._lock:
            self._counts[name] += number

    def bound(self, limit: int) -> None:
        """Change the bound in bytes."""
        with self._lock:
            self._limit = limit
            self._evict()

    def clear(self) -> None:
        """Forget all factors and counts."""
        with self._lock:
            self._entries.clear()
            self._size = 0
            self._counts = dict.fromkeys(self._counts, 0)

    def statistics(self) -> FactorStatistics:
        """The counts now."""
        with self._lock:
            return FactorStatistics(**self._counts, kept=len(self._entries), bytes=self._size)

    def _evict(self) -> None:
        while self._size > self._limit and len(self._entries) > 1:
            _, entry = self._entries.popitem(last=False)
            self._size -= entry.size


def _sketch(values: np.ndarray) -> np.ndarray:
    """A few sums in which every nonzero takes part, with signs that cancel no structure (rows of a Laplacian)."""
    if values.size == 0:
        return np.zeros(1)
    starts = np.unique(np.linspace(0, values.size, _BLOCKS, endpoint=False, dtype=np.int64))
    return np.add.reduceat(np.where(np.arange(values.size) * 7 % 5 < 2, -values, values), starts)


FACTORS = FactorCache(limit=10**9)


def content(values: np.ndarray) -> bytes:
    """What equal arrays have in common: a digest of dtype and numbers, 128 bits."""
    digest = hashlib.blake2b(values.dtype.str.encode(), digest_size=16)
    digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


class FactorMaker(NamedTuple):
    """How to make a factor of a matrix: `make(matrix)` has `solve(r, flipped=...)` and `nbytes`."""

    kind: Any
    pattern: Pattern
    make: Callable[[Any], Any]

    @property
    def group(self) -> Any:
        """What matrices of one structure and one purpose have in common."""
        return (*self.kind, self.pattern.digest)

    def kept(self, values: np.ndarray, key: bytes) -> Any:
        """The factor from the cache, or a new one."""
        place = self.group, key
        factor = FACTORS.find(place)
        if factor is None:
            values = values.astype(np.result_type(values, np.float64))
            factor = self.make(self.pattern.matrix(values))
            FACTORS.keep(place, values, factor, factor.nbytes)
        return factor


def on_kept_factor(maker: FactorMaker, values: jax.Array, *, flipped: bool) -> Callable[[Any], Any]:
    """The function `v -> M v`, or `v -> Mᵀ v` if `flipped`, of a factor that is made before the first call."""

    def prepared(values: np.ndarray) -> np.ndarray:
        key = content(values)
        if np.all(np.isfinite(values)):
            # The adjoint's products give the same matrix but for rounding: one factor serves both.
            similar = FACTORS.nearest(maker.group, values, within=_SAME)
            key = key if similar is None else similar[1]
            maker.kept(values, key)
        return np.frombuffer(key, np.uint32)

    def applied(key: np.ndarray, values: np.ndarray, r: np.ndarray) -> np.ndarray:
        if not (np.all(np.isfinite(values)) and np.all(np.isfinite(r))):
            return np.full_like(r, np.nan)
        # The values come along in case that the factor has been forgotten meanwhile.
        factor = maker.kept(values, key.tobytes())
        FACTORS.count("solves")
        return factor.solve(r.astype(np.result_type(r, values, np.float64)), flipped=flipped).astype(r.dtype)

    key = on_host(prepared, jnp.zeros(4, jnp.uint32), values)

    def apply(v: Any) -> Any:
        flat, unravel = ravel_pytree(v)
        return unravel(on_host(applied, flat, key, values, flat))

    return apply


def factor_statistics() -> FactorStatistics:
    """How often `SparseLU`, `ilu` and `amg` factorised a matrix, and how often a kept factor served.

    Choose it to see whether a run reuses its factors. The numbers are those of the whole process. Calls of the host run
    asynchronously: `jax.block_until_ready` the results first.

    Examples
    --------
    >>> from tapeless import solvers
    >>> solvers.clear_factors()
    >>> solvers.factor_statistics()
    FactorStatistics(factorisations=0, solves=0, hits=0, neighbours=0, kept=0, bytes=0)
    """
    return FACTORS.statistics()


def limit_factors(size: int) -> None:
    """Bound the memory of kept factors to `size` bytes (10⁹ at the start).

    The least recently used factors are forgotten first; the latest one is kept whatever its size. Results do not depend
    on it, but time does: without a kept factor an adjoint solve factorises anew.

    Raises
    ------
    ValueError
        `size` is no number of bytes.

    Examples
    --------
    >>> from tapeless import solvers
    >>> solvers.limit_factors(2 * 10**9)
    >>> solvers.limit_factors(10**9)
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        message = f"`size` must be a number of bytes (an integer of at least 0, e.g. 2 * 10**9), got {size!r}."
        raise ValueError(message)
    FACTORS.bound(size)


def clear_factors() -> None:
    """Forget all kept factors, and set the counts of `factor_statistics()` to zero.

    Examples
    --------
    >>> from tapeless import solvers
    >>> solvers.clear_factors()
    >>> solvers.factor_statistics().kept
    0
    """
    FACTORS.clear()
