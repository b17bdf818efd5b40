"""Tables of pages that begin behind a sequence's first position, and copies of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, compare, copied, in_float64, normal, run
from tests.kernels.test_attention_block_decode import formed
from tests.kernels.test_attention_decode import batch, in_pages, tables

BF16 = ml_dtypes.bfloat16
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
    mlp = *(normal(seed, 96, 40, scale=96**-0.5) for seed in (21, 22)), normal(23, 40, 96, scale=40**-0.5)
    return *given[:11], normal(20, 1, 96), *mlp, *given[11:]


FORMS = {
    "attention_decode": (of_attention, 5, 14),
    "attention_block_decode": (of_block, 8, 18),
    "attention_block_decode through HBM": (of_wide_block, 8, 18),
    "decoder_layer_decode": (of_layer, 8, 22),
}


def without_passed_pages(given: tuple[Any, ...], positions_at: int, tables_at: int) -> tuple[Any, ...]:
    """The same launch with tables that begin with the first page that a window reads; pages before it are NaN."""
    arguments = list(copied(given))
    positions, pages = arguments[positions_at], arguments[tables_at]
    new = len(positions) // len(pages)
    first = np.maximum(0, positions[::new, 0] - WINDOW + 1) // BLOCK
    for own, begin in zip(pages, first):
        for cache in arguments:
            if isinstance(cache, np.ndarray) and cache.ndim == 4:
                cache[own[:begin]] = np.nan
    padded = np.pad(pages, ((0, 0), (0, 128 // BLOCK)))
    arguments[tables_at] = np.stack(
        [own[begin : begin + 128 // BLOCK] for own, begin in zip(padded, first)]
    ).astype(np.int32)
    arguments[positions_at] = positions - BLOCK * first.repeat(new)[:, None].astype(np.int32)
    arguments.insert(tables_at + 4, positions)
    return tuple(arguments)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_step_needs_the_pages_of_its_window_only(
    target: str, new: int, form: tuple[Callable[[int], tuple[Any, ...]], int, int]
) -> None:
    """The result is that of the whole table: rotations are those of the positions in the sequence."""
    made, *places = form
    kernel, whole = getattr(kernels, name_of(made)), made(new)
    reference = getattr(kernels, f"{name_of(made)}_reference")
    outputs = run(kernel, without_passed_pages(whole, *places), target)
    plain, exact = reference(*copied(whole)), reference(*map(in_float64, copied(whole)))
    compare(outputs[0], exact[0], plain[0])
    slots = np.divmod(whole[places[1] - 1][:, 0], BLOCK)
    for cache, truth, same_dtype in zip(outputs[1:], exact[1:], plain[1:]):
        compare(cache[slots], truth[slots], same_dtype[slots])


def name_of(made: Callable[[int], tuple[Any, ...]]) -> str:
    return next(name for name, (own, *_) in FORMS.items() if own is made).removesuffix(" through HBM")


@pytest.mark.parametrize(("rows", "refused"), [(1, True), (2, False), (3, True)])
def test_every_new_token_has_a_row_of_the_tables(rows: int, refused: bool) -> None:
    given = *batch([3, 5], 4, 2, 8, 16), 2, *tables(16, 4), *(None,) * 2, 1e-6, *(None,) * 5
    at = np.zeros((rows, 1), np.int32)
    if refused:
        with pytest.raises(AssertionError, match=r"rope_positions are \(2, 1\), as positions, not"):
            run(kernels.attention_decode, (*given, at))
    else:
        run(kernels.attention_decode, (*given, at))


def copies(count: int, pages: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations; the first page that is written is read as well."""
    order = np.random.default_rng(count).permutation(pages).astype(np.int32)[:, None]
    return np.concatenate([order[count : count + 1], order[: count - 1]]), order[count : 2 * count]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("count", "page", "dtype"),
    [
        (1, (16, 1, 8), np.float32),
        (3, (4, 2, 33), BF16),
        (127, (1, 1, 2), BF16),
        (128, (8, 2, 4), np.float32),
    ],
)
def test_pages_get_the_contents_that_others_had(
    target: str, count: int, page: tuple[int, ...], dtype: Any
) -> None:
    caches = [normal(seed, 300, *page, dtype=dtype) for seed in (1, 2)]
    sources, destinations = copies(count)
    outputs = run(kernels.copy_pages, (*caches, sources, destinations), target)
    for before, after in zip(caches, outputs):
        wanted = before.copy()
        for source, destination in zip(sources[:, 0], destinations[:, 0]):
            wanted[destination] = before[source]
        assert np.array_equal(after, wanted)


