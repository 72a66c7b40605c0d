"""Scripts in cells: the one source of a notebook, of its report, and of what `make demo` runs."""

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Cell(NamedTuple):
    """A markdown or code cell of a script in percent format."""

    kind: str
    text: str


def read_cells(name: str) -> list[Cell]:
    """Split `name`.py at its ``# %%`` lines."""
    source = (HERE / f"{name}.py").read_text()
    cells = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip("\n").split("\n")]
            cells.append(Cell("markdown", "\n".join(lines).strip()))
        else:
            cells.append(Cell("code", body.strip("\n")))
    return cells
