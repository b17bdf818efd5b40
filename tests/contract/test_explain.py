"""`explain` knows every code that a message prints, with an example and a source, and the vendor's codes."""

import re
from pathlib import Path

import pytest

import simulate
from simulate.cli import main
from simulate.explain import explain_code, find_close_codes, load_explanations, load_vendor_codes

ROOT = Path(simulate.__file__).parents[1]
CODE = re.compile(r"\b(?:NKW-[A-Z0-9]+(?:-[A-Z0-9]+)*|NKI\d{3})\b")
FILES = [file for folder in ("simulate", "model", "benchmarks") for file in (ROOT / folder).rglob("*.py")]


def test_every_code_in_the_source_has_a_sentence_an_example_and_a_source() -> None:
    printed = {code for file in FILES for code in CODE.findall(file.read_text(encoding="utf-8"))}
    assert len(printed) > 380
    known = load_explanations()
    assert printed - known.keys() == set()
    for explanation in known.values():
        assert explanation.sentence and explanation.wrong and explanation.right and explanation.source, (
            explanation.code
        )
        assert explanation.wrong != explanation.right, explanation.code
    assert known.keys() - printed == set(), "codes that nothing prints"


def test_the_tables_keep_their_order_and_say_each_code_once() -> None:
    folder = ROOT / "simulate" / "explain"
    codes = []
    for table in ("rules", "lint", "findings", "other", "vendor"):
        lines = (folder / f"{table}.txt").read_text(encoding="utf-8").splitlines()
        table_codes = [line.split(" ;; ")[0] for line in lines if not line.startswith("#")]
        assert table_codes == sorted(table_codes), table
        codes += table_codes
    assert len(codes) == len(set(codes))


def test_an_instruction_that_is_named_as_a_source_exists() -> None:
    from simulate.isa import COLLECTIVES, INSTRUCTIONS

    named = [
        explanation.source.rpartition("nki.isa.")[2]
        for explanation in load_explanations().values()
        if "nki.isa." in explanation.source
    ]
    assert named and set(named) <= INSTRUCTIONS.keys() | {"register_alloc"}
    assert COLLECTIVES


def test_a_documented_source_names_its_page_and_its_section_or_that_none_is_recorded() -> None:
    for explanation in load_explanations().values():
        if "documentation" in explanation.source:
            clauses = explanation.source.split(", ")
            assert any(word in explanation.source for word in ("page", "guide", "logical NeuronCore")), (
                explanation.code
            )
            assert clauses[-1].startswith(("section ", "notes on the parameters")), explanation.code


def test_codes_of_the_vendor_name_rules_that_exist() -> None:
    for vendor_code in load_vendor_codes().values():
        assert (
            vendor_code.meaning and vendor_code.cure and set(vendor_code.rules) <= load_explanations().keys()
        ), vendor_code.code
    assert load_vendor_codes()["NCC_EARG001"].rules == ("NKW-LNC",)


@pytest.mark.parametrize("code", ["INLA001", "IBIR229", "IBIR297", "IXGM002", "ITEN404", "EVRF064"])
def test_codes_that_users_report_have_a_cause_a_cure_and_a_source(code: str) -> None:
    known = load_vendor_codes()[f"NCC_{code}"]
    assert known.source.startswith(("https://", "reported in public repositories"))
    assert explain_code(code) == [known] and known.cure in str(known)


@pytest.mark.parametrize(
    ("typed", "first", "count"),
    [
        ("nkw-unwritten", "NKW-UNWRITTEN (error)", 1),
        ("UNWRITTEN", "NKW-UNWRITTEN", 1),
        ("EARG001", "NCC_EARG001", 1),
        ("EOOM", "NCC_EOOM001", 2),
        ("NCC_EBVF", "NCC_EBVF030", 1),
    ],
)
def test_a_code_is_found_as_it_is_typed(typed: str, first: str, count: int) -> None:
    explanations = explain_code(typed)
    assert len(explanations) == count
    assert str(explanations[0]).startswith(first.partition(" (")[0])


def test_a_typing_error_gets_the_close_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_close_codes("NKW-UNWRITEN")[0] == "NKW-UNWRITTEN"
    assert find_close_codes("PARTITION-STRAT")[0] == "NKW-PARTITION-START"
    assert find_close_codes("zzzzzz") == []
    assert main(["explain", "NKW-UNWRITEN"]) == 2
    assert "close are NKW-UNWRITTEN" in capsys.readouterr().err
    assert main(["explain", "\x1b[31mzzzz"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_the_command_prints_example_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nkw-partition-start"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("NKW-PARTITION-START: ")
    assert [line.split(":")[0].strip() for line in printed[1:]] == ["wrong", "right", "source"]
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert "NKW-UNWRITTEN" in listed and "NCC_EOOM001" in listed
