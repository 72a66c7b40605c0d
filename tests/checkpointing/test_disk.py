"""Gradients with snapshots on disk: those in memory bit for bit, the accesses promised, and nothing left behind."""

import csv
import functools
import gc
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, max_error
from jax import lax
from tapeless import checkpointing
from tapeless.checkpointing import Disk, SnapshotError, _host_sweep
from tapeless.checkpointing._snapshot_files import SnapshotFiles

HERE = Path(__file__).parent
W = jnp.array([[0.5, -0.3, 0.1], [0.2, 0.4, -0.6], [0.7, 0.1, 0.3]])
U = jnp.array([0.5, -0.3])
XS = jnp.linspace(0.1, 0.8, 40)


class Fuse(Counter):
    """Counts evaluations of the step, and fails at one of them."""

    at = 0

    def _run(self) -> None:
        super()._run()
        if self.runs == self.at:
            raise RuntimeError("the fuse has blown")


FUSE = Fuse()


def step(u: Any, x: Any) -> Any:
    """The step of all tests but the first: one function, so that its segments are compiled once."""
    FUSE.tick()
    return u - 0.01 * x * jnp.sin(u) ** 2, u[:1] * x


def final(u: Any, checkpoint: Any, xs: Any = XS, **options: Any) -> Any:
    carry, ys = checkpointing.scan(step, u, xs, checkpoint=checkpoint, **options)
    return jnp.sum(carry * jnp.array([1.0, 2.0])) + jnp.sum(ys**2)


def cheap(folder: Any) -> Disk:
    """Three states in memory, a disk that is worth its cost: for 40 steps 8 writes and 8 reads."""
    return Disk(folder, snapshots=3, write_cost=0.5, read_cost=0.5)


@functools.cache
def in_memory() -> Any:
    return jax.grad(final)(U, 3)


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def identical(a: Any, b: Any) -> bool:
    """The same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return all((x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()) for x, y in pairs)


@pytest.fixture(autouse=True)
def _counted_from_zero() -> None:
    FUSE.settle()


@pytest.fixture
def accesses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Slots and steps of all writes and reads."""
    seen: dict[str, list[tuple[int, int]]] = {"write": [], "read": []}
    for name, calls in seen.items():
        original = getattr(SnapshotFiles, name)

        def spy(files: Any, slot: int, step: int, *arrays: Any, calls: Any = calls, original: Any = original) -> Any:
            calls.append((slot, step))
            return original(files, slot, step, *arrays)

        monkeypatch.setattr(SnapshotFiles, name, spy)
    return seen


# The gradient


def loss(scan: Any, theta: Any, u: Any, xs: Any, **options: Any) -> Any:
    """A loop with everything: a pytree with an integer and a key, inputs, outputs, a closure."""

    def step(carry: Any, x: Any) -> Any:
        u, count, key = carry["u"], carry["count"], carry["key"]
        key, mine = jax.random.split(key)
        u = 0.9 * jnp.tanh(theta @ u + W[0]) + x["a"] * jnp.sin(u + 0.01 * count) + 0.01 * jax.random.uniform(mine)
        return {"u": u, "count": count + x["i"], "key": key}, (u[:2] * x["a"], count)

    init = {"u": u, "count": jnp.int32(1), "key": jax.random.key(0, impl="unsafe_rbg")}  # cheap to compile
    n = xs.shape[0]
    carry, (ys, counts) = scan(step, init, {"a": xs, "i": jnp.arange(n, dtype=jnp.int32)}, n, **options)
    return jnp.sum(carry["u"] ** 2) + jnp.sum(ys * jnp.cos(counts + jnp.arange(n))[:, None])


