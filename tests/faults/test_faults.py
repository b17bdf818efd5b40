"""Every wrong kernel gets exactly its report; healed, it gets none and computes what numpy computes."""

from __future__ import annotations

import threading

import pytest

from tests.faults.corpus import FAULTS, FOLDER, TABLES, Fault, reports, same


def over_faults(faults: list[Fault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: f"{fault.fault_class}/{fault.name}")


@over_faults(FAULTS)
def test_the_wrong_kernel_is_reported(fault: Fault) -> None:
    findings, _ = fault.run(sick=True)
    assert [finding.code for finding in findings] == [fault.program().code]
    assert findings[0].where is not None
    assert findings[0].where.line == fault.blamed_line()
    assert fault.report(findings) == fault.stored()


@over_faults(FAULTS)
def test_the_healed_kernel_is_silent_and_right(fault: Fault) -> None:
    findings, outputs = fault.run(sick=False)
    assert findings == []
    program = fault.program()
    assert same(outputs, list(program.answer(program.inputs())))


@over_faults([fault for fault in FAULTS if fault.fault_class == "deadlock"])
def test_a_deadlock_leaves_no_thread(fault: Fault) -> None:
    before = set(threading.enumerate())
    fault.run(sick=True)
    assert set(threading.enumerate()) == before


def test_every_report_belongs_to_a_kernel() -> None:
    assert {fault.path.with_suffix(".txt") for fault in FAULTS} == set(FOLDER.glob("*/*.txt"))
    for table in TABLES:
        rows = [fault.name for fault in FAULTS if fault.path == table]
        assert list(reports(table.with_suffix(".txt").read_text())) == rows
