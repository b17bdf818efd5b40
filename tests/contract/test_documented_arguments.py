"""The table of documented arguments: every argument of the API has a row, and every row names rules that hold it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest

from simulate.explain import load_explanations
from simulate.isa.book import COLLECTIVES, INSTRUCTIONS
from simulate.level import CHIP_ONLY, UNDOCUMENTED, WARNED
from simulate.nki import language
from tests.contract.documented.draw import draw_rows
from tests.contract.documented.reached import codes_reached_from
from tests.contract.documented.table import MODULES, Page, Row, read_groups, read_table
from tools.instruction_pages import reached_from

_API = json.loads((Path(__file__).parent / "nki_api.json").read_text(encoding="utf-8"))["modules"]
_PAGES, _ROWS = read_table()
_ELSEWHERE = {
    "NKW-ENUM": "simulate/nki/older.py, for every argument whose default is a member of an enum",
    "NKW-INDEX": "simulate/memory/indexing.py, where the slice of nl.ds selects elements",
    "NKW-INDEX-TILE": "simulate/memory, where .ap makes the view",
    "NKW-OOB": "simulate/run/issue.py, when the instruction runs",
    "NKW-OPERATOR": "simulate/numerics/resolve.py, for every op",
    "NKW-PSUM-UNSTARTED": "simulate/run/issue.py, when the instruction runs",
    "NKW-TRANSPOSE-FP8": "nc_transpose, as a case that the simulator lacks",
}
"""Codes that rows name although no planner and no function reaches their rule, and where they are raised."""


@lru_cache(None)
def _reached(module: str, instruction: str) -> frozenset[str] | None:
    """Return the codes that an instruction or function can raise; None for an instruction without a planner."""
    if module == "language":
        return codes_reached_from(getattr(language, instruction))
    planner = (INSTRUCTIONS if module == "isa" else COLLECTIVES).get(instruction)
    return None if planner is None else frozenset(reached_from(planner).rules) | {"NKW-NAME-TEXT"}


def test_every_documented_argument_has_a_row() -> None:
    documented = {
        (module, instruction, argument)
        for module in MODULES
        for instruction, arguments in _API[f"nki.{module}"].items()
        for argument, _, _ in arguments
    }
    in_table = {(row.module, row.instruction, row.argument) for row in _ROWS}
    assert documented - in_table == set(), "arguments without a row"
    assert in_table - documented == set(), "rows without an argument"
    pages = [(page.module, function) for page in _PAGES for function in page.functions]
    assert sorted(pages) == sorted((module, name) for module in MODULES for name in _API[f"nki.{module}"])


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: f"{row.instruction}.{row.argument}")
def test_a_row_quotes_its_sentence_and_names_a_rule_or_says_free(row: Row) -> None:
    assert row.documented or row.argument == "name"
    assert bool(row.rules) != bool(row.free)
    assert row.codes <= load_explanations().keys()
    reached = _reached(row.module, row.instruction)
    if reached is not None:
        assert row.codes - _ELSEWHERE.keys() <= reached


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.instruction)
def test_a_page_names_its_source_and_rules_that_exist(page: Page) -> None:
    described = page.instruction if page.functions == (page.instruction,) else ""
    name = f"nki.{page.module}.{described}".rstrip(".")
    assert page.source.startswith(f"{name}, documentation of SDK ")
    assert page.codes <= load_explanations().keys()


def test_every_rule_about_undocumented_arguments_is_named_by_a_row() -> None:
    named = {code for entry in (*_ROWS, *_PAGES) for code in entry.codes}
    assert named >= UNDOCUMENTED | WARNED
    assert not UNDOCUMENTED & WARNED and not (UNDOCUMENTED | WARNED) & CHIP_ONLY


def test_a_function_reaches_rules_of_what_it_names_and_no_others() -> None:
    reached = codes_reached_from(language.exp)
    assert reached >= {"NKW-OPERAND", "NKW-BUFFER", "NKW-DTYPE", "NKW-TILE-SHAPE"}
    assert not reached & {
        "NKW-NL-SHAPES",
        "NKW-RMS-COUNT",
        "NKW-MATMUL-MOVING",
        "NKW-DEVICE-PRINT",
        "NKW-GRID",
    }


def test_groups_name_rules_that_exist() -> None:
    assert {code for codes in read_groups().values() for code in codes} <= load_explanations().keys()


def test_the_draw_repeats_and_prefers_free_rows() -> None:
    drawn = draw_rows(40)
    assert drawn == draw_rows(40) and len(set(drawn)) == len(drawn)
    free = sum(bool(row.free) for row in _ROWS)
    assert sum(bool(row.free) for row in drawn) == min(40, free)
