"""attention_decode: batches, ragged sizes, several new tokens, exact maxima, and what caches may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.timing import Reading, dependences, schedule
from tests.kernels.accuracy import compare, copied, in_float64, normal, run
from tests.kernels.bounds import rounding_bound
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    slow,
    together,
)

DECODE = (kernels.attention_decode, kernels.attention_decode_reference)


def caches(
    sequences: int, kv_heads: int, depth: int, positions: int, dtype: Any = F32
) -> tuple[np.ndarray, np.ndarray]:
    return (
        normal(8, sequences, kv_heads, depth, positions, dtype=dtype),
        normal(9, sequences, kv_heads, positions, depth, dtype=dtype),
    )


def projected(tokens: int, heads: int, kv_heads: int, depth: int, dtype: Any = F32) -> tuple[np.ndarray, ...]:
    return (
        normal(1, tokens, heads * depth, dtype=dtype),
        normal(2, tokens, kv_heads * depth, dtype=dtype),
        normal(3, tokens, kv_heads * depth, dtype=dtype),
    )


def following(firsts: Sequence[int], new: int = 1) -> np.ndarray:
    """Return the positions of `new` tokens of each sequence, from the first on."""
    return (np.array(firsts)[:, None] + np.arange(new)).reshape(-1, 1).astype(np.int32)


def batch(
    firsts: Sequence[int],
    heads: int,
    kv_heads: int,
    depth: int,
    positions: int,
    new: int = 1,
    dtype: Any = F32,
    cache: Any = None,
) -> tuple[Any, ...]:
    """Return arguments for sequences whose first new token has the given positions; q and k are rotated already."""
    cache_pair = caches(len(firsts), kv_heads, depth, positions, dtype if cache is None else cache)
    q, k, v = projected(len(firsts) * new, heads, kv_heads, depth, dtype)
    return q, *cache_pair, following(firsts, new), depth**-0.5, k, v


def tables(positions: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(half) / half)
    return np.cos(angles).astype(F32), np.sin(angles).astype(F32)


def in_pages(arguments: tuple[Any, ...], block: int, shared: int = 0) -> tuple[Any, ...]:
    """Return the launch with caches in pages of `block`, in random order; all sequences share the first `shared`."""
    q, k_cache, v_cache, positions, scale, k, v, *rotary = arguments
    sequences, kv_heads, depth, capacity = k_cache.shape
    count, new = capacity // block, len(q) // sequences
    order = np.random.default_rng(1).permutation(sequences * count + 3).astype(np.int32)
    tables = order[: sequences * count].reshape(sequences, count)
    tables[:, :shared] = tables[0, :shared]
    pages = [np.zeros((len(order), block, kv_heads, depth), k_cache.dtype) for _ in "kv"]
    for sequence in range(sequences):
        for page_array, rows in zip(
            pages, (k_cache[sequence].transpose(2, 0, 1), v_cache[sequence].swapaxes(0, 1))
        ):
            page_array[tables[sequence]] = rows.reshape(count, block, kv_heads, depth)
    slots = [
        [tables[token // new, position // block] * block + position % block]
        for token, position in enumerate(positions[:, 0])
    ]
    kv_heads, cos, sin = rotary or (None, None, None)
    inputs = q, *pages, positions, scale, k, v, kv_heads, cos, sin, None, None, 1e-6
    return *inputs, np.array(slots, np.int32), tables


def step(
    firsts: Sequence[int] = (20, 7),
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 16,
    positions: int = 24,
    new: int = 1,
    dtype: Any = F32,
    cache: Any = None,
    half: int = 0,
    block: int = 0,
    shared: int = 0,
) -> tuple[Any, ...]:
    """Draw a batch whose heads turn in `half` pairs, with caches in pages of `block` positions, unless these are 0.

    All sequences share the first `shared` pages.
    """
    inputs = batch(firsts, heads, kv_heads, depth, positions, new, dtype, cache)
    inputs = (*inputs, kv_heads, *tables(positions, half)) if half else inputs
    return in_pages(inputs, block, shared) if block else inputs


def equal(sequences: int = 1, group: int = 1, **settings: Any) -> tuple[Any, ...]:
    """Return a step of sequences without a past."""
    settings["heads"] = settings.get("heads", group * settings.get("kv_heads", 1))
    return step((0,) * sequences, **dict(kv_heads=1, depth=2, positions=8) | settings)


def whole_number_scores(sign: int) -> dict[str, Any]:
    """Return whole numbers, so that scores are exact: without the maximum exp overflows, or gives zeros only.

    Heads that share keys with heads of much larger scores have small ones.
    """
    shares = np.where(np.arange(32) // 8 % 2, 1, 1000).astype(F32)
    return dict(
        q=lambda q: np.round(q * 4) * 25 / shares,
        k=lambda k: np.round(k),
        k_cache=lambda k: np.round(k * 4) * 25 * sign,
        scale=1.0,
    )


def from_position_on(firsts: Sequence[int], end: int) -> dict[str, Any]:
    """Return indices of a cache's elements from the new position of each sequence on."""
    seen = np.arange(end) >= np.array(firsts)[:, None]
    indices = np.nonzero(seen)
    return dict(
        k_cache=(indices[0], slice(None), slice(None), indices[1]),
        v_cache=(indices[0], slice(None), indices[1]),
    )


