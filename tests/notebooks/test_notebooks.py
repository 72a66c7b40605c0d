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


@pytest.fixture
def result_of(tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a notebook from top to bottom; return the numbers that it writes to `tmp_path`."""

    def execute(name: str, **settings: str) -> Any:
        monkeypatch.delenv("XLA_FLAGS")  # the notebook is for users: full optimisation, one device
        for key, value in {"TAPELESS_OUT": str(tmp_path), **settings}.items():
            monkeypatch.setenv(key, value)
        build.execute(build.assemble(name))
        return json.loads((tmp_path / f"{name}.json").read_text())

    return execute


def test_weigh_the_planets(tmp_path: Path, result_of: Any) -> None:
    """Assert that the notebook runs from top to bottom and finds the masses, with the figures that it promises."""
    result = result_of("weigh_the_planets")
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


def test_implicit_nodes(tmp_path: Path, result_of: Any) -> None:
    """Assert that the node's program does not grow, that its error follows the tolerance, and that failures raise."""
    result = result_of("implicit_nodes")
    assert result["equations"]["five"] == result["equations"]["fifty"]
    assert result["temporaries"]["node"] < 50 < result["temporaries"]["unrolled"][0]
    assert result["gradient_error_over_tolerance"] < 1
    assert result["adjoint_iterations"] < 15
    assert result["gradient_check"] < 1e-6
    assert result["unconverged_error"] > 1e-3
    assert result["raised"] == 3
    assert {p.name for p in tmp_path.glob("*.png")} == {"implicit_nodes_bratu.png", "implicit_nodes_cost.png"}


def test_bounded_memory(tmp_path: Path, result_of: Any) -> None:
    """Assert that the notebook runs, with 40 steps of its own, and that memory is what it says."""
    result = result_of("bounded_memory", TAPELESS_LIVE_STEPS="40")
    check_bounded_memory(result, steps=40)
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "dissipation.png",
        "gradient.png",
        "horizon.png",
        "vorticity.png",
    }


def check_bounded_memory(result: Any, steps: int) -> None:
    """Assert a right gradient, and temporaries that are linear for lax.scan and flat for 64 snapshots."""
    assert result["steps"] == steps
    assert result["energy_balance"] < 1e-6  # Simpson's rule on intervals of 0.05
    assert result["largest_divergence"] < 1e-12
    assert result["gradients_differ"] < 1e-13
    check = result["gradient_check"]
    assert check["verdict"] == "right"
    assert check["difference_error"] < 1e-6
    assert abs(check["taylor_slope"] - 2) < 0.05
    assert check["forward_reverse"] < 1e-12
    linear, flat = (result["temporary_bytes_predicted"][loop] for loop in ("lax.scan", "tapeless"))
    assert 15 < linear["10240"] / linear["640"] < 17
    assert flat["10240"] == flat["640"] < 30e6
    assert result["planned_bytes_compiler"] <= result["planned_bytes"] <= 50e6
    assert abs(result["changes"]["along the gradient"][1]) > 10 * abs(result["changes"]["at random"][1])
    for foretold, found in result["changes"].values():
        assert abs(found - foretold) < 0.1 * abs(foretold)


@pytest.mark.slow
def test_bounded_memory_in_full(result_of: Any) -> None:
    """Assert the same with 160 steps, as in the committed notebook."""
    check_bounded_memory(result_of("bounded_memory"), steps=160)


@pytest.mark.slow
def test_the_demo_script_writes_its_report(tmp_path: Path) -> None:
    """Assert that what `make demo` runs ends within a minute and writes report, pictures and numbers."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"TAPELESS_OUT": str(tmp_path)}
    script = f"import sys; sys.path.insert(0, {str(NOTEBOOKS)!r}); import run; print(run.run('weigh_the_planets'))"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=NOTEBOOKS.parent, env=environment)
    report = (tmp_path / "weigh_the_planets.md").read_text()
    assert "The gradient is right" in report
    assert report.count("![") == 3
