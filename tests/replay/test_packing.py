"""Packing: parts of a program that repeat take the calls of one, and no value changes."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from simulate.replay.fusion import packing
from tests.replay.matmuls import calls, whole_numbers
from tests.replay.test_fusion import agree

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def attended(x, w, rows):
    """Compute for each block of x: rows in another order, the softmax of their product, and its largest element."""
    blocks, height, width = x.shape
    out = nl.ndarray((blocks, 128, width + 1), dtype=nl.float32, buffer=nl.shared_hbm)
    weights = nl.load(w)
    for block in range(blocks):
        row_numbers = nl.load(rows[block])
        gathered = nl.ndarray((128, width), dtype=nl.float32)
        flat = x.reshape((blocks * height, width))
        nisa.dma_copy(
            dst=gathered, src=flat.ap(pattern=[[width, 128], [1, width]], vector_offset=row_numbers)
        )
        product = nl.ndarray((128, width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=weights, moving=gathered)
        shifted = nl.ndarray((128, width), dtype=nl.float32)
        nisa.tensor_copy(dst=shifted, src=product)
        largest = nl.ndarray((128, 1), dtype=nl.float32)
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=shifted, axis=1)
        total = nl.ndarray((128, 1), dtype=nl.float32)
        nisa.tensor_reduce(dst=total, op=nl.add, data=gathered, axis=1)
        nisa.tensor_scalar(dst=shifted, data=shifted, op0=nl.subtract, operand0=total)
        nisa.dma_copy(dst=out[block, :, 0:width], src=shifted)
        nisa.dma_copy(dst=out[block, :, width : width + 1], src=largest)
    return out


def draw_arguments(blocks: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.random.default_rng(blocks).integers(0, blocks * 130, (blocks, 128, 1)).astype(np.int32)
    return whole_numbers(1, blocks, 130, width), whole_numbers(2, 128, 128), rows


@pytest.mark.parametrize("width", [1, 2, 33])
def test_repeated_parts_take_the_calls_of_one(cache, width) -> None:
    kernel_calls = []
    for blocks in (3, 8):
        cache.clear()
        agree(attended, *draw_arguments(blocks, width))
        kernel_calls.append(calls(cache))
    assert kernel_calls[0] == kernel_calls[1]


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_packed_call_writes_at_most_so_many_elements(cache, monkeypatch, beyond) -> None:
    monkeypatch.setattr(packing, "_ELEMENTS_PACKED_MAX", 3 * 128 * 33 - beyond)
    agree(attended, *draw_arguments(3, 33))
    assert calls(cache).count("subtract") == (2 if beyond > 0 else 1)


def test_what_an_earlier_part_stores_is_read_by_a_later_one(cache) -> None:
    def handed_on(x, steps):
        state = nl.ndarray((128, 5), dtype=nl.float32, buffer=nl.shared_hbm)
        first, row = nl.load(x), nl.load(steps)
        nisa.dma_copy(dst=state, src=first)
        for _ in range(4):
            tile = nl.ndarray((128, 5), dtype=nl.float32)
            nisa.dma_copy(dst=tile, src=state.ap(pattern=[[5, 128], [1, 5]], vector_offset=row))
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
            nisa.dma_copy(dst=state, src=tile)
        return state

    agree(handed_on, whole_numbers(1, 128, 5), np.arange(127, -1, -1, dtype=np.int32)[:, None])


def test_a_choice_of_elements_is_rewritten(cache) -> None:
    def chosen(x, masks):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        for index in range(x.shape[0]):
            tile = nl.ndarray((128, x.shape[2]), dtype=nl.float32)
            nisa.memset(dst=tile, value=7.0)
            nisa.tensor_copy_predicated(dst=tile, src=nl.load(x[index]), predicate=nl.load(masks[index]))
            nisa.tensor_copy_predicated(
                dst=tile, src=0.5, predicate=nl.load(masks[index - 1]), reverse_pred=True
            )
            nisa.dma_copy(dst=out[index], src=tile)
        return out

    masks = np.random.default_rng(7).integers(0, 2, (3, 128, 6)).astype(np.uint8)
    agree(chosen, whole_numbers(1, 3, 128, 6), masks)
    assert (cache.report.rewritten, cache.report.unlowered) == (1, 0)