@pytest.mark.parametrize(
    ("snapshots", "disk", "leaf", "costs", "reverse", "writes"),
    [(3, 4, 1, (2, 2), True, 10), (2, None, 7, (0.5, 0.5), False, 12)],
)
def test_gradients_are_those_in_memory(
    tmp_path: Path, snapshots: int, disk: Any, leaf: int, costs: Any, reverse: bool, writes: int
) -> None:
    """Assert value and gradients by closure, state and inputs: those in memory, whatever goes to disk."""
    args = (W, jnp.array([0.3, -0.2, 0.5]), jnp.linspace(0.1, 0.8, 100))
    level = Disk(tmp_path, snapshots, disk, leaf, *costs)
    assert level.schedule(100, 40).disk_writes == writes

    def gradient(checkpoint: Any) -> Any:
        f = functools.partial(loss, checkpointing.scan, reverse=reverse, checkpoint=checkpoint)
        return jax.value_and_grad(f, (0, 1, 2))(*args)

    got = gradient(level)
    assert identical(got, gradient(checkpointing.binomial(100, snapshots, leaf=leaf)))
    assert identical(got, gradient(Disk(tmp_path, snapshots, 1, leaf, *costs)))
    assert identical(got[0], loss(lax.scan, *args, reverse=reverse))
    assert tree(tmp_path) == set()


@functools.cache
def both_in_memory(n: int, snapshots: int, reverse: bool = False) -> Any:
    return jax.grad(functools.partial(final, reverse=reverse), (0, 2))(U, snapshots, XS[:n])


@pytest.mark.parametrize(("n", "snapshots"), [(1, 1), (2, 1), (2, 5)])
def test_short_loops(tmp_path: Path, accesses: Any, n: int, snapshots: int) -> None:
    """Assert the same of loops that are hardly worth a snapshot, from last to first."""
    level = Disk(tmp_path, snapshots, write_cost=0, read_cost=0)
    got = jax.grad(functools.partial(final, reverse=True), (0, 2))(U, level, XS[:n])
    assert identical(got, both_in_memory(n, snapshots, reverse=True))
    assert accesses["write"] == []  # one evaluation, the whole of (2, 1), is no more than the one up to a split
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("disk", [0, 1, 5, None])
@pytest.mark.parametrize("costs", [(0, 0), (0, 2), (4, 0.5)], ids=str)
def test_no_disk_and_no_cost_changes_a_bit(tmp_path: Path, accesses: Any, disk: Any, costs: Any) -> None:
    """Assert the gradient with respect to state and inputs, and never more slots than are given."""
    got = jax.grad(final, (0, 2))(U, Disk(tmp_path, 3, disk, 1, *costs), XS)
    assert identical(got, both_in_memory(40, 3))
    assert len({slot for slot, _ in accesses["write"]}) <= (40 if disk is None else disk)


def test_leaves_of_every_kind(tmp_path: Path, accesses: Any) -> None:
    """Assert the same for flags, complex numbers, low precision, keys of two kinds, and leaves of no size."""
    rest = {
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(3), 2),
        "other": jax.random.key(4, impl="rbg"),
        "low": jnp.bfloat16(0.3),
    }

    def step(carry: Any, key: Any) -> Any:
        z, u, rest = carry
        z = z * (1 + 0.1j) + jnp.where(rest["flags"][0], 0.1, -0.2) * u.astype(float)
        u = u * jnp.float32(0.9) + jnp.float32(rest["low"])
        keys = jnp.stack([rest["keys"][1], key])
        changed = {"flags": ~rest["flags"], "keys": keys, "low": rest["low"] * 1.01}
        return (z, u, rest | changed), rest["keys"]

    def f(z: Any, u: Any, checkpoint: Any) -> Any:
        xs = jax.random.split(jax.random.key(5), 12)
        (z, u, end), keys = checkpointing.scan(step, (z, u, rest), xs, checkpoint=checkpoint)
        numbers = {name: jax.random.key_data(x) if name in ("keys", "other") else x for name, x in end.items()}
        return jnp.abs(z) ** 2 + u, (z, u, numbers, jax.random.key_data(keys))

    gradient = jax.value_and_grad(f, (0, 1), has_aux=True)
    args = jnp.complex128(0.4 - 0.7j), jnp.float32(0.6)
    level = Disk(tmp_path, snapshots=1, write_cost=0.1, read_cost=0.1)
    assert identical(gradient(*args, level), gradient(*args, 1))
    assert len(accesses["read"]) > 5
    assert tree(tmp_path) == set()


