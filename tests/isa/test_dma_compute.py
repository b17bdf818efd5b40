"""dma_compute: sums of tensors, read-modify-write by row, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from nkw.errors import OutOfBounds
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import HBM, PSUM, TARGETS, plan, refuses, tile, twins

NAME = "dma_compute"
OOB = nisa.oob_mode


def call(sources=2, **changes):
    return {"dst": tile((8, 6)), "srcs": [tile((8, 6), buffer=HBM)] * sources, "reduce_op": nl.add, **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sources", [1, 2, 16])
def test_accepts_up_to_16_sources(target, sources):
    plan(target, NAME, **call(sources, scales=[1.0] * sources))
    refuses("NKW-DMA-COMPUTE-SOURCES", target, NAME, **call(17))
    refuses("NKW-DMA-COMPUTE-SOURCES", target, NAME, **call(0))


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-DMA-COMPUTE-SOURCES", {"srcs": tile((8, 6))}, {"srcs": (tile((8, 6)),)}),
    ("NKW-DMA-COMPUTE-OPERATOR", {"reduce_op": nl.maximum}, {"reduce_op": np.add}),
    ("NKW-DMA-COMPUTE-SCALES", {"scales": [1.0, 2.0]}, {"scales": [1.0, 1.0]}),
    ("NKW-DMA-COMPUTE-SCALES", {"scales": [1.0]}, {"scales": None}),
    (
        "NKW-DMA-COUNT",
        {"srcs": [tile((8, 6)), tile((8, 5))]},
        {"srcs": [tile((8, 6)), tile((4, 12), buffer=HBM)]},
    ),
    ("NKW-BUFFER", {"dst": tile((8, 6), buffer=PSUM)}, {"dst": tile((8, 6), buffer=HBM)}),
    ("NKW-BUFFER", {"srcs": [tile((8, 6), buffer=PSUM)]}, {"srcs": [tile((8, 6))]}),
    ("NKW-PACKED-DTYPE", {"dst": tile((8, 6), "float4_e2m1fn_x4")}, {"dst": tile((8, 6), "uint16")}),
    ("NKW-DMA-COMPUTE-SKIP", {"oob_mode": OOB.skip}, {"oob_mode": OOB.error}),
)


def run(kernel, *arrays):
    return simulate.launch(kernel, [(arrays, {})]).outputs[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_adds_in_float32_and_rounds_once(dtype):
    def kernel(a, b, c):
        out = nl.ndarray(a.shape, dtype=dtype, buffer=nl.shared_hbm)
        nisa.dma_compute(dst=out, srcs=[a, nl.load(b), c], reduce_op=nl.add)
        return out

    a, b, c = (sample("bfloat16", (7, 9), seed) for seed in "abc")
    exact = (
        a.astype(np.float64) + b.astype(np.float64) + c.astype(np.float64)
    )  # of bfloat16s: exact in float32
    assert_same(run(kernel, a, b, c), through_float32(exact, dtype))


def test_a_single_source_is_copied():
    def kernel(a):
        out = nl.ndarray((3, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.ones((3, 4), dtype=nl.float32))
        nisa.dma_compute(dst=out, srcs=[a], reduce_op=nl.add)
        return out

    a = sample("float32", (3, 4))
    assert_same(run(kernel, a), a)


def scatter(table, data, rows, skip):
    def kernel(target, values, numbers):
        result = nl.ndarray(target.shape, dtype=target.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=target)
        width = target.shape[1]
        dst = result.ap(pattern=[[width, values.shape[0]], [1, width]], vector_offset=nl.load(numbers))
        mode = OOB.skip if skip else OOB.error
        nisa.dma_compute(dst=dst, srcs=[dst, nl.load(values)], reduce_op=nl.add, oob_mode=mode)
        return result

    return run(kernel, table, data, rows)


def gather(table, data, rows, skip):
    def kernel(source, values, numbers):
        sums = nl.load(values)
        width = source.shape[1]
        src = source.ap(pattern=[[width, values.shape[0]], [1, width]], vector_offset=nl.load(numbers))
        mode = OOB.skip if skip else OOB.error
        nisa.dma_compute(dst=sums, srcs=[src, sums], reduce_op=nl.add, oob_mode=mode)
        out = nl.ndarray(values.shape, dtype=values.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=sums)
        return out

    return run(kernel, table, data, rows)


@pytest.mark.parametrize("skip", [False, True])
def test_read_modify_write_by_row(skip):
    table, data = np.round(sample("float32", (10, 5))), np.round(sample("float32", (4, 5)))
    rows = np.array([[7], [0], [9], [3]], np.int32)
    if skip:
        rows[2] = 10
    scattered, summed = table.astype(float), data.astype(float)
    for position, (row,) in enumerate(rows):
        if row < 10:
            scattered[row] += data[position]
            summed[position] += table[row]
    assert_same(scatter(table, data, rows, skip), scattered)
    assert_same(gather(table, data, rows, skip), summed)


def test_rows_out_of_range_are_refused():
    table, data, rows = np.zeros((4, 2), np.float32), np.zeros((1, 2), np.float32), np.array([[4]], np.int32)
    for way in (scatter, gather):
        with pytest.raises(OutOfBounds, match="index 4 is out of bounds"):
            way(table, data, rows, False)


def test_read_modify_write_names_its_destination_as_a_source():
    table, index = tile((20, 6), buffer=HBM), tile((8, 1), "int32")
    rows, data = table.ap([[6, 8], [1, 6]], vector_offset=index), tile((8, 6))
    other_rows = table.ap([[6, 8], [1, 6]], vector_offset=tile((8, 1), "int32"))
    same_rows = table.ap([[6, 8], [1, 6]], vector_offset=index)
    accepted = [
        (rows, [rows, data]),
        (rows, [data, rows]),
        (rows, [same_rows, data]),
        (data, [data, rows]),
        (data, [data.ap([[6, 8], [1, 6]]), rows]),
    ]
    refused = [
        (rows, [data, data]),
        (rows, [rows]),
        (rows, [rows, data, data]),
        (rows, [other_rows, data]),
        (rows, [rows, tile((8, 6), buffer=HBM)]),
        (data, [rows, tile((8, 6))]),
        (data, [rows]),
    ]
    for dst, srcs in accepted:
        plan("trn2", NAME, dst=dst, srcs=srcs, reduce_op=nl.add, oob_mode=OOB.skip)
        refuses(
            "NKW-DMA-COMPUTE-UNIQUE", "trn2", NAME, dst=dst, srcs=srcs, reduce_op=nl.add, unique_indices=False
        )
    for dst, srcs in refused:
        refuses("NKW-DMA-COMPUTE-ROWS", "trn2", NAME, dst=dst, srcs=srcs, reduce_op=nl.add)


def test_later_generations_add_at_the_full_rate():
    rates = {
        t: plan(t, NAME, **call()).cost.dma.busy_ns
        / plan(t, "dma_copy", dst=tile((8, 12)), src=tile((8, 12), buffer=HBM)).cost.dma.busy_ns
        for t in ("trn2", "trn3")
    }
    assert rates["trn3"] < rates["trn2"]