def test_pages_larger_than_a_piece_are_copied_whole() -> None:
    caches = [normal(seed, 6, 128, 2, 65) for seed in (1, 2)]
    sources, destinations = copies(3, 6)
    outputs = run(kernels.copy_pages, (*caches, sources, destinations))
    for before, after in zip(caches, outputs):
        assert np.array_equal(after[destinations[:, 0]], before[sources[:, 0]])


def test_an_only_cache_is_copied_by_one_core() -> None:
    """Rows of latent attention."""
    rows, (sources, destinations) = normal(1, 9, 4, 24), copies(4, 9)
    wanted = rows.copy()
    wanted[destinations[:, 0]] = rows[sources[:, 0]]
    given = (rows, None, sources, destinations)
    assert np.array_equal(run(kernels.copy_pages, given), wanted)
    two = simulate.World("trn2", 1, 2).launch(kernels.copy_pages, [(copied(given), {})])
    assert np.array_equal(two.outputs[0], wanted)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("count", "states"),
    [
        (1, ((8192, 3), (4, 64, 128))),
        (3, ((130, 127), (12, 3))),
        (17, ((129, 130), (6,))),
        (16, ((4, 8), (1,))),
    ],
)
def test_slots_of_two_states_get_what_others_had(
    target: str, count: int, states: tuple[tuple[int, ...], ...]
) -> None:
    """States of other sizes and dtypes; of 16384 elements and fewer on one partition, of more in rows on several."""
    arrays = [normal(1, 40, *states[0]), normal(2, 40, *states[1], dtype=BF16)]
    sources, destinations = copies(count, 40)
    outputs = run(kernels.copy_pages, (*arrays, sources, destinations), target)
    for before, after in zip(arrays, outputs):
        wanted = before.copy()
        wanted[destinations[:, 0]] = before[sources[:, 0]]
        assert np.array_equal(after, wanted)


@pytest.mark.parametrize("elements", [8, 16385])
def test_two_cores_copy_as_one(elements: int) -> None:
    caches, ends = [normal(seed, 9, 4, 2, elements) for seed in (1, 2)], copies(4, 9)
    one = run(kernels.copy_pages, (*caches, *ends))
    two = simulate.World("trn2", 1, 2).launch(kernels.copy_pages, [(copied((*caches, *ends)), {})])
    for own, other in zip(one, two.outputs[0]):
        assert np.array_equal(own, other)


@pytest.mark.parametrize(("count", "refused"), [(127, False), (128, False), (129, True)])
def test_a_launch_makes_as_many_copies_as_there_are_partitions(count: int, refused: bool) -> None:
    caches, ends = [normal(seed, 300, 1, 1, 2) for seed in (1, 2)], copies(count)
    if refused:
        with pytest.raises(AssertionError, match="copy_pages makes at most 128 copies, not 129"):
            run(kernels.copy_pages, (*caches, *ends))
    else:
        run(kernels.copy_pages, (*caches, *ends))


def test_copies_that_do_not_fit_are_refused() -> None:
    keys, values, (sources, destinations) = normal(1, 9, 4, 2, 8), normal(2, 9, 4, 2, 8), copies(2, 9)
    for given, message in (
        ((keys, values[:8], sources, destinations), "cache is"),
        ((keys, values, sources, destinations[:1]), r"destinations are \[2, 1\]"),
        ((keys[:, 0, 0, 0], values, sources, destinations), r"expected cache \[P, …\], not"),
    ):
        with pytest.raises(AssertionError, match=message):
            run(kernels.copy_pages, given)
    run(kernels.copy_pages, (keys, values, sources, destinations))
