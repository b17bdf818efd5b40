"""The exam on docstrings draws equal questions for equal commits and shows no bodies."""

from __future__ import annotations

from pathlib import Path

from tools.docstring_exam import PACKAGES, SIZES, draw, list_docstrings, list_files

MODULE = '''"""A module."""


class Cache:
    """Pages."""

    @property
    def size(self) -> int:
        """Number of pages."""
        return 41 + 1

    def grow(self, pages, *, by=1):
        self.pages = pages


def free(page: int) -> None:
    """Free a page.

    Raises:
        KeyError: the page is free.
    """
    raise KeyError(page)
'''


def write_packages(root: Path) -> None:
    for package in PACKAGES["docstrings"]:
        (root / package).mkdir()
    (root / "model" / "cache.py").write_text(MODULE, encoding="utf-8")
    (root / "model" / "names.py").write_text('"""Names."""\nSIZE = 3\n', encoding="utf-8")


def test_a_question_is_the_signature_and_the_docstring(tmp_path: Path) -> None:
    write_packages(tmp_path)
    assert list_docstrings(tmp_path) == [
        "model/cache.py: Cache.size\n@property\ndef size(self) -> int:\nNumber of pages.\n",
        "model/cache.py: free\ndef free(page: int) -> None:\n"
        "Free a page.\n\nRaises:\n    KeyError: the page is free.\n",
    ]


def test_files_without_code_are_not_drawn(tmp_path: Path) -> None:
    write_packages(tmp_path)
    assert list_files(tmp_path) == ["model/cache.py"]


def test_a_draw_depends_on_the_commit_alone() -> None:
    population = [str(number) for number in range(1000)]
    first = draw(population, SIZES["files"], "a" * 40)
    assert first == draw(population, SIZES["files"], "a" * 40)
    assert first != draw(population, SIZES["files"], "b" * 40)
    assert len(set(first)) == SIZES["files"]
