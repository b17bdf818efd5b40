"""latent_attention_decode and latent_keys_values: absorbed equals naive, any sizes, pages, masks, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import check, compare_all, copied, in_float64, normal, run
from tests.kernels.case import (
    BF16,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)

SMALL = (3, 24, 8, 16, 12)
"""Heads; elements of the latent, of the rotated and of the plain part of a key, and of a value."""


def batch(
    firsts: Sequence[int] = (0,),
    sizes: tuple[int, ...] = SMALL,
    positions: int = 24,
    new: int = 1,
    dtype: Any = F32,
    block: int = 0,
    weight_dtype: Any = None,
) -> tuple[Any, ...]:
    """Return arguments for sequences whose first new token has the given positions; pages in random order."""
    heads, rank, rope, plain, value = sizes
    sequences, width = len(firsts), rank + rope
    token_positions = (np.array(firsts)[:, None] + np.arange(new)).reshape(-1, 1).astype(np.int32)
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(rope // 2) / (rope // 2))
    tables = np.cos(angles).astype(F32), np.sin(angles).astype(F32)
    q = normal(1, sequences * new, heads * (rope + plain), dtype=dtype)
    kv = normal(2, sequences * new, width, dtype=dtype)
    cache = normal(3, sequences, positions, width, dtype=dtype)
    norm = 1 + normal(4, 1, rank, dtype=dtype, scale=0.1)
    w_uk = normal(5, heads * plain, rank, dtype=weight_dtype or dtype, scale=rank**-0.5)
    w_uv = normal(6, rank, heads * value, dtype=weight_dtype or dtype, scale=rank**-0.5)
    inputs = (token_positions, (rope + plain) ** -0.5, norm, 1e-6, *tables, w_uk, w_uv)
    if not block:
        return (q, kv, cache, *inputs)
    count = positions // block
    order = np.random.default_rng(1).permutation(sequences * count + 3).astype(np.int32)
    block_tables = order[: sequences * count].reshape(sequences, count)
    pages = np.zeros((len(order), block, width), dtype)
    pages[block_tables] = cache.reshape(sequences, count, block, width)
    slots = [
        [block_tables[token // new, position // block] * block + position % block]
        for token, position in enumerate(token_positions[:, 0])
    ]
    return (q, kv, pages, *inputs, np.array(slots, np.int32), block_tables)


def expansion(inputs: tuple[Any, ...], heads: int, prefix: int = 0) -> tuple[Any, ...]:
    """Return the same tokens as those of a prompt."""
    _, kv, cache, positions, _, *weights = inputs
    return (kv, cache, positions, *weights[:6], heads, prefix, *weights[6:])


def prompts(
    firsts: Sequence[int] = (0,),
    sizes: tuple[int, ...] = SMALL,
    positions: int = 24,
    new: int = 20,
    dtype: Any = F32,
    block: int = 0,
    weight_dtype: Any = None,
    prefix: int = 0,
) -> tuple[Any, ...]:
    return expansion(batch(firsts, sizes, positions, new, dtype, block, weight_dtype), sizes[0], prefix)


def launches(
    sequences: int = 1,
    heads: int = 3,
    rank: int = 24,
    rope: int = 8,
    plain: int = 16,
    value: int = 12,
    positions: int = 24,
    new: int = 1,
    dtype: Any = F32,
    block: int = 0,
) -> tuple[Any, ...]:
    """Return a step of equal sequences."""
    return batch([0] * sequences, (heads, rank, rope, plain, value), positions, new, dtype, block)


def one_score(index: int) -> dict[str, Any]:
    """Return one large score of several pieces, and one far below all others."""

    def grown(cache: np.ndarray) -> np.ndarray:
        factors = np.ones((1, 1300, 1), F32)
        factors[0, [index, 700], 0] = 1000, -3000
        return cache * factors

    return dict(firsts=(1295,), positions=1300, cache=grown)


ANY_SIZES = [(1, 24, 2, 1, 1), (5, 24, 126, 8, 8), (2, 24, 8, 128, 8), (2, 24, 8, 8, 512), (128, 24, 8, 4, 4)]
RANKS = [(2, rank, 4, 6, 10) for rank in (2, 64, 127, 128, 129, 200, 512)]
BEHIND = [0, 140, 299]


class TestLatentAttentionDecode(KernelTests):
    """The softmax is relative to the largest score of several pieces, wherever it lies.

    Pieces have 16 chunks and fewer; runs are of a page, of a part of one, and of several tables' entries.
    """

    case = KernelCase(
        kernels.latent_attention_decode,
        batch,
        values=[
            *together(
                "dtype weight_dtype",
                *((F32, F32), (BF16, BF16), (F32, BF16)),
                firsts=(0, 130, 171),
                sizes=(4, 136, 8, 16, 20),
                positions=172,
            ),
            *(
                dict(firsts=(0, size // 2, size - 1), positions=size)
                for size in (1, 8, 127, 128, 129, 384, 700)
            ),
            *vary(firsts=(20, 7), sizes=RANKS),
            *slow(*vary(firsts=(20, 7), sizes=ANY_SIZES)),
            *vary(firsts=(0, 3, 100), positions=300, new=[2, 3, 42]),
            *vary(firsts=(2200, 17), positions=2432, block=[1, 16, 64, 128]),
            *slow(
                dict(firsts=tuple(range(60)), positions=129),
                dict(firsts=tuple(range(128)), positions=128, block=16),
            ),
            *map(one_score, (5, 600, 1290)),
        ],
        refusals=[
            refuse("scale is 0.0", scale=0.0),
            refuse("kv has to be [1, 32], not", kv=normal(1, 1, 30)),
            refuse("a page has 1, 2, 4 … 128 positions, not 48", dict(positions=384, block=64), block=48),
            refuse(
                "the pages of a sequence hold a multiple of 128 positions, not 64",
                dict(positions=128, block=16),
                positions=64,
            ),
        ],
        undefined=[
            Undefined(
                dict(
                    cache=tuple(
                        np.concatenate(rows)
                        for rows in zip(
                            *(
                                (np.full(300 - first, row), np.arange(first, 300))
                                for row, first in enumerate(BEHIND)
                            )
                        )
                    )
                ),
                dict(firsts=BEHIND, positions=300, dtype=BF16),
                1e20,
                kept=lambda _, outputs: outputs[:1],
            )
        ],
        two_cores=[dict(firsts=(20, 7), positions=128, block=16)],
    )


class TestLimitsOfLatentAttentionDecode(KernelTests):
    """The largest launches have a latent of 512 and a key of 64 elements, in pages of 16 positions."""

    case = KernelCase(
        kernels.latent_attention_decode,
        launches,
        limits=[
            limit("heads", 128, "at most 128 queries of a sequence, not 129", rank=24, plain=2, value=2),
            limit("sequences", 128, "at most 128 tokens, not 129", dry=True, positions=4),
            limit(
                "sequences",
                64,
                "at most 32768 bytes of queries in a partition, not 33280",
                dry=True,
                heads=32,
                rank=512,
                plain=2,
                value=2,
                positions=2,
            ),
            limit("rank", 512, "at most 512 elements of the latent, not 513", dry=True, plain=4, value=4),
            limit("plain", 128, "at most 128 plain elements of a head, not 129", dry=True, value=4),
            limit(
                "rope",
                126,
                "at most 128 rotated elements and new tokens of a sequence",
                step=2,
                dry=True,
                plain=4,
                value=4,
            ),
            limit("value", 512, "at most 512 elements of a value, not 513", dry=True, plain=4),
        ],
        fits=slow(
            *together(
                "sequences heads dtype",
                *((32, 128, BF16), (128, 32, BF16), (128, 16, F32)),
                rank=512,
                rope=64,
                plain=128,
                value=128,
                positions=4096,
                block=16,
            )
        ),
    )


def long_prompt(new: int, heads: int = 32, value: int = 128, dtype: Any = BF16) -> tuple[Any, ...]:
    """Return one prompt, for a latent of 512 and a key of 64 elements."""
    return prompts((0,), (heads, 512, 64, 128, value), new, new, dtype)


class TestLatentKeysValues(KernelTests):
    """Pieces of 4, 2 and 1 chunks of 128 and of a part of one; pages smaller and larger than a partition's.

    Padded tokens behind the cache have rows of zeros. Of 40 heads of 200 latent elements in float32 two groups have 16,
    the last one 8.
    """

    case = KernelCase(
        kernels.latent_keys_values,
        prompts,
        values=[
            *together(
                "dtype weight_dtype",
                *((F32, F32), (BF16, BF16), (F32, BF16)),
                firsts=(0, 0),
                sizes=(4, 136, 8, 16, 20),
                positions=40,
                new=30,
            ),
            *vary(firsts=(0, 0), sizes=RANKS),
            *slow(*vary(firsts=(0, 0), sizes=ANY_SIZES)),
            *(
                dict(firsts=(prefix // 2, prefix), positions=256, new=new, prefix=prefix, block=block)
                for prefix, new in ((0, 140), (128, 60))
                for block in (1, 16, 64, 128)
            ),
            *together(
                "positions prefix block",
                *((24, 24, 0), (24, 5, 0), (128, 128, 16), (256, 200, 16)),
                firsts=(0, 4),
            ),
            *(
                dict(firsts=(max(0, prefix - 2), prefix), positions=1024, new=new, prefix=prefix, block=block)
                for new, prefix in ((1, 0), (127, 0), (129, 0), (900, 0), (640, 300), (3, 997))
                for block in (0, 1, 2, 16)
            ),
            dict(firsts=(0, 0), sizes=(40, 200, 8, 128, 20), positions=640, new=600),
            dict(firsts=(100,), sizes=(40, 200, 8, 128, 20), positions=304, new=140, block=16, prefix=140),
        ],
        refusals=[
            refuse("at most 24 positions of a prefix, not 25", dict(prefix=24), prefix=25),
            refuse("at most 19 new tokens", dict(new=19), cache=normal(1, 1, 19, 32), new=20),
            refuse("do not divide into 5 heads", heads=5),
            refuse(
                "at most 128 plain elements of a head",
                dict(sizes=(2, 24, 8, 128, 4)),
                sizes=(2, 24, 8, 129, 4),
            ),
        ],
    )


class TestLimitsOfLatentKeysValues(KernelTests):
    """With one group of heads there is no limit."""

    case = KernelCase(
        kernels.latent_keys_values,
        long_prompt,
        limits=slow(
            limit("new", 10240, "at most 81920 bytes of latents in a partition, not 81928", dry=True)
        ),
        fits=slow(
            *together(
                "new heads value dtype", (5120, 16, 128, F32), (20000, 16, 128, BF16), (640, 4, 512, F32)
            )
        ),
    )


def naive(inputs: tuple[Any, ...], heads: int) -> np.ndarray:
    """Return attention of the new tokens with keys and values of every head, in float64, from expanded rows."""
    q, kv, cache, positions, scale, *constants = (in_float64(array) for array in inputs)
    sequences, cached = len(cache), int(positions[0, 0])
    new = len(q) // sequences
    keys, values, _ = kernels.latent_keys_values_reference(kv, cache, positions, *constants, heads, cached)
    outputs = []
    for token in range(len(q)):
        seen = cached + token % new + 1
        token_cache = keys[token // new, :, :, :seen], values[token // new, :, :seen]
        scores = scale * (q[token].reshape(heads, 1, -1) @ token_cache[0])[:, 0]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        outputs.append((weights[:, None] @ token_cache[1]).reshape(-1))
    return np.stack(outputs)


def test_absorbed_equals_naive() -> None:
    """All sequences have as many cached positions; float64 both, and the kernel within the bound of its reference."""
    inputs = batch([200, 200], (4, 136, 8, 16, 20), 260, 3)
    absorbed, _ = kernels.latent_attention_decode_reference(*copied(list(map(in_float64, inputs))))
    assert np.abs(absorbed - naive(inputs, 4)).max() < 1e-12 * np.abs(absorbed).max()


@pytest.mark.parametrize("prefix", [0, 128])
def test_prompts_by_keys_and_values_equal_decode_steps(prefix: int) -> None:
    """attention_prefill with expanded keys and values of 24 elements and 12, and a launch of decode attention."""
    heads, new = SMALL[0], 20
    inputs = batch([prefix, prefix // 2], SMALL, 160, new)
    keys, values, cache = run(kernels.latent_keys_values, expansion(inputs, heads, prefix), "trn2")
    positions = inputs[3] if prefix else None
    o = run(
        kernels.attention_prefill,
        (inputs[0], keys, values, inputs[4], None, None, heads, positions, prefix),
        "trn2",
    )
    decoded, rows = run(kernels.latent_attention_decode, inputs, "trn2")
    assert np.array_equal(cache, rows)
    compare_all((o, rows), kernels.latent_attention_decode_reference, inputs)
    assert decoded.shape == o.shape == (2 * new, heads * SMALL[4])


def test_padded_tokens_may_have_positions_behind_the_tables_of_angles() -> None:
    """Clamped to the last one, as a model gives them; their slots go on."""
    inputs = list(prompts((0, 0), positions=128, new=100, block=16))
    inputs[2] = np.minimum(inputs[2], 69)
    inputs[5:7] = (table[:70] for table in inputs[5:7])
    check(kernels.latent_keys_values, kernels.latent_keys_values_reference, tuple(inputs), "trn2")
