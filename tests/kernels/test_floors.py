"""The stored tables of benchmarks/kernels: predicted times of the kernels against what the chips allow."""

from __future__ import annotations

import pytest

from benchmarks.kernels.__main__ import TARGETS
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.table import stored, text
from benchmarks.kernels.works import works


def test_there_are_208_works_with_titles_of_their_own() -> None:
    assert len({work.title for work in works()}) == 208


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_stored_table_is_what_the_kernels_take(target: str) -> None:
    """`python -m benchmarks.kernels --write` stores it anew; the diff shows which works became slower."""
    bench = Bench(target)
    assert text(target, map(bench.measure, works())) == stored(target).read_text()
