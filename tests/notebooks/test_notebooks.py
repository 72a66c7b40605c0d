"""Notebooks are the scripts they were made from, hold their outputs, and run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def build() -> Any:
    sys.path.insert(0, str(NOTEBOOKS))
    try:
        import build
    finally:
        sys.path.remove(str(NOTEBOOKS))
    return build


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_its_script(name: str, build: Any) -> None:
    """Assert the same cells in the same order, with outputs committed."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    expected = build.assemble(name)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in expected.cells]
    printing = [c for c in notebook.cells if c.cell_type == "code" and "print(" in c.source and "def " not in c.source]
    assert all(c.outputs for c in printing)


def test_weigh_the_planets(tmp_path: Path, build: Any) -> None:
    """Assert that the notebook runs from top to bottom and finds the masses, with the figures that it promises."""
    flags = os.environ.pop("XLA_FLAGS")  # the notebook is for users: full optimisation, one device
    os.environ["TAPELESS_OUT"] = str(tmp_path)
    try:
        build.execute(build.assemble("weigh_the_planets"))
    finally:
        os.environ["XLA_FLAGS"] = flags
        del os.environ["TAPELESS_OUT"]
    result = json.loads((tmp_path / "weigh_the_planets.json").read_text())
    bounds = {"jupiter": 2e-5, "saturn": 2e-5, "uranus": 2e-5, "neptune": 2e-4}
    for name, bound in bounds.items():
        planet = result["planets"][name]
        assert abs(planet["found"] / planet["reference"] - 1) < bound
        assert planet["interval"][0] < planet["found"] < planet["interval"][1]
        assert abs(planet["relative_error"]) < abs(planet["relative_error_without_rings"])
    check = result["gradient_check"]
    assert check["verdict"] == "right"
    assert check["difference_error"] < 1e-7
    assert abs(check["taylor_slope"] - 2) < 0.02
    assert check["forward_reverse"] < 1e-12
    # 540 steps, 20 snapshots: n + t(n, s) + 1 = 540 + 1367 + 1, within the table's n + t(n + 1, s).
    assert (result["steps"], result["snapshots"], result["step_evaluations"]) == (540, 20, 1908)
    assert result["peak_bytes"] < result["peak_bytes_all_states"]
    assert result["gradients_differ"] < 1e-14
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "gradient_check.png",
        "residuals.png",
        "sensitivity.png",
    }


@pytest.mark.slow
def test_the_demo_script_writes_its_report(tmp_path: Path) -> None:
    """Assert that what `make demo` runs ends within a minute and writes report, pictures and numbers."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"TAPELESS_OUT": str(tmp_path)}
    script = f"import sys; sys.path.insert(0, {str(NOTEBOOKS)!r}); import run; print(run.run('weigh_the_planets'))"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=NOTEBOOKS.parent, env=environment)
    report = (tmp_path / "weigh_the_planets.md").read_text()
    assert "The gradient is right" in report
    assert report.count("![") == 3
