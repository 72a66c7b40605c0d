"""Snapshots on disk: the states of one run in a folder of its own.

A file is read back whole and as written, or not at all:

    8 bytes     b"tapeless"
    2 x 4       format version, length of the header (little endian)
    header      JSON: run, slot, step; name of the dtype, shape and number of bytes of each array
    32          BLAKE2b of all above
    data        the arrays one after the other, C order, as they lie in memory
    32          BLAKE2b of all above but the first checksum

A run's folder is `run-<token>`, marked by a file that stays locked while the run lives. The kernel releases the lock
of a process that dies, however it dies, so a later run in the same folder can tell the dead from the living. A run
owns its folder only if it holds the lock *and* the marker is still there: who cleans up may have been faster between
the two, and then the run takes another name. Hence no lock on the user's folder is needed.
"""

import contextlib
import errno
import hashlib
import importlib
import json
import math
import operator
import os
import re
import secrets
import shutil
import struct
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None  # Windows imports this module, too

_MAGIC = b"tapeless"
_VERSION = 1
_PREAMBLE = struct.Struct("<8sII")
_DIGEST = 32
_BLOCK = 1 << 20  # hashed while in the processor's cache
_MARKER = "tapeless.lock"
_RUN = re.compile(r"run-[0-9a-f]{16}")
_FILE = re.compile(r"slot-[0-9]+\.(snapshot|part)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SnapshotError(RuntimeError):
    """A snapshot could not be stored on disk, or what was read back is not what was stored."""


class _Unusable(Exception):  # noqa: N818 - never leaves this module
    """What was found instead of a snapshot."""


class SnapshotFiles:
    """States of one run, each a flat list of arrays, in numbered slots on disk. To be closed, or used by `with`.

    Any number of runs, in one process or in several, may share a `folder`. What killed runs left there is removed
    first; other files are never touched. A slot may be written again: until the new snapshot is complete, both lie on
    disk. Arrays pass one at a time, so that beside the state at most a copy of its largest array is in memory.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).expanduser().absolute()
        if fcntl is None:
            text = f"Expected a system with `flock` (Linux, macOS), got {os.name!r}. Keep the snapshots in memory."
            raise SnapshotError(text)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.folder)
            self.run_folder, lock = _make_run(self.folder)
        except (FileExistsError, NotADirectoryError) as error:
            text = f"Expected a folder in `folder`, got {self.folder}, which is, or leads through, a file. "
            raise ValueError(text + "Give a folder, or a path where one can be made.") from error
        except OSError as error:
            text = f"Expected a folder for snapshots that can be written, got {_reason(error)!r} for {self.folder}. "
            raise SnapshotError(text + "Give another folder, or the right to write in this one.") from error
        self._token = self.run_folder.name.removeprefix("run-")
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _release, self.run_folder, lock, self._pid)

    def write(self, slot: int, step: int, arrays: Sequence[Any]) -> None:
        """Store the state at `step`. If the disk does not take it, the run is closed and nothing of it is left."""
        self._require_open()
        path = self._path(slot)
        head = _head(self._identity(slot, step), arrays)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                _write(file, head, arrays)
                file.flush()
                os.fsync(file.fileno())  # for errors that show only on the disk, not against a loss of power
            part.replace(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._failed(slot, step, _file_bytes(head, arrays), error) from error
            raise

    def read(self, slot: int, step: int) -> list[np.ndarray]:
        """The state at `step`, verified: an error if the slot holds anything else."""
        self._require_open()
        path = self._path(slot)
        try:
            with path.open("rb") as file:
                return _read(file, self._identity(slot, step))
        except FileNotFoundError as error:
            found, cause = "no such file", error
        except OSError as error:
            found, cause = f"the error {_reason(error)!r}", error
        except _Unusable as error:
            found, cause = str(error), None
        text = f"Expected the snapshot of step {step} of this run in slot {slot}, found {found}: {path}. "
        raise SnapshotError(text + "Start the gradient again; nothing computed from this snapshot was used.") from cause

    def remove(self, slot: int) -> None:
        """Free a slot, if it is in use."""
        self._require_open()
        path = self._path(slot)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            text = f"Expected to remove the snapshot in slot {slot}, got {_reason(error)!r}: {path}. "
            raise SnapshotError(text + "Give a folder whose files can be removed.") from error

    def close(self) -> None:
        """Remove the run's files and folder. Once is enough; also done at the end of the program."""
        self._finalizer()

    def __enter__(self) -> "SnapshotFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self.close()

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            text = f"Expected the process that made these snapshots ({self._pid}), got a fork of it ({os.getpid()}). "
            raise SnapshotError(text + "Make a `SnapshotFiles` in each process.")
        if not self._finalizer.alive:
            text = f"Expected an open `SnapshotFiles`, got one that was closed: {self.run_folder}. "
            raise SnapshotError(text + "Make another and start the gradient again.")

    def _path(self, slot: int) -> Path:
        if operator.index(slot) < 0:
            text = f"Expected a `slot` of at least 0, got {slot}."
            raise ValueError(text)
        return self.run_folder / f"slot-{operator.index(slot)}.snapshot"

    def _identity(self, slot: int, step: int) -> dict[str, Any]:
        return {"run": self._token, "slot": operator.index(slot), "step": operator.index(step)}

    def _failed(self, slot: int, step: int, needed: int, error: OSError) -> SnapshotError:
        """Close the run, since a schedule cannot go on without a snapshot; the error that says so."""
        what = f"the snapshot of step {step} (slot {slot}, {needed:,} bytes)"
        closed = "The run was closed and its snapshots were removed. "
        if error.errno in _FULL:
            free = shutil.disk_usage(self.folder).free
            stored = len(list(self.run_folder.glob("*.snapshot")))
            text = f"Expected room for {what}, with {stored} stored before it, got {_reason(error)!r} with "
            text += f"{free:,} bytes free in {self.folder}. {closed}"
            text += "Use fewer disk snapshots, more memory, or another folder."
        else:
            text = f"Expected to write {what}, got {_reason(error)!r} in {self.run_folder}. {closed}"
            text += "Check the disk or use another folder, and start the gradient again."
        self.close()
        return SnapshotError(text)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# The format


def _head(identity: dict[str, Any], arrays: Sequence[Any]) -> bytes:
    """All that comes before the first checksum."""
    header = json.dumps(identity | {"arrays": list(map(_described, arrays))}).encode()
    return _PREAMBLE.pack(_MAGIC, _VERSION, len(header)) + header


def _described(x: Any) -> dict[str, Any]:
    dtype = getattr(x, "dtype", None)
    if not isinstance(dtype, np.dtype):  # a key's dtype is JAX's own
        text = f"Expected arrays of numbers, got {type(x).__name__} of dtype {dtype}. "
        raise TypeError(text + "For a key array, store `jax.random.key_data(key)`.")
    if not (dtype.isnative and (dtype.kind in "biufc" or hasattr(ml_dtypes, dtype.name))):
        text = f"Expected an array of a dtype that JAX knows, got {dtype!r}. Convert it first."
        raise TypeError(text)
    return {"dtype": dtype.name, "shape": list(x.shape), "bytes": _num_bytes(x)}


def _num_bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize  # `nbytes` may count packed bits


def _file_bytes(head: bytes, arrays: Sequence[Any]) -> int:
    return len(head) + sum(map(_num_bytes, arrays)) + 2 * _DIGEST


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array in C order, piece by piece; of a contiguous array, its own memory."""
    view = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]


def _write(file: BinaryIO, head: bytes, arrays: Sequence[Any]) -> None:
    checksum = hashlib.blake2b(head, digest_size=_DIGEST)
    file.write(head + checksum.digest())
    for x in arrays:
        _write_array(file, x, checksum)  # which lets go of its copy
    file.write(checksum.digest())


def _write_array(file: BinaryIO, x: Any, checksum: Any) -> None:
    for block in _blocks(np.asarray(x)):
        checksum.update(block)
        file.write(block)


def _read(file: BinaryIO, identity: dict[str, Any]) -> list[np.ndarray]:
    size = os.fstat(file.fileno()).st_size
    checksum = hashlib.blake2b(digest_size=_DIGEST)
    header = json.loads(_read_header(file, size, checksum))
    found = {key: header[key] for key in identity}
    if found != identity:
        raise _Unusable("one of " + ", ".join(f"{key} {value}" for key, value in found.items()))
    expected = file.tell() + sum(entry["bytes"] for entry in header["arrays"]) + _DIGEST
    if size != expected:
        text = f"{size:,} bytes instead of {expected:,}"
        raise _Unusable(text)
    arrays = [_read_array(file, entry, checksum) for entry in header["arrays"]]
    if file.read(_DIGEST) != checksum.digest():
        text = "damaged data (the checksum differs)"
        raise _Unusable(text)
    return arrays


def _read_header(file: BinaryIO, size: int, checksum: Any) -> bytes:
    """The header, verified before anything is allocated by what it says."""
    start = file.read(_PREAMBLE.size)
    if start[: len(_MAGIC)] != _MAGIC[: len(start)]:
        text = f"a file that is no snapshot (it begins with {start[: len(_MAGIC)]!r})"
        raise _Unusable(text)
    if len(start) < _PREAMBLE.size:
        text = f"only {size} bytes"
        raise _Unusable(text)
    _, version, length = _PREAMBLE.unpack(start)
    if version != _VERSION:
        text = f"format version {version} instead of {_VERSION}"
        raise _Unusable(text)
    if size < len(start) + length + 2 * _DIGEST:
        text = f"{size:,} bytes, too few for a header of {length:,}"
        raise _Unusable(text)
    header = file.read(length)
    checksum.update(start + header)
    if file.read(_DIGEST) != checksum.digest():
        text = "a damaged header (its checksum differs)"
        raise _Unusable(text)
    return header


def _read_array(file: Any, entry: dict[str, Any], checksum: Any) -> np.ndarray:
    array = np.empty(entry["shape"], np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"])))
    for block in _blocks(array):
        if file.readinto(block) != len(block):
            text = "a file that became shorter while it was read"
            raise _Unusable(text)
        checksum.update(block)
    return array


# Folders of runs


def _make_run(folder: Path) -> tuple[Path, int]:
    """A folder of a new name, and the descriptor that holds its lock."""
    while True:
        run = folder / f"run-{secrets.token_hex(8)}"
        run.mkdir(mode=0o700)
        lock = _make_marker(run)
        if (run / _MARKER).exists():
            return run, lock
        _discard(run, lock)  # taken for a dead run's before it was locked


def _make_marker(run: Path) -> int:
    """Make the marker and lock it, waiting for one who cleans up."""
    try:
        lock = os.open(run / _MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        run.rmdir()
        raise
    try:
        _flock(lock)
    except BaseException:
        _discard(run, lock)
        raise
    return lock


def _flock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        text = f"Expected a file system that locks files (`flock`), got {_reason(error)!r}. "
        raise SnapshotError(text + "Give a folder on a local disk.") from error


def _remove_leftovers(folder: Path) -> None:
    for run in list(folder.iterdir()):
        if _RUN.fullmatch(run.name) and not run.is_symlink():
            _remove_if_dead(run)


def _remove_if_dead(run: Path) -> None:
    try:
        lock = os.open(run / _MARKER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # no marker, gone meanwhile, or another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # alive
        os.close(lock)
    else:
        _discard(run, lock)


def _discard(run: Path, lock: int) -> None:
    """Remove a run's snapshots, its marker, and its folder unless something else is in it."""
    with contextlib.suppress(OSError):  # the marker goes last: what cannot be removed now is tried by the next run
        for path in list(run.iterdir()):
            if _FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        (run / _MARKER).unlink(missing_ok=True)
    os.close(lock)  # before the folder: NFS keeps a removed file there while it is open
    with contextlib.suppress(OSError):
        run.rmdir()


def _release(run: Path, lock: int, pid: int) -> None:
    """Discard the run, unless this is a fork of the process it belongs to (which shares the lock while it lives)."""
    if os.getpid() == pid:
        _discard(run, lock)
