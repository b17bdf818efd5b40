"""Runs the notebooks from top to bottom and stores their outputs.

    python -m tools.notebooks [NOTEBOOK ...]            run them and store their outputs; all of notebooks/ by default
    python -m tools.notebooks --check [NOTEBOOK ...]    run them and compare the text they print with the stored text

The exit status is 1 if --check finds different text, else 0. A cell that raises ends the run with its traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
_CELL_SECONDS = 600
_CELL_FILE = re.compile(r"[^\s<>]*/ipykernel_\d+/")
"""The folder of a cell's source, which has the number of the process in its name."""


def main(argv: list[str] | None = None) -> int:
    """Run or check the notebooks and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.notebooks", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="compare instead of storing")
    parser.add_argument(
        "notebooks", nargs="*", type=Path, metavar="NOTEBOOK", default=sorted(FOLDER.glob("*.ipynb"))
    )
    options = parser.parse_args(argv)
    status = 0
    for path in options.notebooks:
        stored = nbformat.read(path, as_version=4)
        done = run_notebook(path)
        if not options.check:
            nbformat.write(done, path)
            print(f"{path.name}: stored")
            continue
        for number, (before, after) in enumerate(zip(printed(stored), printed(done))):
            if before != after:
                print(f"{path.name}: cell {number} prints other text than is stored:\n{after}")
                status = 1
    return status


def run_notebook(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in a fresh kernel and return it, without metadata that differ from run to run.

    The file stays unchanged.
    """
    notebook = nbformat.read(path, as_version=4)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # a kernel is another process; it uses this checkout
    try:
        client = NotebookClient(
            notebook, timeout=_CELL_SECONDS, resources={"metadata": {"path": str(FOLDER)}}
        )
        client.execute()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                for mime_type in ("text/html", "text/plain"):
                    if mime_type in output.get("data", {}):
                        output.data[mime_type] = _CELL_FILE.sub("", output.data[mime_type])
    notebook.metadata.pop("language_info", None)
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return a cell's outputs with the pieces of each text stream joined.

    Where a stream is cut differs from run to run.
    """
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the text that each cell prints, without pictures."""
    return ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]


if __name__ == "__main__":
    sys.exit(main())
