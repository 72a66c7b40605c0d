"""Run a script of cells and write its report: `python notebooks/run.py weigh_the_planets`.

The report is Markdown in `out/`, with the text, what each cell printed, and the pictures it saved.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).parent))

from percent import HERE, read_cells


class Tee(io.StringIO):
    """Text that is kept and shown at once."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def run(name: str) -> Path:
    """Execute the cells in one namespace; return the report's path."""
    out = Path(os.environ.get("TAPELESS_OUT", HERE.parent / "out"))
    out.mkdir(parents=True, exist_ok=True)
    namespace = {"__name__": "__main__"}
    report = []
    for number, cell in enumerate(read_cells(name)):
        if cell.kind == "markdown":
            report.append(cell.text)
            continue
        before = {p: p.stat().st_mtime_ns for p in out.glob("*.png")}
        shown = Tee()
        with contextlib.redirect_stdout(shown):
            exec(compile(cell.text, f"{name}.py, cell {number}", "exec"), namespace)
        if shown.getvalue():
            report.append(f"```text\n{shown.getvalue().rstrip()}\n```")
        changed = [p for p in sorted(out.glob("*.png")) if before.get(p) != p.stat().st_mtime_ns]
        report += [f"![{p.stem}]({p.name})" for p in changed]
    path = out / f"{name}.md"
    path.write_text("\n\n".join(report) + "\n")
    return path


if __name__ == "__main__":
    os.chdir(HERE.parent)
    print(f"report: {run(*sys.argv[1:]).relative_to(HERE.parent)}")