def test_costs_are_measured_if_none_are_given(tmp_path: Path) -> None:
    """Assert the gradient, of a run in a folder that is made for it; a loop of no steps is the identity."""
    level = Disk(tmp_path / "made", snapshots=3)
    assert identical(jax.grad(final)(U, level), in_memory())
    assert identical(jax.grad(final)(U, level, XS[:0]), jnp.array([1.0, 2.0]))
    assert tree(tmp_path) == {"made"}


# What it takes

TABLE = list(csv.DictReader((HERE / "multistage_table.csv").read_text().splitlines()))
NAMES = ("n", "ram_slots", "disk_slots", "write_cost", "read_cost")
ROWS = [(*(int(row[name]) for name in NAMES[:3]), *(float(row[name]) for name in NAMES[3:])) for row in TABLE]
COUNTS = [tuple(int(row[f"hrevolve_{name}"]) for name in ("advances", "disk_writes", "disk_reads")) for row in TABLE]
FEW = [(*row, 1, counts) for row, counts in zip(ROWS, COUNTS, strict=True) if row[:2] in {(7, 2), (20, 2)}]


@pytest.mark.parametrize(
    ("n", "snapshots", "disk", "write", "read", "leaf", "counts"),
    [*FEW, (20, 2, 3, 0.5, 0.5, 4, None), (7, 1, 3, 0.5, 0.5, 9, (0, 0, 0))],
)
def test_evaluations_and_accesses(
    tmp_path: Path, accesses: Any, n: int, snapshots: int, disk: int, write: Any, read: Any, leaf: int, counts: Any
) -> None:
    """Assert the evaluations, writes and reads of the schedule and of the table: none of a disk that is too slow."""
    level = Disk(tmp_path, snapshots, disk, leaf, write, read)
    schedule = level.schedule(n, 16)
    promised = schedule.advances, schedule.disk_writes, schedule.disk_reads
    assert counts in (None, promised)
    jax.block_until_ready(jax.value_and_grad(final)(U, level, XS[:n]))
    assert FUSE.settle() == n + schedule.advances + min(leaf, n)
    assert (len(accesses["write"]), len(accesses["read"])) == promised[1:]


def test_a_slow_disk_is_not_used_and_a_fast_one_is(tmp_path: Path, accesses: Any) -> None:
    """Assert accesses by cost alone, and that each is that of the step and slot the schedule says."""
    assert identical(jax.grad(final)(U, Disk(tmp_path, 3, write_cost=1e4, read_cost=1e4)), in_memory())
    assert accesses == {"write": [], "read": []}
    assert identical(jax.grad(final)(U, cheap(tmp_path)), in_memory())
    schedule = list(cheap(tmp_path).schedule(40, 16))
    for name, kind in (("write", checkpointing.Store), ("read", checkpointing.Restore)):
        assert accesses[name] == [(a.slot, a.step) for a in schedule if isinstance(a, kind) and a.level == 1]
        assert len(accesses[name]) == 8


# Ends of a run


def test_a_pullback_can_be_repeated(tmp_path: Path) -> None:
    """Assert three pullbacks of one run, each with the right answer, and an empty folder after each."""
    value, pull = jax.vjp(lambda u: final(u, cheap(tmp_path)), U)
    assert len(tree(tmp_path)) == 2 + 8
    assert identical(value, final(U, 3))
    for factor in (1.0, 1.0, 2.0):
        assert identical(pull(factor), (factor * in_memory(),))
        assert tree(tmp_path) == set()


