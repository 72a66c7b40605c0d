"""Rules of the house: floors, sizes, packages, documents that run."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"adjoint": 1, "checkpointing": 2, "solvers": 2, "sim": 3}
MODULES = sorted(p for floor in FLOORS for p in (ROOT / floor).rglob("*.py"))


def test_packages_are_listed() -> None:
    """Assert that every folder with an `__init__.py` is in the wheel's list, and nothing else lies at the root."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"tapeless"} | {
        ".".join(("tapeless", *p.parent.relative_to(ROOT).parts))
        for f in FLOORS
        for p in (ROOT / f).rglob("__init__.py")
    }
    assert listed == found
    assert [p.name for p in ROOT.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """Assert that a floor imports relatively, from lower floors only, at module level, and no private JAX."""
    text = path.read_text()
    floor = FLOORS[path.relative_to(ROOT).parts[0]]
    assert text.count("\n") <= 400
    assert "jax._src" not in text
    assert ast.get_docstring(ast.parse(text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert not [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.level]
        if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
            assert FLOORS[node.module.split(".")[0]] < floor
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.split(".")[0] == "tapeless" for name in names)


def public() -> list[Any]:
    found = []
    for floor in FLOORS:
        module = importlib.import_module(f"tapeless.{floor}")
        found += [(f"{floor}.{name}", getattr(module, name)) for name in vars(module) if not name.startswith("_")]
    return [(name, x) for name, x in found if inspect.isclass(x) or inspect.isfunction(x)]


@pytest.mark.parametrize(("name", "item"), public(), ids=[name for name, _ in public()])
def test_public_names_are_documented(name: str, item: Any) -> None:
    """Assert a docstring for every public name, and that the examples in it run."""
    assert inspect.getdoc(item), name
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in finder.find(item, name, globs={}):
        assert runner.run(example).failed == 0


@pytest.mark.parametrize(
    "document", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
)
def test_documents_run(document: str) -> None:
    """Assert that the Python in README and docs runs as it stands, in order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    assert blocks or document != "README.md"
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, document, "exec"), namespace)


@pytest.mark.parametrize(
    "document", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(document: str) -> None:
    """Assert that every relative link and picture exists."""
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


PROBE = """
import tapeless, tapeless.adjoint, tapeless.checkpointing, tapeless.sim, tapeless.solvers
import jax
from pathlib import Path
assert "site-packages" in tapeless.__file__
assert (Path(tapeless.__file__).parent / "py.typed").exists()
assert not jax.config.jax_enable_x64, "importing must not switch on float64"
from tapeless import sim
f = lambda k: sim.simulate(lambda t, y, k: -k * y, 1.0, k, t0=0, t1=1, dt=0.1, method=sim.RK4(), checkpoint=3).y_final
assert abs(float(jax.grad(f)(0.5)) + 0.60653) < 1e-4
"""


@pytest.mark.slow
def test_the_wheel_works(tmp_path: Path) -> None:
    """Assert that the wheel installs in a clean environment, holds every subpackage, and runs a gradient."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    subprocess.run([python, "-c", PROBE], check=True, cwd=tmp_path)
