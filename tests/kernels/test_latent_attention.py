"""latent_attention_decode and latent_keys_values: absorbed equals naive, any sizes, pages, masks, what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, compare_all, copied, normal, run

BF16 = ml_dtypes.bfloat16
DECODE = (kernels.latent_attention_decode, kernels.latent_attention_decode_reference)
EXPAND = (kernels.latent_keys_values, kernels.latent_keys_values_reference)
SMALL = (3, 24, 8, 16, 12)
"""Heads; elements of the latent, of the rotated and of the plain part of a key, and of a value."""


def batch(
    firsts: list[int],
    sizes: tuple[int, ...],
    positions: int,
    new: int = 1,
    dtype: Any = np.float32,
    block: int = 0,
    held: Any = None,
) -> tuple[Any, ...]:
    """Arguments for sequences whose first new token has the given positions; pages in random order."""
    heads, rank, rope, plain, value = sizes
    sequences, width = len(firsts), rank + rope
    at = (np.array(firsts)[:, None] + np.arange(new)).reshape(-1, 1).astype(np.int32)
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(rope // 2) / (rope // 2))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q = normal(1, sequences * new, heads * (rope + plain), dtype=dtype)
    kv = normal(2, sequences * new, width, dtype=dtype)
    cache = normal(3, sequences, positions, width, dtype=dtype)
    norm = 1 + normal(4, 1, rank, dtype=dtype, scale=0.1)
    w_uk = normal(5, heads * plain, rank, dtype=held or dtype, scale=rank**-0.5)
    w_uv = normal(6, rank, heads * value, dtype=held or dtype, scale=rank**-0.5)
    rest = (at, (rope + plain) ** -0.5, norm, 1e-6, *tables, w_uk, w_uv)
    if not block:
        return (q, kv, cache, *rest)
    count = positions // block
    order = np.random.default_rng(1).permutation(sequences * count + 3).astype(np.int32)
    block_tables = order[: sequences * count].reshape(sequences, count)
    pages = np.zeros((len(order), block, width), dtype)
    pages[block_tables] = cache.reshape(sequences, count, block, width)
    slots = [
        [block_tables[token // new, place // block] * block + place % block]
        for token, place in enumerate(at[:, 0])
    ]
    return (q, kv, pages, *rest, np.array(slots, np.int32), block_tables)


def expansion(given: tuple[Any, ...], heads: int, prefix: int = 0) -> tuple[Any, ...]:
    """The same tokens as those of a prompt."""
    _, kv, cache, at, _, *rest = given
    return (kv, cache, at, *rest[:6], heads, prefix, *rest[6:])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "held"), [(np.float32, np.float32), (BF16, BF16), (np.float32, BF16)])
def test_dtypes_on_every_chip(target: str, dtype: Any, held: Any) -> None:
    given = batch([0, 130, 171], (4, 136, 8, 16, 20), 172, dtype=dtype, held=held)
    check(*DECODE, given, target)
    check(*EXPAND, expansion(batch([0] * 2, (4, 136, 8, 16, 20), 40, 30, dtype, held=held), 4), target)


@pytest.mark.parametrize("positions", [1, 8, 127, 128, 129, 384, 700])
def test_any_number_of_positions(positions: int) -> None:
    check(*DECODE, batch([0, positions // 2, positions - 1], SMALL, positions), "trn2")


@pytest.mark.parametrize("rank", [2, 64, 127, 128, 129, 200, 512])
def test_any_size_of_the_latent(rank: int) -> None:
    check(*DECODE, batch([20, 7], (2, rank, 4, 6, 10), 24), "trn2")
    check(*EXPAND, expansion(batch([0, 0], (2, rank, 4, 6, 10), 24, 20), 2), "trn2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [(1, 24, 2, 1, 1), (5, 24, 126, 8, 8), (2, 24, 8, 128, 8), (2, 24, 8, 8, 512), (128, 24, 8, 4, 4)],
)
def test_any_sizes_of_heads(sizes: tuple[int, ...]) -> None:
    check(*DECODE, batch([20, 7], sizes, 24), "trn2")
    check(*EXPAND, expansion(batch([0, 0], sizes, 24, 20), sizes[0]), "trn2")


@pytest.mark.parametrize("new", [2, 3, 42])
def test_several_new_tokens_see_each_other_causally(new: int) -> None:
    check(*DECODE, batch([0, 3, 100], SMALL, 300, new), "trn2")


@pytest.mark.parametrize("block", [1, 16, 64, 128])
def test_pages_of_any_order(block: int) -> None:
    """Pieces of 16 chunks and smaller ones; runs of a page, of a part of one, and of several tables' entries."""
    check(*DECODE, batch([2200, 17], SMALL, 2432, block=block), "trn2")
    for prefix, new in ((0, 140), (128, 60)):
        given = batch([prefix // 2, prefix], SMALL, 256, new, block=block)
        check(*EXPAND, expansion(given, SMALL[0], prefix), "trn2")


@pytest.mark.parametrize(
    ("positions", "prefix", "block"), [(24, 24, 0), (24, 5, 0), (128, 128, 16), (256, 200, 16)]
)
def test_padded_tokens_behind_the_cache_have_rows_of_zeros(positions: int, prefix: int, block: int) -> None:
    check(*EXPAND, expansion(batch([0, 4], SMALL, positions, 20, block=block), SMALL[0], prefix), "trn2")


@pytest.mark.parametrize("block", [0, 1, 2, 16])
@pytest.mark.parametrize(("new", "prefix"), [(1, 0), (127, 0), (129, 0), (900, 0), (640, 300), (3, 997)])
def test_prompts_of_any_length(new: int, prefix: int, block: int) -> None:
    """Pieces of 4, 2 and 1 chunks of 128 and of a part of one; pages that are smaller and larger than a partition's."""
    given = batch([max(0, prefix - 2), prefix], SMALL, 1024, new, block=block)
    check(*EXPAND, expansion(given, SMALL[0], prefix), "trn2")


def test_prompts_with_projections_of_several_groups_of_heads() -> None:
    """Of 40 heads of 200 latent elements in float32 two groups have 16, the last one 8."""
    sizes = (40, 200, 8, 128, 20)
    check(*EXPAND, expansion(batch([0, 0], sizes, 640, 600), sizes[0]), "trn2")
    check(*EXPAND, expansion(batch([100], sizes, 304, 140, block=16), sizes[0], 140), "trn2")


def test_padded_tokens_may_have_positions_behind_the_tables_of_angles() -> None:
    """Clamped to the last one, as a model gives them; their slots go on."""
    given = list(expansion(batch([0, 0], SMALL, 128, 100, block=16), SMALL[0]))
    given[2] = np.minimum(given[2], 69)
    given[5:7] = (each[:70] for each in given[5:7])
    check(*EXPAND, tuple(given), "trn2")


@pytest.mark.slow
def test_many_sequences() -> None:
    check(*DECODE, batch(list(range(60)), SMALL, 129), "trn2")
    check(*DECODE, batch(list(range(128)), SMALL, 128, block=16), "trn2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequences", "heads", "dtype"),
    [(32, 128, BF16), (128, 32, BF16), (128, 16, np.float32)],
)
def test_the_largest_launches_fit(sequences: int, heads: int, dtype: Any) -> None:
    """Dry, for a latent of 512 and a key of 64 elements, in pages of 16 positions."""
    held = batch([0], (heads, 512, 64, 128, 128), 4096, dtype=dtype, block=16)
    q, kv, _, at, scale, *weights, _, _ = held
    rows = [np.broadcast_to(each[:1], (sequences, each.shape[1])) for each in (q, kv, at)]
    pages = np.broadcast_to(np.zeros((), dtype), (sequences * 256, 16, 576))
    table = np.broadcast_to(np.int32(0), (sequences, 256))
    given = (*rows[:2], pages, rows[2], scale, *weights, rows[2], table)
    for target in TARGETS:
        world = simulate.World(target)
        world.launch(kernels.latent_attention_decode, [(given, {})], mode=simulate.Mode.dry)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "heads", "value", "dtype"),
    [(10240, 32, 128, BF16), (5120, 16, 128, np.float32), (20000, 16, 128, BF16), (640, 4, 512, np.float32)],
)
def test_the_largest_prompts_fit(tokens: int, heads: int, value: int, dtype: Any) -> None:
    """Dry, for a latent of 512 and a key of 64 elements; with one group of heads there is no limit."""
    for target in TARGETS:
        world = simulate.World(target)
        given = long_prompt(tokens, heads, value, dtype)
        world.launch(kernels.latent_keys_values, [(given, {})], mode=simulate.Mode.dry)


