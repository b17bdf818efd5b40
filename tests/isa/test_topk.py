"""topk: the largest elements of a snake, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import simulate
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.tiles import PSUM, TARGETS, plan, tile, twins

NAME = "topk"


def call(partitions=32, columns=3, k=8, n=42):
    return {
        "val_dst": tile((partitions, k), "bfloat16"),
        "idx_dst": tile((partitions, k), "uint32"),
        "src": tile((partitions, columns), "bfloat16"),
        "n": n,
    }


@pytest.mark.parametrize("target", TARGETS)
def test_accepts_the_published_example(target):
    assert plan(target, NAME, **call()).cost.interval_cycles == 4 * 42 + 8


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    dict,
    ("NKW-TOPK-LIMITS", call(n=7, k=7), call(n=8, k=8)),
    ("NKW-TOPK-LIMITS", call(n=65536, columns=4096), call(n=65535, columns=4096)),
    ("NKW-TOPK-LIMITS", call(n=8, k=9), call(n=9, k=9)),
    ("NKW-TOPK-LIMITS", call(n=40000, columns=2500, k=32768), call(n=40000, columns=2500, k=32767)),
    ("NKW-TOPK-LIMITS", call(n=42.0), call(k=1)),
    ("NKW-TOPK-SOURCE", call(n=49), call(n=48)),
    ("NKW-TOPK-GROUPS", call(partitions=24), call(partitions=16)),
    ("NKW-TOPK-DIMS", {**call(), "src": tile((32, 3, 1), "bfloat16")}, call()),
    ("NKW-DTYPE-ALLOWED", {**call(), "src": tile((32, 3))}, call()),
    ("NKW-DTYPE-ALLOWED", {**call(), "val_dst": tile((32, 8))}, call()),
    ("NKW-DTYPE-ALLOWED", {**call(), "idx_dst": tile((32, 8), "int32")}, call()),
    ("NKW-ELEMENTS-AGREE", {**call(), "idx_dst": tile((32, 7), "uint32")}, call()),
    ("NKW-PARTITIONS-AGREE", {**call(), "idx_dst": tile((16, 8), "uint32")}, call()),
    ("NKW-BUFFER", {**call(), "src": tile((32, 3), "bfloat16", PSUM)}, call()),
)


def largest(src, n, k):
    partitions, _columns = src.shape

    def kernel(x):
        values, indices = (
            nl.zeros((partitions, k), dtype=nl.bfloat16),
            nl.full((partitions, k), 99999, nl.uint32),
        )
        nisa.topk(val_dst=values, idx_dst=indices, src=nl.load(x), n=n)
        outs = []
        for result in (values, indices):
            out = nl.ndarray(result.shape, dtype=result.dtype, buffer=nl.shared_hbm)
            nisa.dma_copy(dst=out, src=result)
            outs.append(out)
        return outs

    return simulate.launch(kernel, [((src,), {})]).outputs[0]


@pytest.mark.parametrize(
    ("partitions", "n", "k"), [(16, 8, 8), (32, 42, 8), (128, 47, 33), (48, 300, 1), (16, 48, 16)]
)
def test_finds_the_largest_of_each_group_in_snake_order(partitions, n, k):
    random = np.random.default_rng(n)
    src = random.permutation(partitions * -(-n // 16)).reshape(partitions, -1) % 251 - 100
    src = src.astype(ml_dtypes.bfloat16)
    values, indices = largest(src, n, k)
    for group in range(partitions // 16):
        snake = [float(src[16 * group + j % 16, j // 16]) for j in range(n)]
        best = sorted(range(n), key=lambda j: (-snake[j], j))[:k][::-1]
        for j in range(k):
            assert indices[16 * group + j % 16, j // 16] == best[j]
            assert float(values[16 * group + j % 16, j // 16]) == snake[best[j]]


def test_elements_beyond_n_do_not_count_and_other_results_stay():
    src = np.full((16, 2), 5, ml_dtypes.bfloat16)
    src[:, 0] = np.arange(16)
    src[2:, 1] = 1000
    values, indices = largest(src, 18, 3)
    assert [float(values[j, 0]) for j in range(3)] == [13, 14, 15]
    assert indices[:3, 0].tolist() == [13, 14, 15]
    assert (indices[3:] == 99999).all() and (indices[:, 1:] == 99999).all()


def test_of_equal_values_the_lower_position_counts_as_larger():
    values, indices = largest(np.ones((16, 1), ml_dtypes.bfloat16), 16, 4)
    assert indices[:4, 0].tolist() == [3, 2, 1, 0]
    assert (values[:4, 0].astype(float) == 1).all()
