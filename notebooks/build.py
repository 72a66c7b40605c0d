"""Build a notebook from its script, with outputs: `python notebooks/build.py weigh_the_planets`."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

sys.path.insert(0, str(Path(__file__).parent))

from percent import HERE, read_cells


def assemble(name: str) -> nbformat.NotebookNode:
    """The notebook of a script, without outputs."""
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [make[cell.kind](cell.text, id=f"cell-{i}") for i, cell in enumerate(read_cells(name))]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run all cells in a fresh kernel, in the notebooks' folder."""
    return NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(HERE)}}).execute()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        nbformat.write(execute(assemble(each)), HERE / f"{each}.ipynb")
