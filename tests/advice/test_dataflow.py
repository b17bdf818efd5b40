"""Advice on order, partitions and repeated work: gains within 3 % of what the changed kernel brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simulate.hardware import hardware
from simulate.profile import profile
from simulate.profile.advice import AdviceKind
from simulate.profile.advice.edits import permute
from simulate.timing import Reading, schedule
from simulate.world import launch
from tests.advice.ladders import dataflow
from tests.timing import kernels

BF16 = kernels.BF16
SHARE = 0.03
"""A predicted length may differ from the length of the changed kernel by this share of it."""

Case = tuple[AdviceKind, str, Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]

CASES: dict[str, Case] = {
    "loads of a product": (
        AdviceKind.load_order,
        "",
        dataflow.product_loads_b_first,
        dataflow.product_loads_in_order,
        (kernels.zeros(2048, 128, BF16), kernels.zeros(2048, 512, BF16)),
    ),
    "loads of gates": (
        AdviceKind.load_order,
        "",
        dataflow.gates_first,
        dataflow.gates_in_order,
        (kernels.zeros(1024, 512), kernels.zeros(1024, 512)),
    ),
    "four partitions": (
        AdviceKind.partitions,
        "4 of 128 are used",
        dataflow.few_partitions,
        dataflow.all_partitions,
        (kernels.zeros(4, 4096), kernels.zeros(4, 4096)),
    ),
    "32 partitions": (
        AdviceKind.partitions,
        "32 of 128 are used",
        dataflow.few_partitions,
        dataflow.all_partitions,
        (kernels.zeros(32, 2048, BF16), kernels.zeros(32, 2048, BF16)),
    ),
    "softmax of heads": (
        AdviceKind.chains,
        "2 at a time",
        dataflow.softmax_head_by_head,
        dataflow.softmax_two_heads_in_turn,
        (np.zeros((8, 128, 512), np.float32),),
    ),
    "norm of blocks": (
        AdviceKind.chains,
        "2 at a time",
        dataflow.norm_block_by_block,
        dataflow.norm_two_blocks_in_turn,
        (kernels.zeros(512, 512),),
    ),
    "transposes in a loop": (
        AdviceKind.repeats,
        "48 tiles equal earlier ones",
        dataflow.transposes_for_every_block,
        dataflow.transposes_once,
        (kernels.zeros(128, 1024, BF16), kernels.zeros(1024, 2048, BF16)),
    ),
    "sigmoid in a loop": (
        AdviceKind.repeats,
        "7 tiles equal earlier ones",
        dataflow.sigmoid_for_every_block,
        dataflow.sigmoid_once,
        (kernels.zeros(1024, 512), kernels.zeros(128, 512)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_advice_is_followed_and_keeps_what_it_promises(name: str) -> None:
    advice_kind, detail, slow, fast, arguments = CASES[name]
    before, after = (kernels.dry(kernel, *arguments) for kernel in (slow, fast))
    slower, faster = (profile(done.streams, done.hardware) for done in (before, after))
    first = slower.advice[0]
    assert (first.advice_kind, first.detail) == (advice_kind, detail)
    assert abs(first.length_ns - faster.length_ns) <= SHARE * faster.length_ns
    assert advice_kind not in {piece.advice_kind for piece in faster.advice}
    if advice_kind in (
        AdviceKind.load_order,
        AdviceKind.chains,
    ):  # an order gains at most what the dataflow bound leaves
        assert faster.length_ns >= slower.timelines[Reading.dataflow].length_ns


@pytest.mark.parametrize("name", CASES)
def test_both_kernels_of_a_pair_compute_the_same(name: str) -> None:
    _, _, slow, fast, arguments = CASES[name]
    generator = np.random.default_rng(5)
    values = [generator.standard_normal(array.shape).astype(array.dtype) for array in arguments]
    chip = hardware("trn2")
    slow_result, fast_result = (launch(kernel, [(values, {})], chip).outputs[0] for kernel in (slow, fast))
    np.testing.assert_array_equal(slow_result, fast_result)
    assert np.isfinite(slow_result.astype(np.float32)).all()


def test_no_order_is_proposed_that_a_dependence_forbids() -> None:
    """Every tile is written by one chain and read by the next, so neither chains nor loads can change places."""
    done = kernels.dry(dataflow.running_sum, kernels.zeros(1024, 512))
    advice_kinds = {piece.advice_kind for piece in profile(done.streams, done.hardware).advice}
    assert not advice_kinds & {AdviceKind.chains, AdviceKind.load_order, AdviceKind.repeats}


def test_values_that_change_between_iterations_are_not_called_repeats() -> None:
    done = kernels.dry(dataflow.sigmoid_of_a_changing_scale, kernels.zeros(512, 512), kernels.zeros(128, 512))
    assert AdviceKind.repeats not in {
        piece.advice_kind for piece in profile(done.streams, done.hardware).advice
    }


def test_reductions_over_a_row_are_not_spread_over_partitions() -> None:
    done = kernels.dry(dataflow.softmax_head_by_head, np.zeros((8, 4, 4096), np.float32))
    assert AdviceKind.partitions not in {
        piece.advice_kind for piece in profile(done.streams, done.hardware).advice
    }


def test_a_permutation_keeps_events_and_their_operands() -> None:
    done = kernels.dry(dataflow.gates_in_order, kernels.zeros(256, 512), kernels.zeros(256, 512))
    stream = done.streams[0]
    order = list(range(len(stream)))
    order[0], order[1] = order[1], order[0]
    changed = permute(stream, order)
    assert [changed.event(index).accesses for index in range(2)] == [
        stream.event(1).accesses,
        stream.event(0).accesses,
    ]
    back = permute(changed, order)
    assert back.text() == stream.text()
    assert schedule(back, done.hardware).length_ns == schedule(stream, done.hardware).length_ns
