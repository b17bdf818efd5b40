"""Tables of pages that begin behind a sequence's first position, and copies of pages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, compare_all, copied, in_order, named, normal
from tests.kernels.case import (
    BF16,
    F32,
    Arguments,
    KernelCase,
    KernelTests,
    exactly,
    limit,
    refuse,
    together,
    vary,
)
from tests.kernels.test_attention_block_decode import formed
from tests.kernels.test_attention_decode import step

BLOCK, WINDOW = 16, 100
PAGES = dict(block=BLOCK, positions=384)
FORMED = PAGES | dict(sequences=5, options=(WINDOW, None, None))


def layer(**settings: Any) -> tuple[Any, ...]:
    """Draw the arguments of an attention block and of the MLP behind it."""
    w_gate, w_up = (normal(seed, 96, 40, scale=96**-0.5) for seed in (21, 22))
    return in_order(
        kernels.decoder_layer_decode,
        **named(kernels.attention_block_decode, formed(**settings)),
        mlp_norm_weight=normal(20, 1, 96),
        w_gate=w_gate,
        w_up=w_up,
        w_down=normal(23, 40, 96, scale=40**-0.5),
    )


FORMS = {
    "attention_decode": (step, PAGES | dict(firsts=(300, 5, 99, 115, 380), half=8, window=lambda _: WINDOW)),
    "attention_block_decode": (formed, FORMED),
    "attention_block_decode of hidden elements in HBM": (formed, FORMED | dict(hidden=4100)),
    "decoder_layer_decode": (layer, FORMED),
}


def without_passed_pages(arguments: Arguments) -> dict[str, Any]:
    """Return the launch with tables that begin with the first page that a window reads; pages before it are NaN."""
    shorter = dict(zip(arguments, copied(tuple(arguments.values()))))
    positions, pages = arguments["positions"], arguments["block_tables"]
    new = len(positions) // len(pages)
    first = np.maximum(0, positions[::new, 0] - WINDOW + 1) // BLOCK
    for table, begin in zip(pages, first):
        shorter["k_cache"][table[:begin]] = shorter["v_cache"][table[:begin]] = np.nan
    padded = np.pad(pages, ((0, 0), (0, 128 // BLOCK)))
    tables = [table[begin : begin + 128 // BLOCK] for table, begin in zip(padded, first)]
    shorter["positions"] = positions - BLOCK * first.repeat(new)[:, None].astype(np.int32)
    return shorter | dict(block_tables=np.stack(tables).astype(np.int32), rope_positions=positions)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_needs_the_pages_of_its_window_only(target: str, new: int, form: str) -> None:
    """The result is that of the whole table: rotations are those of the positions in the sequence."""
    draw, settings = FORMS[form]
    case = KernelCase(getattr(kernels, form.split()[0]), draw, tolerance=in_slots)
    arguments = case.arguments(settings | dict(new=new))
    case.compare(case.run(without_passed_pages(arguments), target), arguments)


def in_slots(outputs: Sequence[np.ndarray], reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Compare rows, and what caches hold in the slots of new tokens."""
    parameters = inspect.signature(reference).parameters
    slots = np.divmod(inputs[[*parameters].index("slots")][:, 0], BLOCK)

    def written(*operands: Any) -> tuple[np.ndarray, ...]:
        return tuple(
            output if index == 0 else output[slots] for index, output in enumerate(reference(*operands))
        )

    compare_all([outputs[0], *(cache[slots] for cache in outputs[1:])], written, inputs)


def pages(
    count: int = 2,
    slots: int = 9,
    shape: tuple[int, ...] = (4, 2, 8),
    dtype: Any = F32,
    second: tuple[int, ...] | None = None,
    second_dtype: Any = None,
) -> list[Any]:
    """Return two caches, sources and destinations; the first page that is written is read as well."""
    order = np.random.default_rng(count).permutation(slots).astype(np.int32)[:, None]
    caches = (
        normal(1, slots, *shape, dtype=dtype),
        normal(2, slots, *(second or shape), dtype=second_dtype or dtype),
    )
    return [*caches, np.concatenate([order[count : count + 1], order[: count - 1]]), order[count : 2 * count]]


def moved(
    keys: np.ndarray, values: np.ndarray | None, sources: np.ndarray, destinations: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return caches whose destinations have what their sources had."""
    caches = [keys] if values is None else [keys, values]
    outputs = [cache.copy() for cache in caches]
    for before, after in zip(caches, outputs):
        after[destinations[:, 0]] = before[sources[:, 0]]
    return tuple(outputs)


def as_bytes(cache: np.ndarray) -> np.ndarray:
    """Return int8 numbers: a page has as many bytes as elements, and its copy has the same."""
    return (cache * 64).astype(np.int8)


class TestCopyPages(KernelTests):
    """Pages larger than a piece are copied whole; an only cache has rows of latent attention and is one core's.

    Two states may have other sizes and dtypes: up to 16384 elements are on one partition, more are rows on several.
    """

    case = KernelCase(
        kernels.copy_pages,
        pages,
        values=[
            *together(
                "count shape dtype",
                *((1, (16, 1, 8), F32), (3, (4, 2, 33), BF16), (127, (1, 1, 2), BF16), (128, (8, 2, 4), F32)),
                slots=300,
            ),
            dict(count=3, slots=6, shape=(128, 2, 65)),
            dict(count=4, shape=(4, 24), other=lambda _: None),
            dict(slots=5, shape=(16, 2, 32)) | dict.fromkeys(("cache", "other"), as_bytes),
            *together(
                "count shape second",
                (1, (8192, 3), (4, 64, 128)),
                (3, (130, 127), (12, 3)),
                (17, (129, 130), (6,)),
                (16, (4, 8), (1,)),
                slots=40,
                second_dtype=BF16,
            ),
        ],
        refusals=[
            refuse("cache is", other=lambda values: values[:8]),
            refuse("destinations have to be [2, 1]", destinations=lambda ends: ends[:1]),
            refuse("expected cache [P, …], not", cache=lambda keys: keys[:, 0, 0, 0]),
        ],
        limits=[
            limit("count", 128, "copy_pages makes at most 128 copies, not 129", slots=300, shape=(1, 1, 2))
        ],
        two_cores=[
            *vary(count=4, shape=[(4, 2, 8), (4, 2, 16385)]),
            dict(count=4, shape=(4, 24), other=lambda _: None),
        ],
        tolerance=exactly,
        reference=moved,
        replays=False,
    )
