"""local_gather: the published example, offsets, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import OutOfBounds
from tests.isa.reference import FLOATS, INTEGERS, assert_same_bits, every_bit_pattern, sample
from tests.isa.tiles import PSUM, TARGETS, Fresh, execute, plan, tile, twins

NAME = "local_gather"


def call(**changes):
    return {"dst": tile((32, 48)), "src_buffer": tile((32, 100)), "index": tile((32, 3), "uint16"), **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("run", [1, 2, 4, 8, 16, 32])
def test_accepts_runs_of_powers_of_two(target, run):
    plan(target, NAME, **call(dst=tile((32, 48, run)), num_elem_per_idx=run))


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    (
        "NKW-GATHER-RUN",
        {"num_elem_per_idx": 3, "dst": tile((32, 144))},
        {"num_elem_per_idx": 2, "dst": tile((32, 96))},
    ),
    ("NKW-GATHER-RUN", {"num_elem_per_idx": 64}, {}),
    ("NKW-DTYPE-ALLOWED", {"index": tile((32, 3), "uint32")}, {"index": tile((32, 3), "uint16")}),
    ("NKW-SAME-DTYPE", {"dst": tile((32, 48), "bfloat16")}, {}),
    ("NKW-PARTITIONS-AGREE", {"index": tile((16, 3), "uint16")}, {}),
    ("NKW-PARTITIONS-AGREE", {"dst": tile((16, 48))}, {}),
    (
        "NKW-GATHER-CORES",
        {"dst": tile((24, 48)), "src_buffer": tile((24, 100)), "index": tile((24, 3), "uint16")},
        {"dst": tile((16, 48)), "src_buffer": tile((16, 100)), "index": tile((16, 3), "uint16")},
    ),
    ("NKW-GATHER-SAME-CORES", {"index": tile((32, 3), "uint16", start_partition=32)}, {}),
    ("NKW-GATHER-COUNT", {"num_valid_indices": 49, "dst": tile((32, 49))}, {"num_valid_indices": 48}),
    ("NKW-GATHER-COUNT", {"num_valid_indices": 0}, {"num_valid_indices": 1, "dst": tile((32, 1))}),
    (
        "NKW-GATHER-COUNT",
        {"index": tile((32, 257), "uint16"), "dst": tile((32, 4112))},
        {"index": tile((32, 256), "uint16"), "dst": tile((32, 4096))},
    ),
    ("NKW-GATHER-OUTPUT", {"dst": tile((32, 47))}, {"dst": tile((32, 47)), "num_valid_indices": 47}),
    ("NKW-BUFFER", {"src_buffer": tile((32, 100), buffer=PSUM)}, {}),
)


@pytest.mark.parametrize("partitions", [16, 48, 128])
def test_the_published_example_with_rows_of_four(partitions):
    source = sample("float32", (partitions, 512, 4))
    rows = (sample("uint16", (partitions, 4)) % 512).astype(np.uint16)
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((partitions, 4, 16, 4)),
        src_buffer=source,
        index=rows * np.uint16(4),
        num_elem_per_idx=4,
        num_valid_indices=64,
    )["dst"]
    for p in range(partitions):
        core = rows[p // 16 * 16 : p // 16 * 16 + 16]
        for j in range(64):
            assert result[p].reshape(64, 4)[j].tolist() == source[p, core[j % 16, j // 16]].tolist()


def test_a_list_cut_short_and_overlapping_runs():
    source = sample("int16", (32, 50))
    index = (sample("uint16", (32, 2)) % 49).astype(np.uint16)
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((32, 42), "int16"),
        src_buffer=source,
        index=index,
        num_elem_per_idx=2,
        num_valid_indices=21,
    )["dst"]
    for p in range(32):
        for j in range(21):
            start = int(index[p // 16 * 16 + j % 16, j // 16])
            assert result[p, 2 * j : 2 * j + 2].tolist() == source[p, start : start + 2].tolist()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_bits_are_kept(dtype):
    source = every_bit_pattern(dtype, (16, 16))
    index = np.arange(16, dtype=np.uint16)[::-1].reshape(16, 1).copy()
    result = execute("trn2", NAME, dst=Fresh((16, 16), dtype), src_buffer=source, index=index)["dst"]
    assert_same_bits(result, source[:, ::-1].copy())


@pytest.mark.parametrize(("run", "last"), [(1, 9), (4, 6)])
def test_refuses_an_offset_whose_run_leaves_the_partition(run, last):
    source = sample("float32", (16, 10))
    for highest, inside in ((last, True), (last + 1, False)):
        index = np.zeros((16, 1), np.uint16)
        index[5] = highest
        call = {"dst": Fresh((16, 16 * run)), "src_buffer": source, "index": index, "num_elem_per_idx": run}
        if inside:
            execute("trn2", NAME, **call)
        else:
            with pytest.raises(OutOfBounds, match="NKW-GATHER-OFFSET"):
                execute("trn2", NAME, **call)


def test_longer_runs_cost_less_per_element():
    intervals = [
        plan("trn2", NAME, **call(dst=tile((32, 48 * run)), num_elem_per_idx=run)).cost.interval_cycles / run
        for run in (1, 8, 32)
    ]
    assert intervals == sorted(intervals, reverse=True)
    # 28 + 4 cycles for a batch of four single elements of four bytes, after the fixed start of 150
    assert intervals[0] == 150 + 48 * 32 / 4
