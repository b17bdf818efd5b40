"""Messages name operands by the instruction's parameter and the kernel's variable, and say what would work."""

from pathlib import Path

import nki
import nki.collectives as nccl
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.errors import Deadlock, InvalidArgument, NkwError, RuleViolation
from simulate.check import detect, gathered, sort_findings
from simulate.occupancy import occupancies

ROWS = np.ones((128, 16), np.float32)


class Holder:
    """Something that keeps a tile in an attribute."""


def shorter(dst, rows):
    nisa.tensor_copy(dst=dst, src=rows)  # the helper's line


def through_a_helper(x):
    rows = nl.load(x)
    half = nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf)
    shorter(half, rows)  # the caller's line
    return x


def refusal(kernel, *arguments):
    with pytest.raises(RuleViolation) as refused:
        nki.simulate(kernel)(*arguments)
    return refused.value


def line_of(function, mark):
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n, line in enumerate(lines, 1) if n >= first and mark in line)


def test_an_operand_has_its_parameter_its_variable_and_its_allocation() -> None:
    text = str(refusal(through_a_helper, ROWS))
    allocated = line_of(through_a_helper, "half =")
    assert (
        f"\n  dst = half (64, 16) float32 in sbuf (allocated at tests/run/test_messages.py:{allocated})\n"
        in text
    )
    assert "\n  src = rows (128, 16) float32 in sbuf (allocated at " in text


def test_a_line_in_a_helper_comes_with_its_callers() -> None:
    error = refusal(through_a_helper, ROWS)
    inner, outer = line_of(shorter, "# the helper's line"), line_of(through_a_helper, "# the caller's line")
    assert str(error).splitlines()[-2:] == [
        f"  at tests/run/test_messages.py:{inner} in shorter",
        f"  called at tests/run/test_messages.py:{outer} in through_a_helper",
    ]


def test_a_line_in_the_kernel_has_no_callers() -> None:
    def kernel(x):
        rows = nl.load(x)
        rows.reshape((64, 32))

    error = refusal(kernel, ROWS)
    assert error.callers == ()
    assert str(error).splitlines()[-1].endswith(" in kernel")
    assert "rows (128, 16)" in str(error)


def test_a_view_out_of_bounds_names_its_tensor() -> None:
    def kernel(x):
        rows = nl.load(x)
        return rows[0:129]

    text = str(refusal(kernel, ROWS))
    assert "slice 0:129 on dim 0 of size 128" in text
    assert "\n  tensor = rows (128, 16) float32 in sbuf" in text
    assert "clip the end: min(129, 128)" in text


def test_an_allocation_that_is_refused_names_the_variable() -> None:
    def kernel(x):
        wide = nl.ndarray((129, 16), dtype=nl.float32, buffer=nl.sbuf)
        return wide

    assert str(refusal(kernel, ROWS)).startswith("[NKW-TILE-SHAPE] allocation of wide: ")


def named(allocate):
    """Return the label of the tile in the error of a kernel that writes 64 rows into 128."""

    def kernel(x):
        tile = allocate(nl.load(x))
        nisa.tensor_copy(dst=tile, src=nl.load(x))

    return refusal(kernel, ROWS).operands["dst"].partition(" (64, 16)")[0]


def test_names_of_attributes_elements_lists_and_several_targets() -> None:
    def new():
        return nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf)

    def attribute(x):
        holder = Holder()
        holder.sums = nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf)
        return holder.sums

    def element(x):
        tiles = {}
        tiles["left"] = nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf)
        return tiles["left"]

    def listed(x):
        tiles = [nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf) for _ in range(2)]
        return tiles[1]

    def annotated(x):
        sums: object = nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf)
        return sums

    def two_on_two_lines(x):
        _, other = (
            nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf),
            nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf),
        )
        return other

    def two_on_one_line(x):
        one, other = nl.ndarray((64, 16), dtype=nl.float32), nl.ndarray((64, 16), dtype=nl.float32)
        return (one, other)[1]

    def named_tensor(x):
        tile = nl.ndarray((64, 16), dtype=nl.float32, buffer=nl.sbuf, name="weights")
        return tile

    makers = (attribute, element, listed, annotated, two_on_two_lines, two_on_one_line, named_tensor)
    names = ["holder.sums", "tiles['left']", "tiles", "sums", "other", "one or other", "weights"]
    assert [named(maker) for maker in makers] == names
    assert (
        named(lambda x: new())
        == "(64, 16) float32 in sbuf (allocated at tests/run/test_messages.py:"
        + str(line_of(test_names_of_attributes_elements_lists_and_several_targets, "return nl.ndarray"))
        + ")"
    )


def test_a_tile_has_one_name_in_memory_findings_and_traces() -> None:
    def kernel(x):
        rows = nl.load(x)
        out = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=rows)
        return out

    with simulate.recorded(calls=True) as launches:
        nki.simulate(kernel)(ROWS)
    names = {record.name for record in launches[0].streams[0].tensors}
    assert names == {"x", "rows", "out"}
    assert {source.name for source in occupancies(launches[0])[0].sbuf.sources} == {"rows"}


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ((slice(0, 32), slice(0, 16)), (slice(0, 128), slice(0, 16)), "rows 32 to 127, columns 0 to 15 were"),
        ((slice(0, 128), slice(0, 15)), (slice(0, 128), slice(8, 16)), "rows 0 to 127, column 15 of"),
        (
            (slice(0, 128), slice(0, 16, 2)),
            (slice(0, 128), slice(0, 16)),
            "columns 1, 3, 5 and 5 more runs were",
        ),
        (
            (slice(0, 64), slice(0, 8)),
            (slice(0, 128), slice(0, 16)),
            "1536 elements in rows 0 to 127, columns",
        ),
        ((slice(0, 32), slice(0, 16)), (slice(64, 128), slice(0, 16)), "nothing was ever written"),
    ],
)
def test_an_unwritten_read_says_which_rows_and_columns(written, read, message) -> None:
    def kernel(x):
        tile = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(tile[written], value=0.0)
        out = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[read], src=tile[read])
        return out

    error = refusal(kernel, ROWS)
    assert error.code == "NKW-UNWRITTEN"
    assert message in error.seen and "tile (" in error.seen
    assert error.operands["src"].startswith("tile ")


