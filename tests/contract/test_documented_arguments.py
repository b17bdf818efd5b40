"""The table of documented arguments: every argument of the API has a row, and every row names rules that hold it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulate.explain import explanations
from simulate.isa.book import COLLECTIVES, INSTRUCTIONS
from simulate.level import CHIP_ONLY, UNDOCUMENTED, WARNED
from tests.contract.documented.draw import draw_rows
from tests.contract.documented.table import MODULES, Page, Row, read_groups, read_table
from tools.instruction_pages import reached_from

_API = json.loads((Path(__file__).parent / "nki_api.json").read_text(encoding="utf-8"))["modules"]
_PAGES, _ROWS = read_table()
_ELSEWHERE = {
    "NKW-ENUM": "simulate/nki/older.py, for every argument whose default is a member of an enum",
    "NKW-INDEX-TILE": "simulate/memory, where .ap makes the view",
    "NKW-OOB": "simulate/run/issue.py, when the instruction runs",
    "NKW-OPERATOR": "simulate/numerics/resolve.py, for every op",
    "NKW-PSUM-UNSTARTED": "simulate/run/issue.py, when the instruction runs",
    "NKW-TRANSPOSE-FP8": "nc_transpose, as a case that the simulator lacks",
}
"""Codes that rows name although no planner reaches their rule, and where they are raised."""


def _planner(module: str, instruction: str):
    return (INSTRUCTIONS if module == "isa" else COLLECTIVES).get(instruction)


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
    pages = {(page.module, page.instruction) for page in _PAGES}
    assert pages == {(module, name) for module in MODULES for name in _API[f"nki.{module}"]}


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: f"{row.instruction}.{row.argument}")
def test_a_row_quotes_its_sentence_and_names_a_rule_or_says_free(row: Row) -> None:
    assert row.documented or row.argument == "name"
    assert bool(row.rules) != bool(row.free)
    assert row.codes <= explanations().keys()
    planner = _planner(row.module, row.instruction)
    if planner is not None:
        assert row.codes - _ELSEWHERE.keys() <= reached_from(planner).rules.keys() | {"NKW-NAME-TEXT"}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.instruction)
def test_a_page_names_its_source_and_rules_that_exist(page: Page) -> None:
    assert page.source.startswith(f"nki.{page.module}.{page.instruction}, documentation of SDK ")
    assert page.codes <= explanations().keys()


def test_every_rule_about_undocumented_arguments_is_named_by_a_row() -> None:
    named = {code for each in (*_ROWS, *_PAGES) for code in each.codes}
    assert named >= UNDOCUMENTED | WARNED
    assert not UNDOCUMENTED & WARNED and not (UNDOCUMENTED | WARNED) & CHIP_ONLY


def test_groups_name_rules_that_exist() -> None:
    assert {code for codes in read_groups().values() for code in codes} <= explanations().keys()


def test_the_draw_repeats_and_prefers_free_rows() -> None:
    drawn = draw_rows(40)
    assert drawn == draw_rows(40) and len(set(drawn)) == len(drawn)
    free = sum(bool(row.free) for row in _ROWS)
    assert sum(bool(row.free) for row in drawn) == min(40, free)
