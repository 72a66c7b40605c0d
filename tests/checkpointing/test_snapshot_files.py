"""Snapshots on disk: as written or an error, never another run's files, and nothing left behind."""

import errno
import fcntl
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tapeless.checkpointing import _snapshot_files
from tapeless.checkpointing._snapshot_files import SnapshotError, SnapshotFiles

# Children load the one module, without JAX: a tenth of the time.
LOAD = f"""
import importlib.util, os, resource, signal, sys, time
from pathlib import Path
import numpy as np
spec = importlib.util.spec_from_file_location("_snapshot_files", {_snapshot_files.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
SnapshotFiles, SnapshotError, folder = module.SnapshotFiles, module.SnapshotError, Path(sys.argv[1])
"""
DEAD = "run-0123456789abcdef"


def child(script: str, folder: Path, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", LOAD + script, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def state(step: int) -> list[np.ndarray]:
    return [np.full((3, 2), step + 0.5), np.arange(step, dtype=np.int32), np.array(step)]


def check_equal(got: list[np.ndarray], expected: list[Any]) -> None:
    """The same types, shapes and bits."""
    assert len(got) == len(expected)
    for a, b in zip(got, map(np.asarray, expected), strict=True):
        assert type(a) is np.ndarray
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def small_file(snapshots: SnapshotFiles) -> Path:
    snapshots.write(3, 30, [np.arange(5.0), np.array([True, False])])
    return snapshots.run_folder / "slot-3.snapshot"


def refused(snapshots: SnapshotFiles, slot: int = 3, step: int = 30) -> str:
    with pytest.raises(SnapshotError, match=f"Expected the snapshot of step {step} .* slot {slot}, found ") as info:
        snapshots.read(slot, step)
    text = str(info.value)
    assert text.endswith("Start the gradient again; nothing computed from this snapshot was used.")
    assert str(snapshots.run_folder / f"slot-{slot}.snapshot") in text
    return text.split("found ")[1].split(f": {snapshots.run_folder}")[0]


# What is read back

CLASSICAL = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
CLASSICAL += ["float16", "float32", "float64", "complex64", "complex128"]
OTHERS = [name for name in dir(jnp) if name.startswith(("bfloat", "float4", "float6_", "float8", "int", "uint"))]
OTHERS = [name for name in OTHERS if hasattr(ml_dtypes, name)]


@pytest.mark.parametrize("name", CLASSICAL + OTHERS)
def test_every_dtype_returns_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Assert that random bits (NaNs with payloads among them) survive, in all shapes and memory orders."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    random = np.random.default_rng(0)
    bits = random.integers(0, 2 if name == "bool" else 256, 60 * dtype.itemsize, np.uint8)
    x = bits.view(dtype).reshape(5, 12)
    arrays = [x, x[0, 0], np.array(x[0, 0]), x[:0], x.T, x[::2, ::-3], np.asfortranarray(x)]
    with SnapshotFiles(tmp_path) as snapshots:
        snapshots.write(0, 7, arrays)
        check_equal(snapshots.read(0, 7), arrays)
        if not name.startswith("float6"):  # JAX names them, but makes no arrays of them
            own = [jax.device_put(x), jax.device_put(x[0, 0])]
            snapshots.write(1, 8, own)
            check_equal(snapshots.read(1, 8), own)


def test_special_values_and_an_empty_state(tmp_path: Path) -> None:
    """Assert that -0.0, infinities and the payload of a NaN are kept, and that no arrays are a state, too."""
    payload = np.array([0x7FF8DEADBEEF0001, 0xFFF0000000000001], np.uint64).view(np.float64)
    values = [np.array([-0.0, np.inf, -np.inf]), payload]
    with SnapshotFiles(tmp_path) as snapshots:
        snapshots.write(0, 0, values)
        check_equal(snapshots.read(0, 0), values)
        snapshots.write(1, 1, [])
        assert snapshots.read(1, 1) == []


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: jax.random.key(0), r"jax\.random\.key_data\(key\)"),
        (lambda: np.array([None]), "a dtype that JAX knows"),
        (lambda: np.array(["a"]), "a dtype that JAX knows"),
        (lambda: np.zeros(2, np.dtype(float).newbyteorder()), "a dtype that JAX knows"),
        (lambda: 1.0, "Expected arrays of numbers, got float"),
    ],
    ids=["key", "object", "text", "byte order", "Python number"],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, make: Any, match: str) -> None:
    """Assert a TypeError, no file, and that the run goes on."""
    with SnapshotFiles(tmp_path) as snapshots:
        with pytest.raises(TypeError, match=match):
            snapshots.write(0, 0, [np.ones(2), make()])
        assert tree(snapshots.run_folder) == {"tapeless.lock"}
        snapshots.write(0, 0, [np.ones(2)])
        with pytest.raises(ValueError, match="Expected a `slot` of at least 0, got -1"):
            snapshots.read(-1, 0)


