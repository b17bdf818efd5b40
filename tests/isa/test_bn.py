"""bn_stats and bn_aggr: statistics against float64, and what they refuse."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

import simulate
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import sample
from tests.isa.tiles import PARTITIONS, TARGETS, Fresh, execute, plan, refuses, tile

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("elements", [1, 511, 512])
def test_bn_stats_accepts_up_to_512_elements_on_every_chip(target, elements):
    plan(target, "bn_stats", dst=tile((8, 6)), data=tile((8, elements)))
    refuses("NKW-BN-STATS-SIZE", target, "bn_stats", dst=tile((8, 6)), data=tile((8, 513)))


@pytest.mark.parametrize("target", TARGETS)
def test_outputs_have_six_and_two_elements(target):
    for elements, code in ((5, "NKW-BN-STATS-OUTPUT"), (7, "NKW-BN-STATS-OUTPUT")):
        refuses(code, target, "bn_stats", dst=tile((8, elements)), data=tile((8, 16)))
    plan(target, "bn_stats", dst=tile((8, 2, 3)), data=tile((8, 16)))
    for elements in (1, 3):
        refuses("NKW-BN-AGGR-OUTPUT", target, "bn_aggr", dst=tile((8, elements)), data=tile((8, 6)))
    plan(target, "bn_aggr", dst=tile((8, 2)), data=tile((8, 6)))


@pytest.mark.parametrize("elements", [2, 4, 7])
def test_bn_aggr_refuses_parts_of_triples(elements):
    refuses("NKW-BN-AGGR-TRIPLES", "trn2", "bn_aggr", dst=tile((8, 2)), data=tile((8, elements)))
    plan("trn2", "bn_aggr", dst=tile((8, 2)), data=tile((8, 3 * elements)))


def test_partitions_agree():
    refuses("NKW-PARTITIONS-AGREE", "trn2", "bn_stats", dst=tile((7, 6)), data=tile((8, 16)))
    refuses("NKW-PARTITIONS-AGREE", "trn2", "bn_aggr", dst=tile((7, 2)), data=tile((8, 6)))


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_bn_stats_of_exact_sums(partitions):
    # Integers in powers of two: mean, deviations and squares are exact in float32, whatever the order.
    data = (sample("uint8", (partitions, 16)) % 8).astype(np.float32)
    result = execute("trn2", "bn_stats", dst=Fresh((partitions, 6)), data=data)["dst"]
    for p in range(partitions):
        expected = []
        for elements in (data[p, 0::2].tolist(), data[p, 1::2].tolist()):
            expected += [
                len(elements),
                statistics.fmean(elements),
                statistics.pvariance(elements) * len(elements),
            ]
        assert result[p].tolist() == expected


def test_a_single_element_has_no_odd_ones():
    assert execute("trn2", "bn_stats", dst=Fresh((1, 6)), data=np.array([[3.0]], np.float32))[
        "dst"
    ].tolist() == [[1, 3, 0, 0, 0, 0]]


@pytest.mark.parametrize("widths", [(512,), (512, 100), (1, 2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_aggregated_statistics_are_those_of_the_whole_row(widths, dtype):
    width = sum(widths)
    data = sample(dtype, (9, width))

    def kernel(x):
        tile_ = nl.load(x)
        stats = nl.ndarray((9, 6 * len(widths)), dtype=nl.float32)
        start = 0
        for number, size in enumerate(widths):
            nisa.bn_stats(dst=stats[:, 6 * number : 6 * number + 6], data=tile_[:, start : start + size])
            start += size
        both = nl.ndarray((9, 2), dtype=nl.float32)
        nisa.bn_aggr(dst=both, data=stats)
        out = nl.ndarray((9, 2), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=both)
        return out

    result = simulate.launch(kernel, [((data,), {})]).outputs[0].astype(np.float64)
    exact = data.astype(np.float64)
    scale = np.abs(exact).max()
    # Every value passes at most width + 8 roundings of terms no larger than the largest (squared).
    assert np.abs(result[:, 0] - exact.mean(1)).max() <= (width + 8) * EPSILON * scale
    assert np.abs(result[:, 1] - exact.var(1)).max() <= 4 * (width + 8) * EPSILON * scale**2


def test_bn_aggr_ignores_triples_of_nothing():
    data = np.array([[2, 5, 8, 0, 0, 0]], np.float32)
    assert execute("trn2", "bn_aggr", dst=Fresh((1, 2)), data=data)["dst"].tolist() == [[5, 4]]


def test_costs_are_the_published_formulas():
    stats = [
        plan("trn2", "bn_stats", dst=tile((8, 6)), data=tile((8, n))).cost.latency_cycles for n in (100, 500)
    ]
    assert stats[1] - stats[0] == 400
    aggregated = [
        plan("trn2", "bn_aggr", dst=tile((8, 2)), data=tile((8, n))).cost.latency_cycles for n in (300, 600)
    ]
    assert aggregated[1] - aggregated[0] == 1300