def long_prompt(tokens: int, heads: int, value: int, dtype: Any) -> tuple[Any, ...]:
    """Arguments of a dry launch: a sequence of so many tokens."""
    given = expansion(batch([0], (heads, 512, 64, 128, value), 128, dtype=dtype), heads)
    rows = [np.broadcast_to(each[:1], (tokens, each.shape[1])) for each in (given[0], given[2])]
    cache = np.broadcast_to(np.zeros((), dtype), (1, tokens, 576))
    return (rows[0], cache, rows[1], *given[3:])


def test_scores_of_any_magnitude() -> None:
    """The softmax is relative to the largest score of several pieces, wherever it lies."""
    for place in (5, 600, 1290):
        given = list(batch([1295], SMALL, 1300, dtype=np.float32))
        given[2][0, place] *= 1000.0
        given[2][0, 700] *= -3000.0
        check(*DECODE, tuple(given), "trn2")


def test_numbers_behind_the_last_position_change_nothing() -> None:
    firsts = [0, 140, 299]
    clean = batch(firsts, SMALL, 300, dtype=BF16)
    dirty = copied(clean)
    for sequence, first in enumerate(firsts):
        dirty[2][sequence, first:] = 1e20
    outputs = [run(kernels.latent_attention_decode, arguments, "trn2")[0] for arguments in (clean, dirty)]
    assert np.array_equal(*outputs)


