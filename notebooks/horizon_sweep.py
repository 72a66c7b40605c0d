"""Memory and time of a gradient against the number of steps: `python notebooks/horizon_sweep.py`.

The simulator and the loops are those of `bounded_memory.py` (its cells that carry `SHARED`). Each loop and horizon runs
in a process of its own. Results go to `data/horizon_sweep.json`, or with `--out -` to standard output.

Peak memory is `ru_maxrss` of a process that loads its program from JAX's compilation cache: the compiler's own
memory, some 100 MB at any horizon, is not counted. The process that starts the others imports nothing large: on Linux a
child's `ru_maxrss` starts from the resident memory of its parent.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from percent import HERE, read_cells

SHARED = "# Shared with horizon_sweep.py."
HORIZONS = (40, 160, 640, 2560, 10240)
LOOPS = ("forward", "tapeless", "tapeless, 50 MB", "lax.scan", "nested", "nested twice", "equinox")
REFERENCE = "tapeless"  # whose gradient the others' are compared with
LIMIT = 6e9  # bytes of temporaries above which a gradient is compiled, but not run
REPEATED = 640  # steps up to which the time is the best of three


def shared_cells() -> dict:
    """The simulator and the loops of the notebook, by name."""
    namespace = {"__name__": "bounded_memory"}
    for cell in read_cells("bounded_memory"):
        if cell.kind == "code" and cell.text.startswith(SHARED):
            exec(cell.text, namespace)
    return namespace


def peak_resident() -> int:
    """Peak resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def program(notebook: dict, loop: str, steps: int):
    """The compiled gradient; or the loss, which is the forward run."""
    if loop == "forward":
        return notebook["compiled"](notebook["loss"], notebook["LOOPS"]["lax.scan"], steps)
    return notebook["compiled"](notebook["gradient"], notebook["LOOPS"][loop], steps)


def fill_cache(loops: list[str], horizons: list[int]) -> dict:
    """Compile all programs in this process; return the seconds that takes."""
    notebook = shared_cells()
    seconds = {}
    for steps in horizons:
        for loop in loops:
            begin = time.perf_counter()
            program(notebook, loop, steps)
            seconds[f"{loop} {steps}"] = time.perf_counter() - begin
    return seconds


def measure(loop: str, steps: int, folder: Path) -> dict:
    """Run one program in this process, compiled beforehand; keep its gradient in `folder`."""
    import numpy as np

    notebook = shared_cells()
    run = program(notebook, loop, steps)
    record = {"loop": loop, "steps": steps, "temporary_bytes": run.memory_analysis().temp_size_in_bytes}
    if record["temporary_bytes"] > LIMIT:
        return record
    seconds, cpu_seconds = [], []
    for _ in range(3 if steps <= REPEATED else 1):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = np.asarray(run(notebook["u_start"]))
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
    record |= {
        "seconds": min(seconds),
        "cpu_seconds": min(cpu_seconds),
        "runs": len(seconds),
        "peak_bytes": peak_resident(),
    }
    record["load_average"] = os.getloadavg()[0]  # 1 where nothing else runs
    if loop == "forward":
        return record | {"loss": float(result)}
    np.save(folder / f"{loop}.npy", result)
    path = folder / f"{REFERENCE}.npy"
    reference = np.load(path) if path.exists() else result
    difference = np.linalg.norm(result - reference) / np.linalg.norm(reference)
    return record | {"gradient_norm": float(np.linalg.norm(result)), "difference": float(difference)}


def child(task: str, loops: list[str], horizons: list[int], folder: str) -> dict:
    """What another process prints last."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, __file__, "--child", task, "--folder", folder]
    command += ["--loops", *loops, "--steps", *map(str, horizons)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE, env=os.environ | settings)
    return json.loads(done.stdout.splitlines()[-1])


def sweep(loops: list[str], horizons: list[int]) -> list[dict]:
    """Compile all in one process, then measure each loop and horizon in a process of its own."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        compile_seconds = child("compile", loops, horizons, folder)
        for steps in horizons:
            for loop in loops:
                record = child("measure", [loop], [steps], folder)
                records.append(record | {"compile_seconds": compile_seconds[f"{loop} {steps}"]})
                print(records[-1], file=sys.stderr, flush=True)
            for gradient in Path(folder).glob("*.npy"):
                gradient.unlink()
    return records


def processor() -> str:
    """The processor's name, where Linux tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=HORIZONS)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--out", default=str(HERE / "data" / "horizon_sweep.json"))
    parser.add_argument("--child", choices=("compile", "measure"), help="do this in this process")
    parser.add_argument("--folder", type=Path, help="of the compiled programs and the gradients")
    options = parser.parse_args()
    if options.child == "compile":
        print(json.dumps(fill_cache(options.loops, options.steps)))
        return
    if options.child == "measure":
        print(json.dumps(measure(options.loops[0], options.steps[0], options.folder)))
        return
    begin = time.perf_counter()
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "equinox", "numpy", "tapeless")},
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "runs": sweep(options.loops, options.steps),
    }
    result["total_seconds"] = time.perf_counter() - begin
    text = json.dumps(result, indent=1) + "\n"
    if options.out == "-":
        print(text)
    else:
        Path(options.out).write_text(text)


if __name__ == "__main__":
    main()
