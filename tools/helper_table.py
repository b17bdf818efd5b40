"""Writes the table of helper files into nki_kernels/README.md: the first sentence of each file's docstring.

Helper files are all files of the folders, and those files of nki_kernels/ that define no function of their own name.

    python -m tools.helper_table
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "nki_kernels"
PAGE = KERNELS / "README.md"
START = "<!-- Written by `make docs` from the docstrings of the files; edit these. -->\n"
END = "<!-- End of the table. -->\n"


def write_table(page: Path = PAGE) -> None:
    """Replace the table between the two marks of a page.

    Raises: ValueError if a mark is missing.
    """
    before, after = page.read_text(encoding="utf-8").split(START)
    _, after = after.split(END)
    page.write_text(f"{before}{START}{format_table()}{END}{after}", encoding="utf-8")


def format_table() -> str:
    """Return the Markdown table of all helper files, sorted by path: those beside the kernels, then by folder."""
    paths = sorted(KERNELS.rglob("*.py"), key=lambda path: (path.parent != KERNELS, path))
    rows = (
        f"| `{path.relative_to(KERNELS).as_posix()}` | {sentence} |\n" for path, sentence in _describe(paths)
    )
    return "\n| file | holds |\n|---|---|\n" + "".join(rows) + "\n"


def _describe(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield helper files with the first sentence of their docstrings, without its full stop."""
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        is_kernel = path.parent == KERNELS and path.stem in functions
        if path.name != "__init__.py" and not is_kernel:
            summary = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
            yield path, summary.split(". ")[0].removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    write_table()
