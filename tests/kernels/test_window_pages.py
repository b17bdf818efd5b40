"""Tables of pages that begin behind a sequence's first position, and copies of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, compare, copied, in_float64, in_order, named, normal, run
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, exactly, limit, refuse, together, vary
from tests.kernels.test_attention_block_decode import formed
from tests.kernels.test_attention_decode import batch, in_pages, tables

BLOCK, WINDOW, LENGTH = 16, 100, 384
FIRSTS = [300, 5, 99, 115, 380]


def of_attention(new: int) -> tuple[Any, ...]:
    plain = *batch(FIRSTS, 4, 2, 16, LENGTH, new=new), 2, *tables(LENGTH, 8)
    return (*in_pages(plain, BLOCK), WINDOW, None, None)


def of_block(new: int) -> tuple[Any, ...]:
    return formed(new=new, block=BLOCK, positions=LENGTH, sequences=5, options=(WINDOW, None, None))


def of_wide_block(new: int) -> tuple[Any, ...]:
    """Of so many hidden elements that they go through HBM."""
    return formed(
        new=new, block=BLOCK, positions=LENGTH, sequences=5, hidden=4100, options=(WINDOW, None, None)
    )


def of_layer(new: int) -> tuple[Any, ...]:
    given = of_block(new)
    w_gate, w_up = (normal(seed, 96, 40, scale=96**-0.5) for seed in (21, 22))
    return in_order(
        kernels.decoder_layer_decode,
        **named(kernels.attention_block_decode, given),
        mlp_norm_weight=normal(20, 1, 96),
        w_gate=w_gate,
        w_up=w_up,
        w_down=normal(23, 40, 96, scale=40**-0.5),
    )


FORMS = {
    "attention_decode": of_attention,
    "attention_block_decode": of_block,
    "attention_block_decode through HBM": of_wide_block,
    "decoder_layer_decode": of_layer,
}


def without_passed_pages(kernel: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same launch with tables that begin with the first page that a window reads; pages before it are NaN."""
    arguments = named(kernel, copied(given))
    positions, pages = arguments["positions"], arguments["block_tables"]
    new = len(positions) // len(pages)
    first = np.maximum(0, positions[::new, 0] - WINDOW + 1) // BLOCK
    for own, begin in zip(pages, first):
        for cache in ("k_cache", "v_cache"):
            arguments[cache][own[:begin]] = np.nan
    padded = np.pad(pages, ((0, 0), (0, 128 // BLOCK)))
    arguments["block_tables"] = np.stack(
        [own[begin : begin + 128 // BLOCK] for own, begin in zip(padded, first)]
    ).astype(np.int32)
    arguments["positions"] = positions - BLOCK * first.repeat(new)[:, None].astype(np.int32)
    return in_order(kernel, **arguments | {"rope_positions": positions})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_needs_the_pages_of_its_window_only(target: str, new: int, form: str) -> None:
    """The result is that of the whole table: rotations are those of the positions in the sequence."""
    name, whole = form.removesuffix(" through HBM"), FORMS[form](new)
    kernel, reference = getattr(kernels, name), getattr(kernels, f"{name}_reference")
    outputs = run(kernel, without_passed_pages(kernel, whole), target)
    plain, exact = reference(*copied(whole)), reference(*map(in_float64, copied(whole)))
    compare(outputs[0], exact[0], plain[0])
    slots = np.divmod(named(kernel, whole)["slots"][:, 0], BLOCK)
    for cache, truth, same_dtype in zip(outputs[1:], exact[1:], plain[1:]):
        compare(cache[slots], truth[slots], same_dtype[slots])


@pytest.mark.parametrize(("rows", "refused"), [(1, True), (2, False), (3, True)])
def test_every_new_token_has_a_row_of_the_tables(rows: int, refused: bool) -> None:
    given = *batch([3, 5], 4, 2, 8, 16), 2, *tables(16, 4), *(None,) * 2, 1e-6, *(None,) * 5
    at = np.zeros((rows, 1), np.int32)
    if refused:
        with pytest.raises(AssertionError, match=r"rope_positions are \(2, 1\), as positions, not"):
            run(kernels.attention_decode, (*given, at))
    else:
        run(kernels.attention_decode, (*given, at))


def pages(
    count: int = 2,
    slots: int = 9,
    shape: tuple[int, ...] = (4, 2, 8),
    dtype: Any = F32,
    second: tuple[int, ...] | None = None,
    held: Any = None,
) -> list[Any]:
    """Two caches, sources and destinations; the first page that is written is read as well."""
    order = np.random.default_rng(count).permutation(slots).astype(np.int32)[:, None]
    caches = normal(1, slots, *shape, dtype=dtype), normal(2, slots, *(second or shape), dtype=held or dtype)
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
            *together(
                "count shape second",
                (1, (8192, 3), (4, 64, 128)),
                (3, (130, 127), (12, 3)),
                (17, (129, 130), (6,)),
                (16, (4, 8), (1,)),
                slots=40,
                held=BF16,
            ),
        ],
        refusals=[
            refuse("cache is", other=lambda values: values[:8]),
            refuse("destinations are [2, 1]", destinations=lambda ends: ends[:1]),
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