def test_unwritten_rows_of_more_dims_are_slices() -> None:
    def kernel(x):
        tile = nl.ndarray((128, 2, 8), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(tile[0:128, 0:1], value=0.0)
        out = nl.ndarray((128, 2, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)

    assert "[0:128, 1, 0:8] were never written" in refusal(kernel, ROWS).seen


def test_a_rank_outside_every_group_is_said_to_be_that() -> None:
    def kernel(x, groups):
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.private_hbm)
        inner = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(dst=inner, src=x)
        nccl.all_reduce(srcs=[inner], dsts=[out], replica_group=nccl.ReplicaGroup(groups), op=nl.add)

    def launched(groups, ranks=2):
        with pytest.raises(NkwError) as refused:
            simulate.World("trn2", ranks).launch(
                kernel, [((np.ones((4, 4), np.float32), groups), {})] * ranks
            )
        return refused.value

    outside = launched([[0]])
    assert outside.seen == "rank 1, which calls it, lies outside every group: [[0]]"
    assert outside.hint == "list rank 1, or let only ranks of a group call it"
    assert launched([[1, 2]]).hint == "count the ranks from 0"
    beyond = launched([[0, 1, 2]])
    assert isinstance(beyond, Deadlock)
    assert "there is no rank 2; this launch has 2 ranks" in str(beyond)


def test_a_missing_core_and_a_refused_grid_say_what_sets_the_logical_core() -> None:
    def kernel(x):
        shared = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.core_barrier(data=shared, cores=(0, 1))

    with pytest.raises(Deadlock) as waits:
        nki.simulate(kernel)(ROWS)
    with pytest.raises(InvalidArgument) as refused:
        simulate.World("trn1", 1, 2)
    for error in (waits.value, refused.value):
        assert "kernel[2] up to NKI 0.6" in str(error)
        assert "NEURON_LOGICAL_NC_CONFIG=2 at level 0.7" in str(error)
    assert "there is no core 1; this launch has 1 core" in str(waits.value)


def findings_of(kernel, *arguments):
    with gathered() as seen:
        nki.simulate(kernel)(*arguments)
    return sort_findings(
        finding for launch, evidence in seen.launches for finding in detect(launch, evidence)
    )


@pytest.mark.parametrize(
    ("value", "hint"),
    [(np.inf, "clipping would only hide it"), (-1.0, "clip it at a small positive number")],
)
def test_the_root_of_infinity_is_not_cured_by_clipping(value, hint) -> None:
    def kernel(x):
        out = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        root = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=root, op=nl.sqrt, data=nl.load(x))
        nisa.dma_copy(dst=out, src=root)
        return out

    (finding,) = findings_of(kernel, np.full((128, 16), value, np.float32))
    assert finding.code == "NKW-FUNCTION-RANGE" and hint in finding.hint


def clobbered(offsets, columns=512):
    """Return the finding for tiles of one PSUM bank at these bytes; the last, of `columns`, overwrites the first."""

    def kernel(x):
        first = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum, address=(0, offsets[0]))
        nisa.memset(first, value=1.0)
        tiles = []
        for offset in offsets[1:-1]:
            tiles.append(nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum, address=(0, offset)))
            nisa.memset(tiles[-1], value=1.0)
        last = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.psum, address=(0, offsets[-1]))
        nisa.memset(last, value=2.0)
        out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=total, src=last[:, 0:512])
        for tile in [first, *tiles]:
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        nisa.dma_copy(dst=out, src=total)
        return out

    return next(finding for finding in findings_of(kernel, ROWS) if finding.code == "NKW-MEM-CLOBBER")


def test_a_hint_for_psum_names_a_bank_that_is_free() -> None:
    assert clobbered([0, 2048, 0]).hint.startswith("put last at byte 4096 (bank 2), which is free, or ")
    no_two_banks_in_a_row = [0, 2 * 2048, *range(4 * 2048, 8 * 2048, 2048), 0]
    assert clobbered(no_two_banks_in_a_row, 1024).hint == "read first before that write"


def test_a_matmul_over_a_border_is_told_where_the_bank_begins() -> None:
    def kernel(x, y):
        left, right = nl.load(x), nl.load(y)
        sums = nl.ndarray((16, 1024), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums[:, 400:600], stationary=left, moving=right)

    hint = refusal(kernel, ROWS, np.ones((128, 200), np.float32)).hint
    assert hint == "begin at element 312 or 512 of the partition in place of 400, or split the result at 512"


def test_an_address_between_banks_is_told_the_bank() -> None:
    def kernel(x):
        nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, address=(0, 3000))

    hint = refusal(kernel, ROWS).hint
    assert hint == "address=(0, 2048); bank b starts at byte 2048 * b, for b below 8"