def test_a_pullback_that_never_comes(tmp_path: Path) -> None:
    """Assert that snapshots are removed with the pullback, of two runs only those of the one that is dropped."""
    _, pull = jax.vjp(lambda u: final(u, cheap(tmp_path)), U)
    other = jax.vjp(lambda u: final(u, cheap(tmp_path)), 2 * U)[1]
    assert len(tree(tmp_path)) == 2 * (2 + 8)
    del other
    gc.collect()
    assert len(tree(tmp_path)) == 2 + 8
    assert identical(pull(1.0), (in_memory(),))
    _, pull = jax.vjp(lambda u: final(u, cheap(tmp_path)), U)
    del pull
    gc.collect()
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("at", [1, 13, 40, 41, 77, 108], ids=lambda at: f"evaluation {at}")
def test_an_error_in_the_step(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the error of a callback, in either sweep, arrives and leaves no file; and that the next run works."""
    schedule = cheap(tmp_path).schedule(40, 16)
    assert 40 + schedule.advances + 1 == 108
    monkeypatch.setattr(FUSE, "at", at)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the fuse has blown"):
        jax.block_until_ready(jax.grad(final)(U, cheap(tmp_path)))
    assert FUSE.settle() == at
    assert tree(tmp_path) == set()
    monkeypatch.undo()
    assert identical(jax.grad(final)(U, cheap(tmp_path)), in_memory())


@pytest.mark.parametrize("name", ["write", "read"])
def test_an_interrupt(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that Ctrl-C in the middle of either sweep leaves no file."""
    original = getattr(SnapshotFiles, name)

    def interrupted(files: Any, slot: int, *args: Any) -> Any:
        if slot == 4:
            assert len(tree(tmp_path)) > 2
            raise KeyboardInterrupt
        return original(files, slot, *args)

    monkeypatch.setattr(SnapshotFiles, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        jax.grad(final)(U, cheap(tmp_path))
    assert tree(tmp_path) == set()


def test_a_damaged_snapshot(tmp_path: Path) -> None:
    """Assert that a byte flipped between the sweeps gives an error and no number; pulled back again, all is right."""
    for slot in (0, 7):  # of those read last and first
        _, pull = jax.vjp(lambda u: final(u, cheap(tmp_path)), U)
        (path,) = tmp_path.glob(f"run-*/slot-{slot}.snapshot")
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.write_bytes(data)
        with pytest.raises(SnapshotError, match=rf"slot {slot}, found damaged data .*the checksum differs.*Start the"):
            pull(1.0)
        assert tree(tmp_path) == set()
        assert identical(pull(1.0), (in_memory(),))


# Other processes

CHILD = f"""
import resource, sys, time
from pathlib import Path
sys.path[:0] = [{str(HERE.parent)!r}, {str(HERE)!r}]
import conftest
from test_disk import *
folder = Path(sys.argv[1])
gradient = lambda: jax.grad(final)(U, cheap(folder))
"""


def child(script: str, folder: Path) -> subprocess.Popen[str]:
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", CHILD + script, str(folder)], **options)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate("\n", timeout=100)
    assert process.returncode == 0, err
    return out


KILLED = """
read = SnapshotFiles.read
def slow(files, slot, step):
    if slot == 4:
        print("reading", flush=True)
        time.sleep(100)
    return read(files, slot, step)
SnapshotFiles.read = slow
gradient()
"""


def test_a_killed_gradient(tmp_path: Path) -> None:
    """Assert that a run killed in its reverse sweep does not disturb others, and is cleaned away by the next."""
    process = child(KILLED, tmp_path)
    assert process.stdout
    assert process.stdout.readline() == "reading\n"
    left = tree(tmp_path)
    assert len(left) == 2 + 8
    assert identical(jax.grad(final)(U, cheap(tmp_path)), in_memory())  # while the other lives
    assert tree(tmp_path) == left
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert tree(tmp_path) == left
    assert identical(jax.grad(final)(U, cheap(tmp_path)), in_memory())
    assert tree(tmp_path) == set()


TOGETHER = """
first = gradient()
print(flush=True)
sys.stdin.readline()
assert all(identical(gradient(), first) for _ in range(10))
print(*(float(x).hex() for x in first))
"""


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    """Assert that two processes that take many gradients in one folder are both right each time."""
    process = child(TOGETHER, tmp_path)
    jax.grad(final)(U, cheap(tmp_path))
    assert process.stdout
    process.stdout.readline()
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    assert all(identical(jax.grad(final)(U, cheap(tmp_path)), in_memory()) for _ in range(10))
    assert output(process).split() == [float(x).hex() for x in in_memory()]
    assert tree(tmp_path) == set()


FULL = """
write = SnapshotFiles.write
def limited(files, slot, *args):
    if slot == limited.at:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    write(files, slot, *args)
SnapshotFiles.write = limited
limited.at = 3
for level in (cheap(folder), Disk(folder, snapshots=3)):
    try:
        jax.grad(final)(U, level)
    except SnapshotError as error:
        print(error, list(folder.iterdir()))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """Assert the sentence of a disk that is full, during the forward sweep or measuring, and that nothing is left."""
    lines = output(child(FULL, tmp_path)).splitlines()
    assert len(lines) == 2
    for line, (step, slot) in zip(lines, ((12, 3), (0, 0)), strict=True):
        assert line.startswith(f"Expected room for the snapshot of step {step} (slot {slot}, ")
        assert f" bytes), with {slot} stored before it, got 'File too large' with " in line
        assert line.endswith("Use fewer disk snapshots, more memory, or another folder. []")
    assert tree(tmp_path) == set()


# What it refuses

TRACED = r"snapshots on disk need a call that is not traced.*outside `jit` and `vmap`.*`checkpoint=` a number or a"
FIRST = r"has first derivatives only, one cotangent at a time.*in memory for more: `checkpoint=` a number"


@pytest.mark.parametrize(
    ("transform", "match"),
    [
        (jax.jit, TRACED),
        (lambda f: jax.jit(jax.grad(f)), TRACED),
        (lambda f: lambda u: jax.vmap(f)(jnp.stack([u, 2 * u])), TRACED),
        (lambda f: lambda u: jax.vmap(jax.grad(f))(jnp.stack([u, 2 * u])), TRACED),
        (lambda f: jax.grad(jax.checkpoint(f)), TRACED),
        (lambda f: jax.grad(lambda u: jax.grad(f)(u)[0]), FIRST),
        (lambda f: jax.jacfwd(jax.grad(f)), FIRST),
        (lambda f: jax.jacrev(jax.grad(f)), FIRST),
        (lambda f: jax.jacfwd(jax.jacfwd(f)), FIRST),
        (lambda f: jax.jacrev(lambda u: jnp.stack([f(u), 2 * f(u)])), FIRST),
    ],
    ids=[
        "jit",
        "jit of grad",
        "vmap",
        "vmap of grad",
        "jax.checkpoint",
        "grad of grad",
        "jacfwd of grad",
        "jacrev of grad",
        "jacfwd of jacfwd",
        "jacrev",
    ],
)
def test_what_is_not_supported_is_one_error(tmp_path: Path, transform: Any, match: str) -> None:
    """Assert an error that names the reason and what to do, and that no file is left."""
    f = transform(lambda u: final(u, cheap(tmp_path)))
    with pytest.raises(ValueError, match=match):
        f(U)
    del f
    gc.collect()
    assert tree(tmp_path) == set()


def test_forward_mode(tmp_path: Path) -> None:
    """Assert `jvp` and `jacfwd`, which leave no file either."""
    f, plain = lambda u: final(u, cheap(tmp_path)), lambda u: final(u, 3)
    direction = jnp.array([0.7, 1.1])
    assert identical(jax.jvp(f, (U,), (direction,)), jax.jvp(plain, (U,), (direction,)))
    assert max_error(jax.jacfwd(f)(U), in_memory()) < 1e-14
    gc.collect()
    assert tree(tmp_path) == set()


def test_misuse_is_one_error(tmp_path: Path) -> None:
    """Assert the argument, what was expected and what came; and an error for a folder that is a file."""
    for name, value in (("snapshots", 0), ("leaf", 0), ("disk", -1), ("snapshots", 2.5), ("leaf", True)):
        with pytest.raises(ValueError, match=rf"`{name}` must be an integer of at least \d, got {value}"):
            Disk(tmp_path, **({"snapshots": 2} | {name: value}))
    for name, cost in (("write_cost", -1.0), ("read_cost", math.nan)):
        with pytest.raises(ValueError, match=f"`{name}` must be a finite number of at least 0, got {cost}"):
            jax.grad(final)(U, Disk(tmp_path, 3, **({"write_cost": 1, "read_cost": 1} | {name: cost})))
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=r"Expected a folder in `folder`, got .*file, "):
        jax.grad(final)(U, cheap(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"for a while loop a number of snapshots.*got Disk\("):
        checkpointing.while_loop(lambda u: u < 3, lambda u: u + 1, 0.0, checkpoint=cheap(tmp_path))
    assert tree(tmp_path) == {"file"}


# Budgets with a disk


def test_a_budget_with_a_disk(tmp_path: Path, accesses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert the gradient in memory, with accesses if they are cheap, and with none if all fits in memory."""
    monkeypatch.setattr(_host_sweep, "measured_costs", lambda *_: (0.5, 0.5))
    folder = os.fspath(tmp_path)
    schedule = checkpointing.plan(step, U, XS, budget=checkpointing.Budget("1.2 kB")).schedule
    assert isinstance(schedule, checkpointing.binomial)
    gradient = jax.grad(final, (0, 2))  # with respect to the data too, for which a plan makes room
    got = gradient(U, checkpointing.Budget("1.2 kB", disk=folder), XS)
    assert identical(got, gradient(U, schedule, XS))
    assert (
        len(accesses["write"])
        == Disk(folder, schedule.snapshots, None, schedule.leaf, 0.5, 0.5).schedule(40, 16).disk_writes
        > 0
    )
    accesses["write"].clear()
    assert max_error(jax.grad(final)(U, checkpointing.Budget("1 MB", disk=folder)), in_memory()) < 1e-14
    assert accesses["write"] == []
    assert tree(tmp_path) == set()


def test_a_plan_with_a_disk(tmp_path: Path) -> None:
    """Assert that a plan reports a `Disk` with its costs measured, whose gradient is the same."""
    budget = checkpointing.Budget("1.2 kB", disk=os.fspath(tmp_path))
    plan = checkpointing.plan(step, U, XS, budget=budget)
    level = plan.checkpoint
    assert isinstance(level, Disk)
    assert isinstance(plan.schedule, checkpointing.binomial)
    assert (level.path, level.snapshots, level.leaf) == (str(tmp_path), plan.schedule.snapshots, plan.schedule.leaf)
    assert all(cost is not None and 0 < cost < math.inf for cost in (level.write_cost, level.read_cost))
    assert tree(tmp_path) == set()
    FUSE.settle()
    got = jax.block_until_ready(jax.grad(final)(U, level))
    assert FUSE.settle() == plan.evaluations
    assert identical(got, jax.grad(final)(U, plan.schedule))
    assert str(plan).startswith("Disk(")
    roomy = checkpointing.plan(step, U, XS, budget=checkpointing.Budget("1 MB", disk=os.fspath(tmp_path)))
    assert roomy.checkpoint == checkpointing.store_all(40)
    with pytest.raises(ValueError, match=TRACED):
        jax.jit(lambda u: checkpointing.plan(step, u, XS, budget=budget).peak_bytes)(U)
    assert tree(tmp_path) == set()


def test_segments_are_compiled_once(tmp_path: Path) -> None:
    """Assert that gradients at new parameters, which the step closes over, share the compiled segments."""
    level = Disk(tmp_path, snapshots=2, write_cost=1, read_cost=1)

    def gradient(p: float, power: int, scan: Any, **options: Any) -> float:
        run = lambda p: scan(lambda u, _: (u - 0.01 * p * u**power, None), jnp.float64(0.9), length=40, **options)[0]
        return float(jax.grad(run)(p))

    gradient(0.5, 3, checkpointing.scan, checkpoint=level)
    before = _host_sweep._programs.cache_info().misses
    got = gradient(0.7, 3, checkpointing.scan, checkpoint=level)
    assert _host_sweep._programs.cache_info().misses == before
    other = gradient(0.7, 2, checkpointing.scan, checkpoint=level)
    assert _host_sweep._programs.cache_info().misses == before + 1
    assert got == pytest.approx(gradient(0.7, 3, lax.scan), rel=1e-13)
    assert other == pytest.approx(gradient(0.7, 2, lax.scan), rel=1e-13)
