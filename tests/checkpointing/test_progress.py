"""Progress bars of compiled loops: forward and reverse, to the end, and free where they are off."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from tapeless import checkpointing
from tapeless.checkpointing import Disk, _progress

N = 230
U = jnp.array([0.5, -0.3])
XS = jnp.linspace(0.1, 0.8, N)


class Recorder:
    """In the place of `tqdm`: all bars that were made, with the numbers they showed."""

    made: tuple["Recorder", ...] = ()

    def __init__(self, desc: str, total: int | None, unit: str):
        assert unit == "step"
        self.desc, self.total, self.n, self.shown, self.closed = desc, total, 0, [], False
        Recorder.made += (self,)

    def update(self, by: int) -> None:
        assert not self.closed
        assert by >= 0
        self.n += by
        self.shown.append(self.n)

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "tqdm", Recorder)
    monkeypatch.setattr(Recorder, "made", ())


def bars() -> list[tuple[str, int, int | None]]:
    """What was shown since the last call: description, last number and total of each bar."""
    jax.effects_barrier()
    made, Recorder.made = Recorder.made, ()
    assert all(bar.closed for bar in made)
    assert all(len(bar.shown) <= 2 * _progress._TICKS for bar in made if bar.total)
    return [(bar.desc, bar.n, bar.total) for bar in made]


FORWARD, REVERSE = ("forward", N, N), ("reverse", N, N)


def step(u: Any, x: Any) -> Any:
    return u - 0.01 * x * jnp.sin(u) ** 2, u * x


def final(u: Any, checkpoint: Any, progress: Any = True, xs: Any = XS) -> Any:
    options = {} if progress is None else {"progress": progress}
    carry, ys = checkpointing.scan(step, u, xs, checkpoint=checkpoint, **options)
    return jnp.sum(carry * jnp.array([1.0, 2.0])) + jnp.sum(ys**2)


@functools.cache
def gradient(checkpoint: Any, progress: bool) -> Any:
    return jax.jit(jax.value_and_grad(functools.partial(final, checkpoint=checkpoint, progress=progress)))


def identical(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


SCHEDULES = {
    "snapshots": (3, [FORWARD, REVERSE]),
    "leaf": (checkpointing.binomial(N, 3, leaf=7), [FORWARD, REVERSE]),
    "store_all": (checkpointing.store_all(N), [FORWARD]),
    "nothing said": (None, [FORWARD]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_bars_of_a_compiled_gradient(name: str) -> None:
    """Assert a bar to the end for each sweep, new ones in a second call, and the same bits as without them."""
    checkpoint, expected = SCHEDULES[name]
    got = gradient(checkpoint, progress=True)(U)
    assert bars() == expected
    gradient(checkpoint, progress=True)(2 * U)
    assert bars() == expected
    assert identical(got, gradient(checkpoint, progress=False)(U))
    assert bars() == []


@pytest.mark.parametrize("name", ["snapshots", "store_all"])
def test_bars_under_vmap(name: str) -> None:
    """Assert one bar a sweep for all lanes, whether the state or the inputs are batched."""
    checkpoint, expected = SCHEDULES[name]
    lanes = jnp.stack([U, 2 * U, U - 1])
    got = jax.jit(jax.vmap(gradient(checkpoint, progress=True)))(lanes)
    assert bars() == expected
    assert identical(got, jax.jit(jax.vmap(gradient(checkpoint, progress=False)))(lanes))
    jax.jit(jax.vmap(lambda xs: final(U, checkpoint, xs=xs)))(jnp.stack([XS, 2 * XS]))
    assert bars() == [FORWARD]


def test_bars_of_other_modes() -> None:
    """Assert a forward bar for a value, and two for a tangent: the state alone, then with its tangent."""
    f = jax.jit(functools.partial(final, checkpoint=3))
    f(U)
    assert bars() == [FORWARD]
    jax.jvp(f, (U,), (U,))
    assert bars() == [FORWARD] * 2


def test_short_loops() -> None:
    """Assert bars for one step, and none for a loop of none."""
    f = jax.jit(jax.grad(final), static_argnums=1)
    f(U, 2, xs=XS[:1])
    assert bars() == [("forward", 1, 1), ("reverse", 1, 1)]
    f(U, 2, xs=XS[:0])
    assert bars() == []


def test_bars_of_a_run_on_disk(tmp_path: Path) -> None:
    """Assert both bars with snapshots on disk, again if pulled back again, and the same bits as without them."""
    level = Disk(tmp_path, snapshots=3, write_cost=1, read_cost=1)
    assert level.schedule(N, 16).disk_writes > 5
    got, pull = jax.vjp(functools.partial(final, checkpoint=level), U)
    assert bars() == [FORWARD]
    first = pull(1.0)
    assert bars() == [REVERSE]
    assert identical(pull(1.0), first)
    assert bars() == [FORWARD, REVERSE]
    assert identical((got, *first), jax.value_and_grad(functools.partial(final, checkpoint=level, progress=False))(U))
    final(U, level)
    assert bars() == [FORWARD]


# Loops of unknown length


def cooled(u: Any, limit: Any, checkpoint: Any, progress: bool) -> Any:
    def body(state: Any) -> Any:
        i, u = state
        return i + 1, u - 0.01 * jnp.sin(u) ** 2

    end = checkpointing.while_loop(
        lambda state: state[0] < limit, body, (0, u), checkpoint=checkpoint, progress=progress
    )
    return jnp.sum(end[1] * jnp.array([1.0, 2.0]))


@functools.cache
def cooling(checkpoint: Any, progress: bool) -> Any:
    return jax.jit(jax.value_and_grad(functools.partial(cooled, checkpoint=checkpoint, progress=progress)))


def ends(n: int) -> list[Any]:
    return [("forward", n, None), ("reverse", n, None)]


@pytest.mark.parametrize("checkpoint", [1, 3, None, checkpointing.online(3, leaf=5)], ids=str)
def test_bars_of_a_while_loop(checkpoint: Any) -> None:
    """Assert bars of no total that end at the number of steps, each call with its own, and the same bits."""
    got = cooling(checkpoint, progress=True)(U, N)
    assert bars() == ends(N)
    for n in (1, 63, 64, 131):
        cooling(checkpoint, progress=True)(U, n)
        assert bars() == ends(n)
    assert identical(got, cooling(checkpoint, progress=False)(U, N))
    assert bars() == []
    value = jax.jit(functools.partial(cooled, checkpoint=checkpoint, progress=True))
    value(U, N)
    assert bars() == ends(N)[:1]


def test_bars_of_a_while_loop_under_vmap() -> None:
    """Assert one bar a sweep, to the end of the longest lane."""
    lanes, limits = jnp.stack([U, 2 * U, U - 1]), jnp.array([131, N, 7])
    jax.jit(jax.vmap(cooling(3, progress=True), (0, None)))(lanes, N)
    assert bars() == ends(N)
    got = jax.jit(jax.vmap(cooling(3, progress=True)))(lanes, limits)
    assert bars() == ends(N)
    assert identical(got, jax.jit(jax.vmap(cooling(3, progress=False)))(lanes, limits))


def test_bar_of_the_value_of_a_while_loop_under_vmap() -> None:
    """Assert one bar to the end of the longest lane where no gradient is taken, too."""
    # Found at fault on 32c66bd: the counter is batched there, so each lane moves the bar at every step, to and fro
    # between the lanes' own numbers: a hundred bars and more. (`_run_while` of `_rollout.py`, without `keep`.)
    lanes, limits = jnp.stack([U, 2 * U, U - 1]), jnp.array([131, N, 7])
    jax.jit(jax.vmap(functools.partial(cooled, checkpoint=3, progress=True)))(lanes, limits)
    assert bars() == ends(N)[:1]


# What is seen, and what is not


def test_what_a_terminal_shows(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Assert both bars of `tqdm` itself on stderr, at their ends; and no word without `progress`."""
    monkeypatch.undo()
    for checkpoint, progress in ((3, False), (3, True)):
        capfd.readouterr()
        jax.block_until_ready(gradient(checkpoint, progress)(U))
        jax.effects_barrier()
        shown = capfd.readouterr()
        assert shown.out == ""
        found = {name: re.findall(rf"{name}: 100%[^\r\n]*\| {N}/{N} \[", shown.err) for name in ("forward", "reverse")}
        assert all(map(len, found.values())) if progress else shown.err == ""
    cooling(3, progress=True)(U, N)
    jax.effects_barrier()
    shown = capfd.readouterr().err
    assert all(re.search(rf"{name}: {N}step \[", shown) for name in ("forward", "reverse"))


@pytest.mark.parametrize("checkpoint", [3, None])
def test_without_progress_there_is_no_callback(checkpoint: Any) -> None:
    """Assert no callback in the gradient's jaxpr unless it is asked for."""

    def callbacks(f: Any) -> list[Any]:
        return [e for e in equations(jax.make_jaxpr(jax.grad(f))(U)) if "callback" in e.primitive.name]

    assert callbacks(functools.partial(final, checkpoint=checkpoint, progress=None)) == []
    assert callbacks(functools.partial(final, checkpoint=checkpoint, progress=False)) == []
    assert callbacks(functools.partial(final, checkpoint=checkpoint, progress=True)) != []
    assert callbacks(lambda u: cooled(u, N, checkpoint, progress=False)) == []
    assert callbacks(lambda u: cooled(u, N, checkpoint, progress=True)) != []
