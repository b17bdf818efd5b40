"""What users report as refused by the compiler: each limit below, at and above, and its neighbours."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from simulate.check import fails_a_check
from tests.check.launched import codes, findings
from tests.faults.data import copied_out, ramp


@pytest.mark.parametrize(("partitions", "expected"), [(7, True), (8, False), (9, True)])
def test_a_copy_on_chip_keeps_the_number_of_partitions(partitions: int, expected: bool) -> None:
    def kernel(x):
        tile, moved = nl.load(x), nl.ndarray((partitions, 8 * 63 // partitions), dtype=nl.float32)
        nisa.dma_copy(dst=moved, src=tile)
        return copied_out(moved)

    assert codes(kernel, ramp(8, 63)) == ["NKW-DMA-PARTITIONS"] * expected


@pytest.mark.parametrize("memory", ["source", "destination"])
def test_a_copy_from_or_to_hbm_may_change_the_number_of_rows(memory: str) -> None:
    def kernel(x):
        out = nl.ndarray((4, 16), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        tile = nl.ndarray((4, 16) if memory == "source" else (8, 8), dtype=nl.float32)
        nisa.dma_copy(dst=tile, src=x)
        nisa.dma_copy(dst=out, src=tile)
        return out

    assert codes(kernel, ramp(8, 8)) == []


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [nl.bfloat16, nl.float16, nl.float32, nl.int8])
def test_a_16_bit_result_in_psum_starts_at_4_bytes(first: int, dtype: Any) -> None:
    def kernel(x):
        sums = nl.ndarray((4, 16), dtype=dtype, buffer=nl.psum)
        columns = sums[:, first : first + 8]
        nisa.tensor_copy(dst=columns, src=nl.load(x))
        return copied_out(columns)

    odd = bool(first % 2) and dtype in (nl.bfloat16, nl.float16)
    assert codes(kernel, ramp(4, 8)) == ["NKW-PSUM-HALF-START"] * odd


@pytest.mark.parametrize(
    ("columns", "taken", "expected"),
    [(15, 15, True), (16, 16, False), (16, 15, False), (17, 16, True), (1, 1, False)],
)
def test_rows_of_a_dma_transpose_are_32_bytes_apart(columns: int, taken: int, expected: bool) -> None:
    def kernel(x):
        tile = nl.ndarray((16, columns), dtype=nl.bfloat16)
        nisa.dma_transpose(dst=tile[:, 0:taken], src=x)
        return copied_out(tile[:, 0:taken])

    reported = findings(kernel, ramp(taken, 16).astype(nl.bfloat16))
    assert [finding.code for finding in reported] == ["NKW-DMA-TRANSPOSE-STRIDE"] * expected
    assert not any(fails_a_check(finding, tolerant=False) for finding in reported)


@pytest.mark.parametrize("step", [0, 8, 16])
def test_one_row_on_chip_steps_over_partitions(step: int) -> None:
    def kernel(x):
        tile, out = nl.load(x), nl.ndarray((1, 8), dtype=nl.float32)
        nisa.tensor_copy(dst=out, src=tile.ap(pattern=[[step, 1], [1, 8]]))
        return copied_out(out)

    reported = findings(kernel, ramp(1, 8))
    assert [finding.code for finding in reported] == ["NKW-PARTITION-STEP-ZERO"] * (step == 0)
    assert all(fails_a_check(finding, tolerant=False) for finding in reported)


def test_a_step_of_zero_in_hbm_or_in_a_free_dim_is_silent() -> None:
    def kernel(x):
        tile, out = nl.ndarray((1, 8), dtype=nl.float32), nl.ndarray((1, 8, 2), dtype=nl.float32)
        nisa.dma_copy(dst=tile, src=x.ap(pattern=[[0, 1], [1, 8]]))
        nisa.tensor_copy(dst=out, src=tile.ap(pattern=[[8, 1], [1, 8], [0, 2]]))
        return copied_out(out)

    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    assert codes(kernel, x) == []
