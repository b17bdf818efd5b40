"""Detectors at their limits: exact footprints, order by rendezvous, healthy twins, and stable reports."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from simulate.check import Severity, gathered
from simulate.check.footprint import Footprint
from tests.check.launched import codes, findings
from tests.faults.data import copied_out

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(("start", "expected"), [(28, ["NKW-MEM-CLOBBER"]), (32, []), (36, [])])
def test_tiles_overlap_up_to_their_last_byte(start: int, expected: list[str]) -> None:
    def kernel(x):
        a = nl.ndarray((8, 8), dtype=nl.float32, name="a", address=(0, 0))
        b = nl.ndarray((8, 8), dtype=nl.float32, name="b", address=(0, start))
        nisa.dma_copy(dst=a, src=x)
        nisa.dma_copy(dst=b, src=x)
        nisa.tensor_tensor(dst=b, data1=a, data2=b, op=nl.add)
        return copied_out(b)

    assert codes(kernel, X) == expected


@pytest.mark.parametrize(("partition", "expected"), [(0, ["NKW-MEM-CLOBBER"]), (32, [])])
def test_tiles_in_other_partitions_do_not_overlap(partition: int, expected: list[str]) -> None:
    def kernel(x):
        a = nl.ndarray((8, 8), dtype=nl.float32, name="a", address=(0, 0))
        b = nl.ndarray((8, 8), dtype=nl.float32, name="b", address=(partition, 0))
        nisa.dma_copy(dst=a, src=x)
        nisa.dma_copy(dst=b, src=x)
        total = nl.ndarray((8, 8), dtype=nl.float32)
        nisa.tensor_tensor(dst=total, data1=a, data2=b, op=nl.add)
        nisa.dma_copy(dst=b, src=total)
        return copied_out(b)

    assert codes(kernel, X) == expected


def test_tiles_that_pass_their_bytes_on_do_not_overlap() -> None:
    def kernel(x):
        previous = nl.ndarray((8, 8), dtype=nl.float32, address=(0, 0))
        nisa.dma_copy(dst=previous, src=x)
        for _ in range(3):
            following = nl.ndarray((8, 8), dtype=nl.float32, address=(0, 0))
            nisa.tensor_tensor(dst=following, data1=previous, data2=previous, op=nl.add)
            previous = following
        return copied_out(previous)

    assert codes(kernel, X) == []


def test_a_tile_filled_anew_after_the_intruder_is_not_clobbered() -> None:
    def kernel(x):
        a = nl.ndarray((8, 8), dtype=nl.float32, address=(0, 0))
        b = nl.ndarray((8, 8), dtype=nl.float32, address=(0, 0))
        out = nl.ndarray((4, 8, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        for i in range(4):
            tile = a if i % 2 else b
            nisa.dma_copy(dst=tile, src=x)
            nisa.dma_copy(dst=out[i], src=tile)
        return out

    assert codes(kernel, X) == []


@pytest.mark.parametrize(("first", "expected"), [(0, ["NKW-RACE"]), (1, []), (2, ["NKW-RACE"])])
def test_cores_race_by_bytes_and_not_by_boxes(first: int, expected: list[str]) -> None:
    def kernel(x):
        core = nl.program_id(0)
        out = nl.ndarray((8, 10), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        if core == 0:
            nisa.dma_copy(dst=out[:, 8:10], src=nl.load(x[:, 0:2]))
        columns = slice(first * core, first * core + 7, 2)
        tile = nl.load(x[:, 0:8:2])
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=float(core))
        nisa.dma_copy(dst=out[:, columns], src=tile)
        return out

    reported = [code for code in codes(kernel, X, cores=2) if code != "NKW-OUTPUT-PARTIAL"]
    assert sorted(set(reported)) == expected


@pytest.mark.parametrize("rendezvous", ["barrier", "sendrecv"])
def test_a_rendezvous_between_two_accesses_orders_them(rendezvous: str) -> None:
    def kernel(x):
        core = nl.program_id(0)
        shared = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="shared")
        tile = nl.load(x)
        if core == 0:
            nisa.dma_copy(dst=shared, src=tile)
        if rendezvous == "barrier":
            nisa.core_barrier(data=shared, cores=(0, 1))
        else:
            other = nl.ndarray((8, 8), dtype=nl.float32)
            nisa.sendrecv(src=tile, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        out = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        rows = nl.ds(core * 4, 4)
        nisa.dma_copy(dst=out[rows], src=nl.load(shared[rows]))
        return out

    assert codes(kernel, X, cores=2) == []


@pytest.mark.parametrize(
    ("scale", "writes_first", "racing"), [(0.0, True, False), (0.0, False, True), (1.0, True, True)]
)
def test_a_core_may_read_back_bytes_that_both_write_equally(
    scale: float, writes_first: bool, racing: bool
) -> None:
    """A core reads its own bytes in every order, unless the other core writes different ones."""

    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
        out = nl.ndarray((16, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=scale * core)
        if writes_first or core == 0:
            nisa.dma_copy(dst=scratch, src=tile)
        nisa.dma_copy(dst=out[nl.ds(core * 8, 8)], src=nl.load(scratch))
        return out

    reported = findings(kernel, np.ones((8, 4), np.float32), cores=2)
    races = [
        finding for finding in reported if finding.code == "NKW-RACE" and finding.severity is Severity.error
    ]
    assert bool(races) is racing, [str(finding) for finding in reported]


@pytest.mark.parametrize(("apart", "severities"), [(0.0, ["warning"]), (1.0, ["error"])])
def test_equal_bytes_at_a_place_found_at_run_time_are_a_warning(apart: float, severities: list[str]) -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        row = nl.ndarray((1, 1), dtype=nl.int32)
        nisa.memset(dst=row, value=0)
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=apart * nl.program_id(0))
        nisa.dma_copy(dst=out.ap(pattern=[[4, 8], [1, 4]], scalar_offset=row), src=tile)
        return out

    reported = findings(kernel, np.ones((8, 4), np.float32), cores=2)
    assert [finding.severity.value for finding in reported if finding.code == "NKW-RACE"] == severities


def races(kernel: Any, *arguments: Any) -> list[str]:
    reported = findings(kernel, *arguments, cores=2)
    return sorted({finding.severity.value for finding in reported if finding.code == "NKW-RACE"})


@pytest.mark.parametrize("where", ["rows", "scatter", "words"])
@pytest.mark.parametrize(("apart", "severities"), [(0.0, ["warning"]), (1.0, ["error"])])
def test_equal_bytes_where_two_parts_overlap_are_a_warning(
    where: str, apart: float, severities: list[str]
) -> None:
    def kernel(x: Any, ids: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        rows = nl.ds(core * 3, 5)
        tile = nl.load(x[rows])
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=apart * core)
        if where == "rows":
            nisa.dma_copy(dst=out[rows], src=tile)
        elif where == "scatter":
            numbers = nl.load(ids[core])
            table = out.ap(pattern=[[4, 5], [1, 4]], vector_offset=numbers, indirect_dim=0)
            nisa.dma_copy(dst=table, src=tile)
        elif core:
            nisa.dma_copy(dst=out.view(nl.int16)[rows], src=tile.view(nl.int16))
        else:
            nisa.dma_copy(dst=out[rows], src=tile)
        return out

    ids = np.array([[[0], [1], [2], [3], [4]], [[3], [4], [5], [6], [7]]], np.int32)
    assert races(kernel, np.arange(32, dtype=np.float32).reshape(8, 4), ids) == severities


@pytest.mark.parametrize(
    ("apart", "all_rows", "most"),
    [(0.0, True, "warning"), (1.0, True, "error"), (0.0, False, "error")],
)
def test_both_cores_may_copy_a_result_onto_itself_that_both_have_stored(
    apart: float, all_rows: bool, most: str
) -> None:
    """The copy has the bytes of its own core; a core that has stored half of them may undo what the other stores."""

    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        if core == 0:
            nisa.dma_copy(dst=out, src=nl.zeros((8, 4), dtype=nl.float32))
        nisa.core_barrier(data=out, cores=(0, 1))
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=apart * core)
        for first in (0, 4) if all_rows else (core * 4,):
            nisa.dma_copy(dst=out[nl.ds(first, 4)], src=tile)
        nisa.dma_copy(dst=out, src=out)
        return out

    assert races(kernel, np.ones((4, 4), np.float32))[0] == most


@pytest.mark.parametrize(
    ("store", "fences", "most"), [(None, 2, "warning"), (0, 1, "error"), (1, 1, "error"), (0, 2, "error")]
)
def test_fences_after_a_barrier_are_benign_unless_a_core_stores(
    store: int | None, fences: int, most: str
) -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        nisa.dma_copy(dst=out[nl.ds(core * 4, 4)], src=nl.load(x[nl.ds(core * 4, 4)]))
        nisa.core_barrier(data=out, cores=(0, 1))
        if core == store:
            nisa.dma_copy(dst=out[0:1], src=nl.zeros((1, 4), dtype=nl.float32))
        if fences == 2 or core != store:
            nisa.dma_copy(dst=out, src=out)
        return out

    assert races(kernel, np.ones((8, 4), np.float32))[0] == most


def test_a_cast_onto_itself_is_no_fence() -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        if core == 0:
            nisa.dma_copy(dst=out, src=nl.load(x))
        nisa.core_barrier(data=out, cores=(0, 1))
        if core == 0:
            nisa.dma_copy(dst=out.view(nl.int32), src=out)
        else:
            nl.load(out)
        return out

    assert races(kernel, np.ones((8, 4), np.float32)) == ["error"]


@pytest.mark.parametrize(("again", "severities"), [(True, ["warning"]), (False, ["error"])])
def test_bytes_written_before_a_barrier_may_have_been_overwritten(again: bool, severities: list[str]) -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        tile = nl.load(x)
        if core == 1:
            nisa.dma_copy(dst=scratch, src=tile)
        nisa.core_barrier(data=scratch, cores=(0, 1))
        if core == 0:
            nisa.dma_copy(dst=scratch, src=nl.zeros((8, 4), dtype=nl.float32))
        nisa.core_barrier(data=scratch, cores=(0, 1))
        if core == 0 or again:
            nisa.dma_copy(dst=scratch, src=tile)
        if core == 1:
            nisa.dma_copy(dst=out, src=nl.load(scratch))
        return out

    assert races(kernel, np.ones((8, 4), np.float32)) == severities


def test_two_cores_may_read_the_same_input() -> None:
    def kernel(x):
        core = nl.program_id(0)
        out = nl.ndarray((2, 8, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        nisa.dma_copy(dst=out[core], src=nl.load(x))
        return out

    assert codes(kernel, X, cores=2) == []


@pytest.mark.parametrize(("top", "expected"), [(240, []), (256, ["NKW-FP8-RANGE"])])
def test_the_largest_fp8_value_of_the_chip(top: float, expected: list[str]) -> None:
    def kernel(x):
        wide = nl.ndarray((4, 4), dtype=nl.float32)
        nisa.tensor_copy(dst=wide, src=nl.load(x))
        return copied_out(wide)

    values = np.full((4, 4), top, ml_dtypes.float8_e4m3fn)
    assert codes(kernel, values) == expected
    assert codes(kernel, values, target="trn3") == []


@pytest.mark.parametrize(
    ("value", "expected"), [(2**24, []), (2**24 + 1, ["NKW-INT-FLOAT32"]), (2**24 + 2, [])]
)
def test_integers_are_reported_where_float32_loses_them(value: int, expected: list[str]) -> None:
    def kernel(x):
        tile = nl.load(x)
        result = nl.ndarray((4, 4), dtype=nl.int32)
        nisa.tensor_scalar(dst=result, data=tile, op0=nl.add, operand0=0.0)
        return copied_out(result)

    assert codes(kernel, np.full((4, 4), value, np.int32)) == expected


@pytest.mark.parametrize(("target", "expected"), [("trn2", ["NKW-PSUM-INIT"]), ("trn3", [])])
def test_accumulating_onto_a_memset_depends_on_the_generation(target: str, expected: list[str]) -> None:
    def kernel(x):
        tile = nl.load(x)
        sums = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.memset(dst=sums, value=0.0)
        nisa.nc_matmul(dst=sums, stationary=tile, moving=tile)
        result = nl.ndarray((8, 8), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        return copied_out(result)

    assert codes(kernel, X, target=target) == expected


@pytest.mark.parametrize(("first", "expected"), [(0, []), (4, ["NKW-PSUM-INIT"])])
def test_a_sum_that_overwrites_a_part_of_a_memset_is_its_own(first: int, expected: list[str]) -> None:
    def kernel(x):
        tile = nl.load(x)
        sums = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.memset(dst=sums, value=0.0)
        nisa.nc_matmul(dst=sums[:, 0:4], stationary=tile, moving=tile[:, 0:4], accumulate=False)
        columns = sums[:, first : first + 4]
        nisa.nc_matmul(dst=columns, stationary=tile, moving=tile[:, 4:8], accumulate=True)
        result = nl.ndarray((8, 8), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        return copied_out(result)

    assert codes(kernel, X, target="trn2") == expected


def test_random_outputs_are_not_constant() -> None:
    def kernel(x):
        noise = nl.ndarray((8, 8), dtype=nl.uint32)
        nisa.set_rng_seed(src_seeds=nl.load(x)[0:1, 0:1])
        nisa.rng(dst=noise)
        return copied_out(noise)

    assert codes(kernel, X) == []


def test_reports_are_the_same_in_every_run() -> None:
    def kernel(x, unused, unread):
        core = nl.program_id(0)
        out = nl.ndarray((9, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=float(core))
        nisa.dma_copy(dst=out[0:8], src=tile)
        return out

    reports = {"\n".join(map(str, findings(kernel, X, X + 1, X + 2, cores=2))) for _ in range(5)}
    assert len(reports) == 1
    assert [line.split("]")[0] for line in reports.pop().split("\n") if line[0] != " "] == [
        "error[NKW-RACE",
        "warning[NKW-INPUT-UNUSED",
        "warning[NKW-INPUT-UNUSED",
        "warning[NKW-OUTPUT-PARTIAL",
    ]


def test_launches_without_an_observer_are_not_gathered() -> None:
    def kernel(x):
        return copied_out(nl.load(x))

    simulate.World("trn2").launch(kernel, [((X,), {})])
    with gathered() as seen:
        pass
    assert seen.launches == []


@pytest.mark.parametrize(("offset", "meets"), [(3, True), (4, False)])
def test_footprints_of_different_widths_meet_by_bytes(offset: int, meets: bool) -> None:
    words = Footprint(0, 4, 1, (1,), (1,))
    assert words.meets(Footprint(0, 2, offset, (1,), (1,))) is meets
    assert not words.meets(Footprint(1, 2, offset, (1,), (1,)))


def test_explicit_addresses_that_are_used_in_turn_are_compared_with_their_neighbours_in_time() -> None:
    """A clobbered tile is found among two hundred that share its place one after another."""

    def kernel(x: Any, sick: bool) -> Any:
        out = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = None
        for turn in range(201):
            before, tile = (
                tile,
                nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.sbuf, address=(0, turn % 2 * 16)),
            )
            nisa.dma_copy(dst=tile, src=x)
            if turn == 200 and sick:
                other = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.sbuf, address=(0, 16), name="intruder")
                nisa.memset(other, value=0)
                nisa.tensor_tensor(dst=tile, data1=before, data2=other, op=nl.add)
        nisa.dma_copy(dst=out, src=tile)
        return out

    x = np.ones((2, 4), np.float32)
    for sick, expected in ((False, []), (True, ["NKW-MEM-CLOBBER"])):
        assert [finding.code for finding in findings(kernel, x, sick)] == expected


def test_the_index_of_a_value_that_is_not_found_is_no_loss() -> None:
    """All ones, 2**32 - 1, is no float32; it comes from a float32 that saturates."""

    def kernel(x):
        indices = nl.ndarray((8, 8), dtype=nl.uint32)
        targets = nl.ndarray((8, 8), dtype=nl.uint32)
        nisa.memset(dst=targets, value=100)
        nisa.nc_find_index8(dst=indices, data=nl.load(x), vals=targets)
        out = nl.ndarray((8, 8), dtype=nl.uint32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=indices)
        return out

    assert codes(kernel, np.arange(64, dtype=np.uint32).reshape(8, 8)) == []


@pytest.mark.parametrize(("vanishing", "expected"), [(7, []), (8, []), (9, ["NKW-FP8-UNDERFLOW"])])
def test_more_than_half_of_the_elements_vanish_before_a_cast_to_fp8_is_reported(
    vanishing: int, expected: list[str]
) -> None:
    def kernel(x):
        small = nl.ndarray((1, 16), dtype=nl.float8_e4m3)
        nisa.tensor_copy(dst=small, src=nl.load(x))
        return copied_out(small)

    x = np.full((1, 16), 0.1, np.float32)
    x[0, :vanishing] = 2.0**-20
    assert codes(kernel, x) == expected


@pytest.mark.parametrize(("factor", "expected"), [(1e30, ["NKW-NONFINITE"]), (1.0, [])])
def test_an_infinity_of_the_input_explains_its_own_element_alone(factor: float, expected: list[str]) -> None:
    def kernel(x):
        tile, squares = nl.load(x), nl.ndarray((4, 4), dtype=nl.float32)
        nisa.tensor_tensor(dst=squares, data1=tile, data2=tile, op=nl.multiply)
        return copied_out(squares)

    x = np.ones((4, 4), np.float32)
    x[0, 0], x[2, 1] = np.inf, factor
    assert codes(kernel, x) == expected
