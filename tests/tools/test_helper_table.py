"""The table of helper files in nki_kernels/README.md is what the files say today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.helper_table import END, KERNELS, PAGE, START, format_table, write_table


def test_the_table_is_up_to_date() -> None:
    assert START + format_table() + END in PAGE.read_text(encoding="utf-8"), "run `make docs`"


def test_every_file_of_a_folder_has_a_row_and_no_kernel_has() -> None:
    table = format_table()
    for path in KERNELS.glob("*/*.py"):
        assert (f"| `{path.relative_to(KERNELS)}` | " in table) == (path.name != "__init__.py")
    assert "| `tiles.py` | " in table
    assert "| `mlp.py` | " not in table


def test_a_page_keeps_what_is_beside_the_table(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{START}old\n{END}after\n", encoding="utf-8")
    write_table(page)
    assert page.read_text(encoding="utf-8") == f"before\n{START}{format_table()}{END}after\n"


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("no table\n", encoding="utf-8")
    with pytest.raises(ValueError, match="not enough values to unpack"):
        write_table(page)
    assert page.read_text(encoding="utf-8") == "no table\n"