def naive(given: tuple[Any, ...], heads: int) -> np.ndarray:
    """Attention of the new tokens with keys and values of every head, in float64, from expanded rows."""
    q, kv, cache, at, scale, *rest = (
        each.astype(np.float64) if isinstance(each, np.ndarray) and each.dtype.kind == "f" else each
        for each in given
    )
    sequences, held = len(cache), int(at[0, 0])
    new = len(q) // sequences
    keys, values, _ = kernels.latent_keys_values_reference(kv, cache, at, *rest, heads, held)
    outputs = []
    for token in range(len(q)):
        seen = held + token % new + 1
        own = keys[token // new, :, :, :seen], values[token // new, :, :seen]
        scores = scale * (q[token].reshape(heads, 1, -1) @ own[0])[:, 0]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        outputs.append((weights[:, None] @ own[1]).reshape(-1))
    return np.stack(outputs)


def test_absorbed_equals_naive() -> None:
    """All sequences have as many cached positions; float64 both, and the kernel within the bound of its reference."""
    given = batch([200, 200], (4, 136, 8, 16, 20), 260, 3)
    wide = tuple(
        each.astype(np.float64) if isinstance(each, np.ndarray) and each.dtype.kind == "f" else each
        for each in given
    )
    absorbed, _ = kernels.latent_attention_decode_reference(*copied(wide))
    assert np.abs(absorbed - naive(given, 4)).max() < 1e-12 * np.abs(absorbed).max()


@pytest.mark.parametrize("prefix", [0, 128])
def test_prompts_by_keys_and_values_equal_decode_steps(prefix: int) -> None:
    """attention_prefill with expanded keys and values of 24 elements and 12, and a launch of decode attention."""
    heads, new = SMALL[0], 20
    given = batch([prefix, prefix // 2], SMALL, 160, new)
    keys, values, cache = run(kernels.latent_keys_values, expansion(given, heads, prefix), "trn2")
    at = given[3] if prefix else None
    o = run(
        kernels.attention_prefill, (given[0], None, None, keys, values, given[4], heads, at, prefix), "trn2"
    )
    decoded, rows = run(kernels.latent_attention_decode, given, "trn2")
    assert np.array_equal(cache, rows)
    compare_all((o, rows), kernels.latent_attention_decode_reference, given)
    assert decoded.shape == o.shape == (2 * new, heads * SMALL[4])


def changed(given: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*given[:place], value, *given[place + 1 :])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (batch([0], (129, 24, 8, 2, 2), 24), "at most 128 queries of a sequence, not 129"),
        (batch([0] * 129, SMALL, 4), "at most 128 tokens, not 129"),
        (batch([0] * 65, (32, 512, 8, 2, 2), 2), "at most 32768 bytes of queries in a partition, not 33280"),
        (batch([0], (2, 513, 8, 4, 4), 24), "at most 512 elements of the latent, not 513"),
        (batch([0], (2, 24, 8, 129, 4), 24), "at most 128 plain elements of a head, not 129"),
        (batch([0], (2, 24, 128, 4, 4), 24), "at most 128 rotated elements and new tokens of a sequence"),
        (batch([0], (2, 24, 8, 4, 513), 24), "at most 512 elements of a value, not 513"),
        (changed(batch([0], SMALL, 24), 4, 0.0), "scale is 0.0"),
        (changed(batch([0], SMALL, 24), 2, normal(1, 1, 24, 30)), "kv is [1, 30], not"),
        (batch([0], SMALL, 144, block=48), "a page has 1, 2, 4 … 128 positions, not 48"),
        (batch([0], SMALL, 64, block=16), "the pages of a sequence hold a multiple of 128 positions, not 64"),
    ],
)
def test_decode_steps_that_are_refused(given: tuple[Any, ...], said: str) -> None:
    """Their twins at the limits are tried above."""
    with pytest.raises((AssertionError, simulate.NkwError)) as refused:
        run(kernels.latent_attention_decode, given, "trn2")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (expansion(batch([0], SMALL, 24, 20), 3, 25), "at most 24 positions of a prefix, not 25"),
        (changed(expansion(batch([0], SMALL, 24, 20), 3), 1, normal(1, 1, 19, 32)), "at most 19 new tokens"),
        (expansion(batch([0], SMALL, 24, 20), 5), "do not divide into 5 heads"),
        (expansion(batch([0], (2, 24, 8, 129, 4), 24, 20), 2), "at most 128 plain elements of a head"),
        (long_prompt(10241, 32, 128, BF16), "at most 81920 bytes of latents in a partition, not 81928"),
    ],
)
def test_prompts_that_are_refused(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(AssertionError) as refused:
        run(kernels.latent_keys_values, given, "trn2")
    assert said in str(refused.value)


def test_the_second_of_two_cores_has_nothing_to_do() -> None:
    given = batch([20, 7], SMALL, 128, block=16)
    alone = run(kernels.latent_attention_decode, given, "trn2")
    world = simulate.World("trn2", logical_core_size=2)
    both = world.launch(kernels.latent_attention_decode, [(copied(given), {})]).outputs[0]
    for one, other in zip(alone, both):
        assert np.array_equal(one, other)
