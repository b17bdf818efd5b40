"""The page of silent faults names every code of a detector, and no code that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from simulate.check import KINDS
from simulate.explain import load_explanations

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checks.md"
CODE = re.compile(r"\bNKW-[A-Z0-9]+(?:-[A-Z0-9]+)*")
DECISIONS = ("refused", "error", "warning", "out of scope", "rules of the instruction")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row != ["fault", "source", "decision"]]


def test_every_row_has_a_source_and_a_decision() -> None:
    assert len(rows()) > 90
    for row in rows():
        fault, source, decision = row
        assert fault and source, row
        assert decision.startswith(DECISIONS), row
        out = decision.startswith("out of scope")
        assert bool(CODE.findall(decision)) is not (out or decision == "rules of the instruction"), row


def test_every_code_of_a_detector_is_on_the_page_and_exists() -> None:
    named = set(CODE.findall(PAGE.read_text(encoding="utf-8")))
    assert named <= load_explanations().keys()
    detectors = {code for code in KINDS if code.startswith("NKW-")}
    assert detectors - named == set()


def test_decisions_agree_with_the_severity_of_the_code() -> None:
    for _, _, decision in rows():
        codes = [code for code in CODE.findall(decision.split(";")[0]) if code in KINDS]
        severities = {KINDS[code].severity.value for code in codes}
        assert severities <= {word for word in ("error", "warning") if word in decision}, decision
