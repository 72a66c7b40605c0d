"""A progress bar that a compiled loop moves."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from tqdm import tqdm

_TICKS = 100  # how often a bar of known length moves
_EVERY = 64  # steps between two moves of a bar of unknown length


class Bar:
    """A `tqdm` bar on the host. One that starts again from nothing begins anew."""

    def __init__(self, description: str, total: int | None):
        self._description, self._total = description, total
        self._bar: Any = None
        self._lock = threading.Lock()

    def move(self, done: Any, last: Any) -> None:
        """Show that `done` steps are done; close after the last."""
        done = int(done)
        with self._lock:
            if self._bar is not None and done < self._bar.n:
                self._close()
            if self._bar is None:
                self._bar = tqdm(desc=self._description, total=self._total, unit="step")
            self._bar.update(done - self._bar.n)
            if bool(last):
                self._close()

    def _close(self) -> None:
        self._bar.close()
        self._bar = None


def bars(total: int | None) -> tuple[Bar, Bar]:
    """The bars of a forward and of a reverse sweep."""
    return Bar("forward", total), Bar("reverse", total)


def moving(bar: Bar | None, before: Any, done: Any, total: Any = None) -> None:
    """Move a bar from inside a compiled loop that went from `before` to `done` of `total` steps, now and then."""
    if bar is None:
        return
    every = _EVERY if total is None else jnp.maximum(jnp.asarray(total) // _TICKS, 1)
    last = jnp.asarray(False if total is None else done == total)
    move = (before // every != done // every) | last
    lax.cond(move, lambda: jax.debug.callback(bar.move, done, last), lambda: None)


def ended(bar: Bar | None, done: Any) -> None:
    """Close the bar of a loop of unknown length."""
    if bar is not None:
        jax.debug.callback(bar.move, done, True)
