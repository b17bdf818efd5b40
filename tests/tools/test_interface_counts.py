"""The counts of unnamed values: each fault beside what is none."""

from __future__ import annotations

import pytest

from tools.interface_counts import find_occurrences

PARAMETERS = "a, b, c, d, e, f, g, h"


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("Launch('mlp', (x, w), ('x',))", ["positional launches"]),
        ("Launch('mlp', {'x': x}, ('x',))", []),
        ("Launch('mlp', arguments, ('x',))", []),
        ("job['rows']", ["string keys"]),
        ("job[f'{row}'] = 1", ["string keys"]),
        ("rows[0]", []),
        ("{'rows': 1}", []),
        ("job.rows = 1", ["fields from outside"]),
        ("job.rows += 1", ["fields from outside"]),
        ("rows, job.rows = 1, 2", ["fields from outside"]),
        ("self.job.rows = 1", ["fields from outside"]),
        ("self.rows = 1", []),
        (f"def helper({PARAMETERS}): pass", []),
        (f"def helper({PARAMETERS}, i): pass", ["long signatures"]),
        (f"class A:\n    def helper(self, {PARAMETERS}): pass", []),
        (f"@nki.jit\ndef kernel({PARAMETERS}, i): pass", []),
        (f"def kernel_reference({PARAMETERS}, i): pass", []),
    ],
)
def test_occurrences(source: str, faults: list[str]) -> None:
    assert [occurrence.fault for occurrence in find_occurrences("file.py", source)] == faults


def test_an_occurrence_names_its_line_and_text() -> None:
    (occurrence,) = find_occurrences("nki_kernels/file.py", "x = 1\ny = job['rows']\n")
    assert (occurrence.path, occurrence.line, occurrence.text) == ("nki_kernels/file.py", 2, "job['rows']")