def test_memory_is_one_copy(tmp_path: Path) -> None:
    """Assert that writing copies one array at most, and reading allocates what it returns and no more."""
    size = 4_000_000
    arrays = [np.ones((size // 16, 2)).T, np.ones((size // 16, 2)).T]  # both need a copy
    with SnapshotFiles(tmp_path) as snapshots:
        tracemalloc.start()
        try:
            snapshots.write(0, 0, arrays)
            assert tracemalloc.get_traced_memory()[1] < 1.1 * size
            tracemalloc.reset_peak()
            snapshots.read(0, 0)
            assert tracemalloc.get_traced_memory()[1] < 2.1 * size
        finally:
            tracemalloc.stop()


# What is found out


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    """Assert that each byte of a file counts, and that the message says which part is damaged."""
    with SnapshotFiles(tmp_path) as snapshots:
        path = small_file(snapshots)
        good = path.read_bytes()
        reasons = []
        for position in range(len(good)):
            for flip in (0x01, 0x80, 0xFF):
                bad = bytearray(good)
                bad[position] ^= flip
                path.write_bytes(bad)
                reasons.append(refused(snapshots))
        counts = [sum(part in reason for reason in reasons) for part in ("no snapshot", "version", "header", "data")]
        length = int.from_bytes(good[12:16], "little")
        assert counts == [3 * n for n in (8, 4, 4 + length + 32, 42 + 32)]
        path.write_bytes(good)
        check_equal(snapshots.read(3, 30), [np.arange(5.0), np.array([True, False])])


def test_a_file_of_another_length_is_found(tmp_path: Path) -> None:
    """Assert that every truncation and an addition are errors."""
    with SnapshotFiles(tmp_path) as snapshots:
        path = small_file(snapshots)
        good = path.read_bytes()
        for length in range(len(good)):
            path.write_bytes(good[:length])
            assert "bytes" in refused(snapshots)
        path.write_bytes(good + b"\0")
        assert refused(snapshots) == f"{len(good) + 1} bytes instead of {len(good)}"


def test_another_snapshot_is_found(tmp_path: Path) -> None:
    """Assert that another step, slot or run, another kind of file and no file are told apart."""
    with SnapshotFiles(tmp_path) as snapshots, SnapshotFiles(tmp_path) as others:
        path = small_file(snapshots)
        run = snapshots.run_folder.name.removeprefix("run-")
        assert refused(snapshots, step=31) == f"one of run {run}, slot 3, step 30"
        path.rename(path.with_name("slot-4.snapshot"))
        assert refused(snapshots, slot=4) == f"one of run {run}, slot 3, step 30"
        assert refused(snapshots) == "no such file"
        small_file(others).rename(path)
        assert refused(snapshots) == f"one of run {others.run_folder.name.removeprefix('run-')}, slot 3, step 30"
        path.write_bytes(b"\x93NUMPY\x01\x00" * 50)
        assert refused(snapshots) == r"a file that is no snapshot (it begins with b'\x93NUMPY\x01\x00')"
        path.unlink()
        path.mkdir()
        assert refused(snapshots) == "the error 'Is a directory'"


def test_a_failed_write_leaves_the_old_snapshot(tmp_path: Path) -> None:
    """Assert that an exception in the middle of a state leaves no partial file and what was there before."""

    class Failing:
        dtype, shape = np.dtype(float), (2,)

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    with SnapshotFiles(tmp_path) as snapshots:
        snapshots.write(0, 1, state(1))
        with pytest.raises(KeyboardInterrupt):
            snapshots.write(0, 2, [np.ones(100_000), Failing()])
        assert tree(snapshots.run_folder) == {"tapeless.lock", "slot-0.snapshot"}
        check_equal(snapshots.read(0, 1), state(1))
        assert "step 1" in refused(snapshots, slot=0, step=2)


# Ends of a run


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Assert that slots are reused and freed, and that each way to end a run removes its files and no others."""
    folder = tmp_path / "new" / "folder"
    with SnapshotFiles(str(folder)) as snapshots:
        for step in range(6):
            snapshots.write(step % 2, step, state(step))
        assert tree(snapshots.run_folder) == {"tapeless.lock", "slot-0.snapshot", "slot-1.snapshot"}
        snapshots.remove(0)
        snapshots.remove(0)
        assert tree(snapshots.run_folder) == {"tapeless.lock", "slot-1.snapshot"}
    assert tree(folder) == set()
    snapshots.close()
    for use in (lambda: snapshots.write(0, 0, []), lambda: snapshots.read(0, 0), lambda: snapshots.remove(0)):
        with pytest.raises(SnapshotError, match=r"got one that was closed.*Make another"):
            use()
    with pytest.raises(TypeError), SnapshotFiles(folder) as snapshots:
        snapshots.write(0, 0, [None])
    assert tree(folder) == set()
    dropped = SnapshotFiles(folder)
    dropped.write(0, 0, state(0))
    assert len(tree(folder)) == 3
    del dropped
    gc.collect()
    assert tree(folder) == set()


FORK = """
snapshots = SnapshotFiles(folder)
snapshots.write(0, 1, [np.ones(3)])
if not (pid := os.fork()):
    try:
        snapshots.write(0, 2, [np.ones(3)])
    except SnapshotError as error:
        print(error)
    sys.exit()
os.waitpid(pid, 0)
assert snapshots.read(0, 1)[0].tolist() == [1, 1, 1]
"""  # ends without `close`


def test_a_fork_leaves_the_run_alone_and_the_end_of_the_program_removes_it(tmp_path: Path) -> None:
    """Assert that a forked child can neither write to the run nor removes it, and that its maker removes it."""
    assert "got a fork of it" in output(child(FORK, tmp_path))
    assert tree(tmp_path) == set()


KILLED = """
snapshots = SnapshotFiles(folder)
snapshots.write(0, 1, [np.ones(3)])
def stop(descriptor):
    print(snapshots.run_folder.name, flush=True)
    time.sleep(60)
os.fsync = stop
snapshots.write(1, 2, [np.ones(100_000)])
"""


def test_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    """Assert that a run killed in the middle of a write leaves no readable half, and that a live run survives."""
    process = child(KILLED, tmp_path)
    assert process.stdout
    name = process.stdout.readline().strip()
    left = {name, *(f"{name}/{file}" for file in ("tapeless.lock", "slot-0.snapshot", "slot-1.part"))}
    with SnapshotFiles(tmp_path) as live:  # in time to see both alive
        live.write(0, 5, state(5))
        assert left < tree(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert left < tree(tmp_path)
        with SnapshotFiles(tmp_path) as after:
            assert {p.name for p in tmp_path.iterdir()} == {live.run_folder.name, after.run_folder.name}
        check_equal(live.read(0, 5), state(5))
    assert tree(tmp_path) == set()


def test_only_marked_folders_of_dead_runs_are_removed(tmp_path: Path) -> None:
    """Assert that foreign files stay: beside the runs, in folders of similar names, and in a dead run's folder."""
    kept = ["data.npy", "slot-0.snapshot", "run-1/slot-0.snapshot", "run-1/tapeless.lock"]
    kept += ["run-00000000000000aa/slot-0.snapshot", f"{DEAD}/notes.txt", "elsewhere/tapeless.lock"]
    dead = [f"{DEAD}/{name}" for name in ("tapeless.lock", "slot-0.snapshot", "slot-12.part")]
    for name in kept + dead:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "run-00000000000000bb").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run-00000000000000cc").write_text("a file")
    before = tree(tmp_path)
    with SnapshotFiles(tmp_path) as snapshots:
        snapshots.write(0, 0, state(0))
    assert tree(tmp_path) == before - set(dead)


# Several runs at once


def test_a_run_cleaned_away_while_it_starts_takes_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert the race of two that start at once: one has made its folder, and not locked it when the other cleans."""
    flock, taken = fcntl.flock, []

    def late(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not taken:
            taken.append({p.name for p in tmp_path.iterdir()})
            taken.append(SnapshotFiles(tmp_path))
            assert taken[0].isdisjoint(p.name for p in tmp_path.iterdir())
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with SnapshotFiles(tmp_path) as slow, taken[1] as fast:
        assert {p.name for p in tmp_path.iterdir()} == {slow.run_folder.name, fast.run_folder.name}
        slow.write(0, 1, state(1))
        fast.write(0, 2, state(2))
        check_equal(slow.read(0, 1), state(1))
        check_equal(fast.read(0, 2), state(2))
    assert tree(tmp_path) == set()


TOGETHER = """
random = np.random.default_rng(os.getpid())
print(flush=True)
sys.stdin.readline()
for run in range(60):
    with SnapshotFiles(folder) as a, SnapshotFiles(folder) as b:
        written = {}
        for step in range(8):
            snapshots, slot = (a, b)[step % 2], int(random.integers(3))
            written[snapshots, slot] = step, random.standard_normal(int(random.integers(2000)))
            snapshots.write(slot, step, [written[snapshots, slot][1]])
        for (snapshots, slot), (step, x) in written.items():
            assert snapshots.read(slot, step)[0].tobytes() == x.tobytes()
print("done")
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Assert that two processes that start and end many runs in one folder all read what they wrote."""
    command = [sys.executable, "-c", LOAD + TOGETHER, str(tmp_path)]
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    for process in processes:
        assert process.stdout
        process.stdout.readline()
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    assert [output(process) for process in processes] == ["done\n"] * 2
    assert tree(tmp_path) == set()


# Disks and folders that do not do

FULL = """
snapshots = SnapshotFiles(folder)
try:
    for step in range(100):
        snapshots.write(step, step, [np.ones(1000 * step)])
except SnapshotError as error:
    print(step, error.__cause__.errno, error, list(folder.iterdir()))
"""
# In a name space of its own: the file system of 1 MiB ends with the process.
MOUNT = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"']
LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"


@pytest.mark.parametrize("kind", ["full disk", "limit of the system"])
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    """Assert that a real full disk, or file too large, ends the run with numbers, and that nothing is left."""
    if kind == "full disk":
        if not shutil.which("unshare") or subprocess.run([*MOUNT, str(tmp_path), "true"], check=False).returncode:
            pytest.skip("this system does not let a test mount a file system")
        number, out = errno.ENOSPC, output(child(FULL, tmp_path, *MOUNT, str(tmp_path)))
        room = int(re.findall(r"([0-9,]+) bytes free", out)[0].replace(",", ""))
        assert room < 2**20
    else:
        number, out = errno.EFBIG, output(child(LIMIT + FULL, tmp_path))
    step = int(out.split()[0])
    size = int(re.findall(r"([0-9,]+) bytes\)", out)[0].replace(",", ""))
    assert 0 < size - 8000 * step < 300
    assert out.startswith(
        f"{step} {number} Expected room for the snapshot of step {step} (slot {step}, {size:,} bytes)"
    )
    assert f", with {step} stored before it, got {os.strerror(number)!r} with " in out
    assert out.endswith("Use fewer disk snapshots, more memory, or another folder. []\n")
    assert tree(tmp_path) == set()


def test_a_broken_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that any other error of the disk ends the run, too."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    snapshots = SnapshotFiles(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SnapshotError, match=r"Expected to write the snapshot of step 2 .*Input/output error.*closed"):
        snapshots.write(1, 2, state(2))
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_folder(tmp_path: Path, name: str) -> None:
    """Assert an error that names the path."""
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=f"Expected a folder in `folder`, got {tmp_path / name}, .*Give a folder"):
        SnapshotFiles(tmp_path / name)
    assert tree(tmp_path) == {"file"}


def test_an_unwritable_folder(tmp_path: Path) -> None:
    """Assert an error before the run begins, for root by acting as nobody."""
    user = os.geteuid()
    tmp_path.chmod(0o500)
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(SnapshotError, match=r"can be written, got 'Permission denied' .*Give another folder"):
            SnapshotFiles(tmp_path)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert tree(tmp_path) == set()


def test_no_room_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a run which cannot be marked as such leaves no folder."""

    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(SnapshotError, match="can be written, got 'No space left on device'"):
        SnapshotFiles(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert an error that asks for a local disk, and no folder left; one of its own where the system has no locks."""

    def flock(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(SnapshotError, match=r"locks files .*No locks available.*Give a folder on a local disk"):
        SnapshotFiles(tmp_path)
    monkeypatch.setattr(_snapshot_files, "fcntl", None)
    with pytest.raises(SnapshotError, match=r"Expected a system with `flock`.*in memory"):
        SnapshotFiles(tmp_path)
    assert tree(tmp_path) == set()