READ_ONLY = dict.fromkeys("kv", lambda _: None)
"""The caches hold the new keys and values already, of another layer of the step."""
ONES = np.ones((1, 16), F32)
NORMED = dict(half=8, q_norm=ONES, k_norm=ONES)
SINKS = normal(12, 1, 4) * 3
PAST = [0, 1, 140, 299]


ONE_BUFFER = dict(positions=2048, block=16, depth=512, kv_heads=1, heads=1)
"""Pages of which SBUF has room for the values of one group, with keys twice."""


class TestAttentionDecode(KernelTests):
    """More heads than one output tile holds; caches so long that queries take several passes; parts of heads turned."""

    case = KernelCase(
        kernels.attention_decode,
        step,
        values=[
            *(
                dict(firsts=(0, size // 2, size - 1), depth=8, positions=size)
                for size in (1, 8, 127, 128, 129, 384, 700)
            ),
            *(
                dict(heads=6, kv_heads=3, depth=size, half=size // 2)
                for size in (2, 48, 128, 130, 256, 258, 512)
            ),
            dict(depth=32, half=5),
            *together(
                "heads kv_heads new",
                *((4, 4, 3), (6, 2, 2), (32, 2, 4), (1, 1, 128)),
                firsts=(0, 3, 100),
                depth=8,
                positions=300,
                half=4,
            ),
            *slow(
                *(
                    dict(firsts=range(sequences), heads=heads, kv_heads=kv_heads, depth=4, positions=130)
                    for sequences, heads, kv_heads in ((40, 4, 4), (3, 128, 64), (2, 128, 2))
                )
            ),
            dict(firsts=(2100, 5), heads=24, kv_heads=1, depth=4, positions=2304, new=3),
            *slow(*(ONE_BUFFER | dict(firsts=firsts) for firsts in ((2000, 5), (5, 2000, 7)))),
            *together(
                "dtype cache", (F32, BF16), (BF16, ml_dtypes.float8_e4m3), firsts=(130, 3), positions=256
            ),
            *(
                dict(firsts=(200, 0, 299), depth=8, positions=300) | whole_number_scores(sign=sign)
                for sign in (1, -1)
            ),
            *(
                dict(
                    firsts=(0, 70, 296),
                    positions=300,
                    new=3,
                    half=8,
                    window=window,
                    softcap=2.0 if window in (None, 3, 400) else None,
                )
                | (dict(sinks=SINKS) if window in (None, 1, 3) else {})
                for window in (None, 1, 3, 40, 400)
            ),
            *(
                dict(
                    firsts=(0, 130, 171),
                    heads=8,
                    depth=32,
                    positions=172,
                    half=16,
                    dtype=dtype,
                    q_norm=normal(6, 1, 32, dtype=dtype),
                    k_norm=normal(7, 1, 32, dtype=dtype),
                    eps=1e-5,
                )
                for dtype in DTYPES
            ),
        ],
        every_chip=together(
            "firsts heads kv_heads depth positions new block half",
            ((5, 200, 0), 4, 1, 16, 256, 1, 16, 8),
            ((5, 300), 4, 2, 16, 384, 2, 64, 8),
            ((5, 100), 4, 4, 8, 128, 1, 128, 4),
            ((511, 3), 2, 1, 256, 512, 1, 32, 128),
            ((700, 100), 6, 2, 64, 768, 3, 16, 32),
        ),
        refusals=[
            refuse("k has to be [2, 32] for 2 heads of 16", k=lambda k: k[:, 1:]),
            refuse("k is (2, 32), v is (1, 32)", v=lambda v: v[1:]),
            refuse("q has 63 columns, no multiple of 32", q=lambda q: q[:, 1:]),
            refuse("v_cache is [2, 2, 24, 16]", v_cache=lambda v: v[:, :, 1:]),
            refuse("q, k and v are float32, bfloat16", k=lambda k: k.astype(BF16)),
            refuse("scale is 0.0; the exact maximum needs a positive one", scale=0.0),
            refuse(
                "num_kv_heads is 4, but the caches have 2 key/value heads: pass 2 or None", num_kv_heads=4
            ),
            refuse("positions have to be [2, 1], not (1, 2)", positions=np.int32([[20, 7]])),
            refuse(
                "1 new tokens do not divide into 2 sequences",
                **dict.fromkeys(("q", "k", "v"), lambda rows: rows[:1]),
                positions=np.int32([[20]]),
            ),
            refuse("one of cos and sin is None: give both", dict(half=8), sin=lambda _: None),
            refuse("width 9 need heads of 18 elements, not 16", dict(half=8), half=9),
            refuse(
                "one of q_norm and k_norm is None: with new keys give both", NORMED, k_norm=lambda _: None
            ),
            refuse("q_norm has to be [1, 16], not (1, 4)", NORMED, q_norm=ONES[:, :4]),
            refuse("window is 0; a token sees at least its own position", dict(window=1), window=0),
            refuse("softcap is 0.0; scores are capped at a positive number", dict(softcap=0.1), softcap=0.0),
            refuse("sinks have to be [1, 4], not (1, 2)", dict(sinks=SINKS), sinks=SINKS[:, :2]),
            refuse("elements 24 to 768 of k_cache", dict(firsts=(23,)), firsts=(24,)),
            *(
                refuse(
                    "rope_positions have to be (2, 1), as positions, not",
                    dict(half=8, rope_positions=np.zeros((2, 1), np.int32)),
                    rope_positions=np.zeros((rows, 1), np.int32),
                )
                for rows in (1, 3)
            ),
            refuse(
                "slots and block_tables come together",
                dict(positions=128, block=16),
                block_tables=lambda _: None,
            ),
            refuse(
                "slots are [2, 1], not (1, 2)", dict(positions=128, block=16), slots=lambda slots: slots.T
            ),
            refuse(
                "hold a multiple of 128 positions, not 112",
                dict(positions=128, block=16),
                block_tables=lambda numbers: numbers[:, 1:],
            ),
            refuse("v_cache is (18, 16, 2, 16)", dict(positions=128, block=16), v_cache=lambda v: v[1:]),
        ],
        undefined=[
            Undefined(
                from_position_on(PAST, 300),
                dict(firsts=PAST, positions=300, dtype=BF16),
                value,
                kept=lambda arguments, outputs: [
                    outputs[0],
                    *(outputs[1][row, ..., : first + 1] for row, first in enumerate(PAST)),
                ],
            )
            for value in (np.nan, np.inf, -np.inf, 1e30)
        ],
    )


class TestLimitsOfAttentionDecode(KernelTests):
    case = KernelCase(
        kernels.attention_decode,
        equal,
        limits=[
            limit("depth", 512, "an even head size of at most 512 here, not 514", step=2, dry=True, heads=2),
            limit("kv_heads", 128, "at most 128 query heads, not 129", dry=True),
            limit(
                "new", 64, "at most 128 new queries of a kv head, not 130", dry=True, group=2, positions=128
            ),
            limit("sequences", 64, "8192 heads of new tokens, not 8320", dry=True, kv_heads=64, heads=128),
            limit("positions", 16384, "caches of at most 16384 positions, not 16385", dry=True),
            limit(
                "positions",
                85 * 128,
                "caches of at most 10922 positions, not 11008",
                step=128,
                dry=True,
                block=128,
            ),
        ],
        refusals=[refuse("an even head size of at most 512 here, not 3", depth=3)],
        fits=slow(
            *(
                shape | dict(dtype=dtype)
                for dtype in DTYPES
                for shape in (
                    dict(heads=128, kv_heads=8, depth=128, positions=8192, cache=BF16),
                    dict(sequences=64, heads=128, depth=8, positions=128),
                    dict(heads=16, kv_heads=2, depth=512, positions=4096, cache=BF16),
                )
            )
        ),
    )


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_pages_that_are_shared_and_named_twice_and_unused_ones_of_nan(target: str) -> None:
    arguments = batch([40, 70], 4, 2, 16, 128, dtype=BF16)
    paged = in_pages(arguments, 16, shared=2)
    numbers = paged[-1]
    numbers[:, 5:] = numbers[0, 0]  # beyond the positions: any page
    numbers[1, 3] = numbers[1, 2]
    for page_array in paged[1:3]:
        page_array[np.setdiff1d(np.arange(len(page_array)), numbers)] = np.nan
        page_array[numbers[0, 2], 40 - 32 :] = np.nan  # from the first sequence's new position on
    outputs = run(kernels.attention_decode, paged, target)
    wanted = kernels.attention_decode_reference(*copied(paged))
    exact = kernels.attention_decode_reference(*(in_float64(array) for array in paged))
    compare(outputs[0], exact[0], wanted[0])
    for mine, other in zip(outputs[1:], wanted[1:]):
        assert np.array_equal(mine, other, equal_nan=True)


@pytest.mark.parametrize("cores", [1, 2])
def test_pages_of_several_heads_take_about_as_long_as_contiguous_caches(cores: int) -> None:
    """All heads of a run of positions are one piece of a DMA. As a piece for each head it took 11 times as long."""
    contiguous = batch([1000] * 8, 4, 4, 128, 1024, dtype=BF16)
    times_ns = [predict_ns(arguments, cores) for arguments in (contiguous, in_pages(contiguous, 16))]
    assert times_ns[1] < 1.25 * times_ns[0]


def predict_ns(arguments: tuple[Any, ...], cores: int) -> float:
    """Return the time of a launch in the program reading."""
    world = simulate.World("trn2", logical_core_size=cores)
    launch = world.launch(kernels.attention_decode, [(arguments, {})], mode=simulate.Mode.dry)
    return schedule(launch.streams, launch.hardware, Reading.program, dependences(launch.streams)).length_ns


def test_only_the_new_positions_are_written() -> None:
    arguments = batch([5, 30], 4, 2, 16, 172, new=3)
    _, k_cache, v_cache, _, _, k, v = arguments
    before = k_cache.copy(), v_cache.copy()
    _, new_k, new_v = simulate.World("trn1").launch(kernels.attention_decode, [(arguments, {})]).outputs[0]
    assert new_k is k_cache
    assert new_v is v_cache
    for sequence, first in enumerate((5, 30)):
        for head in range(2):
            rows, columns = slice(3 * sequence, 3 * sequence + 3), slice(16 * head, 16 * head + 16)
            before[0][sequence, head, :, first : first + 3] = k[rows, columns].T
            before[1][sequence, head, first : first + 3] = v[rows, columns]
    assert np.array_equal(k_cache, before[0])
    assert np.array_equal(v_cache, before[1])


def test_one_key_far_above_all_others_takes_all_weight() -> None:
    arguments = batch([200, 64], 2, 1, 8, 300)
    q, k_cache, v_cache, *_ = arguments
    k_cache[0, 0, :, 150] = q[0, :8] * 1e4
    output = run(kernels.attention_decode, arguments)[0]
    assert np.array_equal(output[0, :8], v_cache[0, 0, 150])


def test_equal_scores_give_the_mean() -> None:
    arguments = batch([255], 1, 1, 8, 300)
    _, k_cache, v_cache, _, _, k, v = arguments
    k_cache[:], k[:] = 0, 0
    v_cache[0, 0, :255], v[:] = np.arange(255)[:, None], 255
    output = run(kernels.attention_decode, arguments)[0]
    assert np.array_equal(output, np.full((1, 8), 127.5))


def test_sequences_together_equal_each_alone() -> None:
    arguments = batch([0, 70, 129, 171], 4, 2, 16, 172)
    q, k_cache, v_cache, positions, scale, k, v = arguments
    together = run(kernels.attention_decode, arguments)
    for row in range(4):
        rows = slice(row, row + 1)
        alone = run(
            kernels.attention_decode,
            (q[rows], k_cache[rows], v_cache[rows], positions[rows], scale, k[rows], v[rows]),
        )
        assert np.array_equal(alone[1], together[1][rows])
        assert np.array_equal(alone[2], together[2][rows])
        length = int(positions[row, 0]) + 1
        for head in range(4):
            columns = slice(16 * head, 16 * head + 16)
            keys, values = together[1][row, head // 2, :, :length].T, together[2][row, head // 2, :length]
            bound = rounding_bound(q[row, columns].astype(np.float64), keys, values, scale)
            assert np.abs(alone[0][0, columns] - together[0][row, columns]).max() <= bound


def test_reference_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the reference")
    q, k_cache, v_cache, positions, scale, k, v = (in_float64(a) for a in batch([36, 3], 6, 2, 16, 40))
    outputs = kernels.attention_decode_reference(
        q, *copied((k_cache, v_cache)), positions, scale, k, v, 2, *map(in_float64, tables(40, 8))
    )
    cos, sin = (np.tile(in_float64(table)[positions], 2) for table in tables(40, 8))
    turned = []
    for rows in (q, k):
        heads = rows.reshape(2, -1, 16)
        turned.append(heads * cos + np.concatenate([-heads[..., 8:], heads[..., :8]], axis=2) * sin)
    attend = torch.nn.functional.scaled_dot_product_attention
    for row, length in enumerate((36, 3)):
        keys = np.concatenate([k_cache[row, :, :, :length].swapaxes(1, 2), turned[1][row][:, None]], axis=1)
        values = np.concatenate([v_cache[row, :, :length], v[row].reshape(2, 1, 16)], axis=1)
        tensors = (torch.from_numpy(array.copy()) for array in (turned[0][row][:, None], keys, values))
        truth = attend(*tensors, scale=scale, enable_gqa=True).numpy().reshape(1, -1)
        compare(outputs[0][row : row + 1].astype(F32), truth, truth.astype(F32))
