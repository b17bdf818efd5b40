"""nc_n_gather, sequence_bounds and nonzero_with_count: results and refusals."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from nkw.errors import OutOfBounds, RuleViolation
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import FLOATS, INTEGERS, assert_same, assert_same_bits, every_bit_pattern, sample
from tests.isa.tiles import PARTITIONS, PSUM, TARGETS, Fresh, execute, plan, refuses, tile, twins


def gather(**changes):
    return {"dst": tile((8, 6)), "data": tile((8, 9)), "indices": tile((8, 6), "uint32"), **changes}


@pytest.mark.parametrize("target", TARGETS)
def test_nc_n_gather_takes_every_chip(target):
    plan(target, "nc_n_gather", **gather())


test_nc_n_gather_refuses_and_accepts_the_twin = twins(
    "trn2",
    "nc_n_gather",
    gather,
    ("NKW-DTYPE-ALLOWED", {"indices": tile((8, 6), "int32")}, {"indices": tile((8, 3, 2), "uint32")}),
    ("NKW-SAME-DTYPE", {"dst": tile((8, 6), "int32")}, {}),
    ("NKW-ELEMENTS-AGREE", {"dst": tile((8, 5))}, {"dst": tile((8, 2, 3))}),
    ("NKW-PARTITIONS-AGREE", {"data": tile((7, 9))}, {"data": tile((8, 2))}),
    ("NKW-BUFFER", {"data": tile((8, 9), buffer=PSUM)}, {}),
)


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_nc_n_gather_gathers_within_each_partition(partitions):
    data = sample("float32", (partitions, 3, 7))
    indices = (sample("uint32", (partitions, 30)) % 21).astype(np.uint32)
    result = execute("trn1", "nc_n_gather", dst=Fresh((partitions, 5, 6)), data=data, indices=indices)["dst"]
    for p in range(partitions):
        row = data[p].flatten().tolist()
        assert result[p].flatten().tolist() == [row[i] for i in indices[p]]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_nc_n_gather_keeps_bits(dtype):
    data = every_bit_pattern(dtype, (4, 8))
    indices = np.broadcast_to(np.arange(8, dtype=np.uint32)[::-1], (4, 8)).copy()
    result = execute("trn1", "nc_n_gather", dst=Fresh((4, 8), dtype), data=data, indices=indices)["dst"]
    assert_same_bits(result, data[:, ::-1].copy())


def test_nc_n_gather_refuses_an_index_beyond_data():
    indices = np.array([[0, 4]], np.uint32)
    execute("trn1", "nc_n_gather", dst=Fresh((1, 2)), data=np.zeros((1, 5), np.float32), indices=indices)
    with pytest.raises(OutOfBounds, match="NKW-N-GATHER-INDEX"):
        execute("trn1", "nc_n_gather", dst=Fresh((1, 2)), data=np.zeros((1, 4), np.float32), indices=indices)


def test_nc_n_gather_costs_a_start_per_512_elements():
    costs = [
        plan(
            "trn1", "nc_n_gather", **gather(dst=tile((8, n)), indices=tile((8, n), "uint32"))
        ).cost.interval_cycles
        for n in (511, 512, 513)
    ]
    assert np.diff(costs).tolist() == [1, 151]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_sequence_bounds_takes_every_chip(target, dtype):
    plan(target, "sequence_bounds", dst=tile((1, 2, 9), dtype), segment_ids=tile((1, 9), "int32"))


@pytest.mark.parametrize(
    ("code", "dst", "ids"),
    [
        ("NKW-SEQUENCE-SHAPE", tile((1, 18)), tile((1, 9))),
        ("NKW-SEQUENCE-SHAPE", tile((1, 2, 8)), tile((1, 9))),
        ("NKW-SEQUENCE-SHAPE", tile((1, 2, 9)), tile((1, 3, 3))),
        ("NKW-SEQUENCE-SHAPE", tile((2, 2, 9)), tile((2, 9))),
        ("NKW-DTYPE-ALLOWED", tile((1, 2, 9), "int16"), tile((1, 9))),
        ("NKW-DTYPE-ALLOWED", tile((1, 2, 9)), tile((1, 9), "bfloat16")),
        ("NKW-BUFFER", tile((1, 2, 9)), tile((1, 9), buffer=PSUM)),
    ],
)
def test_sequence_bounds_refuses(code, dst, ids):
    refuses(code, "trn2", "sequence_bounds", dst=dst, segment_ids=ids)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("ids", [[0], [3], [0, 1, 1, 2, 2, 2, 0, 3, 3], [1, 1, 0, 0, 1, 4, 4, 4], [5] * 7])
def test_sequence_bounds_of_runs_of_equal_ids(dtype, ids):
    n = len(ids)
    result = execute(
        "trn1", "sequence_bounds", dst=Fresh((1, 2, n), dtype), segment_ids=np.array([ids], dtype)
    )["dst"]
    starts, ends = [], []
    for i, segment in enumerate(ids):
        first = last = i
        while first and ids[first - 1] == segment:
            first -= 1
        while last + 1 < n and ids[last + 1] == segment:
            last += 1
        starts.append(first if segment else n)
        ends.append(last + 1 if segment else -1)
    assert result.tolist() == [[starts, ends]]


def test_sequence_bounds_tells_large_int32_ids_apart():
    ids = np.array([[2**24, 2**24 + 1]], np.int32)
    result = execute("trn1", "sequence_bounds", dst=Fresh((1, 2, 2), "int32"), segment_ids=ids)["dst"]
    assert result.tolist() == [[[0, 1], [1, 2]]]


@pytest.mark.parametrize("bad", [-1, np.nan])
def test_sequence_bounds_refuses_negative_ids(bad):
    for ids, accepted in (([1.0, bad], False), ([1.0, 0.0], True)):
        call = {"dst": Fresh((1, 2, 2)), "segment_ids": np.array([ids], np.float32)}
        if accepted:
            execute("trn1", "sequence_bounds", **call)
        else:
            with pytest.raises(RuleViolation, match="NKW-SEQUENCE-IDS"):
                execute("trn1", "sequence_bounds", **call)


def count(**changes):
    return {"dst": tile((128, 9), "int32"), "src": tile((128, 8)), **changes}


def test_nonzero_with_count_exists_from_gen3_on():
    refuses("NKW-NONZERO-CHIP", "trn1", "nonzero_with_count", **count())
    for target in ("trn2", "trn3"):
        plan(target, "nonzero_with_count", **count(src=tile((128, 8), "int32")))


test_nonzero_with_count_refuses_and_accepts_the_twin = twins(
    "trn2",
    "nonzero_with_count",
    count,
    ("NKW-DTYPE-ALLOWED", {"src": tile((128, 8), "int8")}, {"src": tile((128, 8), "int32")}),
    ("NKW-DTYPE-ALLOWED", {"dst": tile((128, 9), "uint32")}, {}),
    ("NKW-NONZERO-SIZE", {"dst": tile((128, 8), "int32")}, {"dst": tile((128, 3, 3), "int32")}),
    ("NKW-NONZERO-SIZE", {"dst": tile((128, 10), "int32")}, {}),
    ("NKW-PARTITIONS-AGREE", {"src": tile((127, 8))}, {}),
    ("NKW-NONZERO-INT32", {"index_offset": 2**31}, {"index_offset": 2**31 - 1}),
    ("NKW-NONZERO-INT32", {"padding_val": -(2**31) - 1}, {"padding_val": -(2**31)}),
    ("NKW-NONZERO-INT32", {"padding_val": 0.5}, {"padding_val": 0}),
    ("NKW-BUFFER", {"src": tile((128, 8), buffer=PSUM)}, {}),
)


def test_nonzero_with_count_gives_the_published_example():
    src = np.array([[0, 1, 1, 0, 0, 1, 0, 0]], np.float32)
    result = execute(
        "trn2", "nonzero_with_count", dst=Fresh((1, 9), "int32"), src=src, index_offset=16, padding_val=-1
    )["dst"]
    assert result.tolist() == [[17, 18, 21, -1, -1, -1, -1, -1, 3]]


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_nonzero_with_count_touches_the_first_partition_of_each_core(partitions):
    src = sample("int32", (partitions, 10)) % 2
    before = sample("int32", (partitions, 11))
    result = execute("trn2", "nonzero_with_count", dst=before, src=src.astype(np.int32), padding_val=7)["dst"]
    for p in range(partitions):
        if p % 16:
            assert result[p].tolist() == before[p].tolist()
        else:
            indices = [i for i, x in enumerate(src[p].tolist()) if x]
            assert result[p].tolist() == indices + [7] * (10 - len(indices)) + [len(indices)]


def test_nonzero_with_count_reads_no_other_partition():
    def kernel(x):
        sparse = nl.ndarray((32, 4), dtype=nl.float32)
        nisa.dma_copy(dst=sparse[0:1], src=x[0:1])
        nisa.dma_copy(dst=sparse[16:17], src=x[1:2])
        indices = nl.ndarray((32, 5), dtype=nl.int32)
        nisa.nonzero_with_count(dst=indices, src=sparse)
        out = nl.ndarray((2, 5), dtype=nl.int32, buffer=nl.shared_hbm)
        for row, p in enumerate((0, 16)):
            nisa.dma_copy(dst=out[row : row + 1], src=indices[p : p + 1])
        return out

    x = np.array([[0, 0, 3, 4], [1, 0, 0, 0]], np.float32)
    result = simulate.launch(kernel, [((x,), {})]).outputs[0]
    assert_same(result, [[2, 3, -1, -1, 2], [0, -1, -1, -1, 1]])
