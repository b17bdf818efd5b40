"""nc_stream_shuffle: rows move within quadrants, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same_bits, every_bit_pattern, sample
from tests.isa.tiles import PARTITIONS, TARGETS, execute, plan, tile, twins

NAME = "nc_stream_shuffle"
IDENTITY = list(range(32))


def call(**changes):
    return {"dst": tile((32, 6)), "src": tile((32, 6)), "shuffle_mask": IDENTITY, **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("partitions", [*PARTITIONS, 32, 64, 96])
def test_accepts_every_chip(target, partitions):
    plan(target, NAME, **call(dst=tile((partitions, 6)), src=tile((partitions, 6))))


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-SAME-DTYPE", {"src": tile((32, 6), "int32")}, {"src": tile((32, 6), "float32")}),
    ("NKW-ELEMENTS-AGREE", {"src": tile((32, 7))}, {"src": tile((32, 2, 3))}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": IDENTITY[:31]}, {}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": [*IDENTITY, 0]}, {}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": [32] * 32}, {"shuffle_mask": [31] * 32}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": [254] * 32}, {"shuffle_mask": [255] * 32}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": [-1] * 32}, {"shuffle_mask": [0] * 32}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": [0.5] * 32}, {}),
    ("NKW-SHUFFLE-MASK", {"shuffle_mask": None}, {}),
    (
        "NKW-SHUFFLE-SOURCE",
        {"src": tile((1, 6)), "shuffle_mask": [1] * 32},
        {"src": tile((1, 6)), "shuffle_mask": [0] * 32},
    ),
    (
        "NKW-SHUFFLE-START",
        {"dst": tile((64, 6)), "src": tile((32, 6), start_partition=32), "shuffle_mask": [0] * 32},
        {"dst": tile((32, 6), start_partition=96), "src": tile((32, 6), start_partition=32)},
    ),
)


@pytest.mark.parametrize("partitions", [*PARTITIONS, 33])
def test_moves_rows_within_each_quadrant(partitions):
    old, new = (sample("int32", (partitions, 5), seed) for seed in "ab")
    mask = [(7 * i + 3) % 32 for i in range(32)]
    if partitions % 32:  # the rows beyond the last whole quadrant may only name rows that exist
        mask = [i // 40 for i in range(32)]
    result = execute("trn2", NAME, dst=old, src=new, shuffle_mask=mask)["dst"]
    for p in range(partitions):
        assert result[p].tolist() == new[p // 32 * 32 + mask[p % 32]].tolist()


def test_255_keeps_the_row():
    old, new = (sample("bfloat16", (64, 4), seed) for seed in "ab")
    mask = [i if i % 3 else 255 for i in range(32)]
    result = execute("trn2", NAME, dst=old, src=new, shuffle_mask=mask)["dst"]
    assert_same_bits(result, np.stack([(new if (p % 32) % 3 else old)[p] for p in range(64)]))


def test_rows_kept_need_not_have_been_written():
    mask = [0] + [255] * 31

    def kernel(x):
        row = nl.ndarray((32, 4), dtype=nl.float32)
        nisa.nc_stream_shuffle(dst=row, src=nl.load(x), shuffle_mask=mask)
        out = nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=row[0:1])
        return out

    x = sample("float32", (32, 4))
    assert_same_bits(simulate.launch(kernel, [((x,), {})]).outputs[0], x[:1])


def test_one_partition_is_broadcast_into_another_quadrant():
    def kernel(x):
        wide = nl.ndarray((128, 4), dtype=nl.float32)
        row = nl.load(x)
        for quadrant in range(4):
            nisa.nc_stream_shuffle(
                dst=wide[32 * quadrant : 32 * quadrant + 32], src=row, shuffle_mask=[0] * 32
            )
        out = nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=wide)
        return out

    x = sample("float32", (1, 4))
    assert_same_bits(simulate.launch(kernel, [((x,), {})]).outputs[0], np.repeat(x, 128, axis=0))


def test_in_place_and_bit_exact():
    data = every_bit_pattern("float32", (32, 4))

    def kernel(x):
        rows = nl.load(x)
        nisa.nc_stream_shuffle(dst=rows, src=rows, shuffle_mask=IDENTITY[::-1])
        out = nl.ndarray((32, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=rows)
        return out

    assert_same_bits(simulate.launch(kernel, [((data,), {})]).outputs[0], data[::-1].copy())
