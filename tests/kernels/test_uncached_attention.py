"""attention_prefill without caches, as encoders and denoisers launch it: of all with all, and padded keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, compare_all, in_float64, in_order, normal, run
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, KernelTests, limit, refuse, together, vary
from tests.kernels.test_attention_prefill import attended
from tests.kernels.test_streams import stream

GARBAGE = (np.nan, np.inf, -3e38)


def uncached(
    queries: int = 20,
    keys: int = 0,
    heads: int = 2,
    kv_heads: int = 2,
    depth: int = 16,
    sequences: int = 1,
    dtype: Any = F32,
    lengths: tuple[int, ...] | None = None,
    garbage: float = np.nan,
    cached: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    """Draw arguments of `queries` queries and `keys` keys of each sequence, as many as queries if 0.

    A sequence sees as many keys as `lengths` has, negative ones counted from the end; the rows behind are `garbage`.
    """
    keys = keys or queries
    q = normal(0, sequences * queries, heads * depth, dtype=dtype)
    k, v = (normal(seed, sequences, keys, kv_heads * depth, dtype=dtype) for seed in (1, 2))
    key_lengths = None
    if lengths is not None:
        key_lengths = np.array([[length % (keys + 1)] for length in lengths], np.int32)
        for b, length in enumerate(key_lengths[:, 0] if k.flags.writeable else ()):
            k[b, length:] = v[b, length:] = garbage
    caches = None, None
    if cached:
        caches = tuple(
            np.zeros((sequences, kv_heads, *shape), dtype) for shape in ((depth, keys), (keys, depth))
        )
    rows = dict(q=q, k=k.reshape(-1, kv_heads * depth), v=v.reshape(-1, kv_heads * depth))
    options = dict(causal=False, key_lengths=key_lengths, sequences=sequences, num_kv_heads=kv_heads)
    options |= dict(k_cache=caches[0], v_cache=caches[1], scale=depth**-0.5)
    return in_order(kernels.attention_prefill, **(rows | options | more))


class TestAttentionWithoutCaches(KernelTests):
    """Self attention, attention to fewer and to more keys, and causal attention, none of which stores anything."""

    case = KernelCase(
        kernels.attention_prefill,
        uncached,
        values=[
            *vary(queries=[1, 127, 128, 129, 300], depth=8),
            *together("queries keys", (300, 120), (130, 1), (5, 300), sequences=[1, 3], depth=[72]),
            *vary(queries=70, causal=True, sequences=[1, 2]),
            dict(queries=33, heads=4, kv_heads=1, softcap=5.0, sinks=normal(5, 1, 4)),
        ],
        every_chip=[*vary(queries=1300, heads=1, kv_heads=1, depth=64, dtype=[*DTYPES])],
        refusals=[
            refuse("without caches k, v and num_kv_heads are needed", num_kv_heads=None),
            refuse("without caches k, v and num_kv_heads are needed", k=None, v=None),
            refuse("k has 32 columns, which do not divide into 3 heads", num_kv_heads=3),
            refuse("slots belongs to caches; omit it", slots=np.zeros((20, 1), np.int32)),
            refuse("cache_rows belongs to caches; omit it", cache_rows=np.zeros((1, 1), np.int32)),
            refuse("k_scale belongs to caches; omit it", k_scale=np.ones((1, 2), F32)),
            refuse("prefix is 4; without caches there is none", dict(prefix=0), prefix=4),
            refuse("k_cache and v_cache come together", dict(cached=True), v_cache=None),
            refuse("20 tokens do not divide into 3 sequences", sequences=lambda _: 3),
            refuse("sequences is 2, but the caches have 1", dict(cached=True), sequences=lambda _: 2),
        ],
        two_sums=[*together("heads kv_heads", (4, 2), (4, 1), (1, 1), queries=[385])],
        tolerance=attended,
        seeds=0,
    )


class TestKeyLengths(KernelTests):
    """Lengths of one key, of all but one, and of all; what is behind them may be anything, in caches too."""

    case = KernelCase(
        kernels.attention_prefill,
        uncached,
        values=[
            *(
                setting
                for keys in (127, 128, 129, 300)
                for setting in together(
                    "sequences lengths",
                    (1, (1,)),
                    (2, (-2, 100)),
                    (3, (-1, 1, -2)),
                    queries=70,
                    keys=keys,
                    depth=8,
                )
            ),
            *vary(queries=150, keys=300, lengths=(128,), garbage=[*GARBAGE], dtype=[*DTYPES], depth=72),
            *vary(queries=140, sequences=2, lengths=(77, -1), cached=True, dtype=[*DTYPES], depth=[8, 192]),
            dict(queries=20, keys=150, heads=4, kv_heads=1, lengths=(130,)),
        ],
        every_chip=[*vary(queries=1300, heads=1, kv_heads=1, depth=64, lengths=(1290,), dtype=[*DTYPES])],
        refusals=[
            refuse("key_lengths go with k and v, without causal", dict(lengths=(3,)), causal=True),
            refuse(
                "key_lengths is [1, 1] int32, not (2, 1) int32",
                dict(lengths=(3,)),
                key_lengths=np.ones((2, 1), np.int32),
            ),
            refuse("not (1, 1) float32", dict(lengths=(3,)), key_lengths=np.ones((1, 1), F32)),
            refuse("key_lengths go with k and v", dict(cached=True, lengths=(3,)), k=None, v=None),
        ],
        fits=[
            *vary(queries=8192, heads=1, kv_heads=1, depth=128, lengths=(8000,), dtype=[*DTYPES]),
        ],
        two_sums=[*together("heads kv_heads", (4, 2), (4, 1), (1, 1), queries=385, lengths=(300,))],
        tolerance=attended,
        seeds=0,
    )


def test_key_lengths_do_not_change_the_stream() -> None:
    launches = [uncached(150, 300, sequences=2, lengths=lengths) for lengths in ((1, 300), (200, 7))]
    assert len({stream("attention_prefill", arguments).text() for arguments in launches}) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_all_keys_seen_give_the_bytes_of_no_lengths(target: str) -> None:
    plain, padded = (uncached(129, 129, dtype=BF16, lengths=lengths) for lengths in (None, (129,)))
    first, second = (run(kernels.attention_prefill, arguments, target) for arguments in (plain, padded))
    assert first.tobytes() == second.tobytes()


def test_reference_of_key_lengths_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the references")
    inputs = [in_float64(array) for array in uncached(7, 30, 4, 2, 16, 2, lengths=(3, 30), garbage=0.0)]
    q, k, v = (
        torch.from_numpy(rows.copy()).reshape(2, count, -1, 16).transpose(1, 2)
        for rows, count in ((inputs[0], 7), (inputs[4], 30), (inputs[5], 30))
    )
    seen = torch.arange(30) < torch.tensor([[3], [30]])
    truth = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None, None], scale=inputs[3], enable_gqa=True
    )
    reference = kernels.attention_prefill_reference(*inputs)
    assert np.allclose(reference, truth.transpose(1, 2).reshape(14, -1).numpy(), rtol=1e-12, atol=1e-12)


def biased(
    queries: int = 20,
    heads: int = 2,
    depth: int = 16,
    sequences: int = 1,
    dtype: Any = F32,
    bias_dtype: Any = None,
    scale: float = 1.0,
    largest: float = 4.0,
    **more: Any,
) -> tuple[Any, ...]:
    """Draw arguments of self attention with a bias for each head and distance, of normal numbers times `largest`."""
    bias = normal(7, heads, 2 * queries - 1, dtype=bias_dtype or dtype, scale=largest)
    more = dict(scale=scale, position_bias=bias) | more
    return uncached(queries, 0, heads, heads, depth, sequences, dtype, **more)


class TestPositionBias(KernelTests):
    """Biases of the activations' dtype and of the other one, with scales that bfloat16 holds and others."""

    case = KernelCase(
        kernels.attention_prefill,
        biased,
        values=[
            *vary(queries=[1, 127, 128, 129, 300], depth=8, dtype=[*DTYPES]),
            *vary(queries=130, bias_dtype=[*DTYPES], scale=[0.25, 0.3], dtype=[*DTYPES]),
            *vary(queries=600, heads=1, depth=64, sequences=2, dtype=[*DTYPES]),
            # Biases of padded keys may exceed all scores.
            *vary(queries=140, sequences=2, lengths=(77, -2), largest=[1.0, 1e4], dtype=[*DTYPES]),
            dict(queries=140, cached=True, sinks=normal(5, 1, 2)),
        ],
        every_chip=[*vary(queries=1100, heads=1, depth=64, dtype=[*DTYPES])],
        refusals=[
            refuse("position_bias is [2, 39], not (1, 39)", position_bias=lambda bias: bias[:1]),
            refuse("position_bias is [2, 39], not (2, 40)", position_bias=normal(1, 2, 40)),
            refuse("position_bias is float32 or bfloat16", position_bias=np.zeros((2, 39), np.float16)),
            refuse("position_bias goes with no soft cap", softcap=5.0),
            refuse("position_bias goes with k and v of as many rows as q", causal=True),
            refuse("position_bias goes with k and v of as many rows", q=lambda q: q[:10]),
            refuse(
                "position_bias goes with one query head for each key/value head, not 2 for 1",
                num_kv_heads=1,
                k=lambda k: k[:, :16].copy(),
                v=lambda v: v[:, :16].copy(),
            ),
        ],
        limits=[limit("queries", 2048, "position_bias for at most 2048 tokens", dry=True, heads=1, depth=64)],
        fits=[*vary(queries=2048, depth=512, bias_dtype=F32, scale=0.3, lengths=(2000,), dtype=[*DTYPES])],
        two_sums=[*vary(queries=300, heads=[1, 2], dtype=BF16)],
        tolerance=attended,
        seeds=0,
    )


def test_reference_of_biases_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the references")
    inputs = [in_float64(array) for array in biased(30, 2, 16, scale=0.3)]
    q, k, v = (torch.from_numpy(inputs[i].copy()).reshape(1, 30, -1, 16).transpose(1, 2) for i in (0, 4, 5))
    keys, queries = torch.arange(30), torch.arange(30)[:, None]
    bias = torch.from_numpy(in_float64(normal(7, 2, 59, scale=4.0)))[:, keys - queries + 29]
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=0.3)
    reference = kernels.attention_prefill_reference(*inputs)
    assert np.allclose(reference, truth.transpose(1, 2).reshape(30, -1).numpy(), rtol=1e-12, atol=1e-12)


def joint(
    queries: int = 20,
    text: int = 6,
    heads: int = 2,
    kv_heads: int = 2,
    depth: int = 16,
    sequences: int = 1,
    dtype: Any = F32,
    **more: Any,
) -> tuple[Any, ...]:
    """Draw arguments of joint attention of `queries` rows and `text` rows of each sequence."""
    rows = [
        normal(seed, sequences * text, count * depth, dtype=dtype)
        for seed, count in ((10, heads), (11, kv_heads), (12, kv_heads))
    ]
    second = dict(zip(("text_q", "text_k", "text_v"), rows))
    return uncached(queries, 0, heads, kv_heads, depth, sequences, dtype, **(second | more))


class TestJointAttention(KernelTests):
    """Streams that fill blocks of 128 keys, and ragged ones, whose gap is in the middle of the keys."""

    case = KernelCase(
        kernels.attention_prefill,
        joint,
        values=[
            *together(
                "queries text", (128, 129), (127, 1), (300, 128), (1, 300), sequences=[1, 2, 3], depth=[8]
            ),
            *vary(queries=[129, 256], text=33, depth=192, dtype=[*DTYPES]),
            dict(queries=70, text=30, heads=4, kv_heads=1, softcap=5.0, sinks=normal(5, 1, 4)),
        ],
        every_chip=[
            *vary(queries=1152, text=77, heads=1, kv_heads=1, depth=64, dtype=[*DTYPES]),
            dict(queries=1100, text=300, heads=1, kv_heads=1, depth=128, dtype=BF16),
        ],
        refusals=[
            refuse("text_q, text_k and text_v come together", text_v=None),
            refuse("go without caches, causal attention", causal=True),
            refuse("go without caches, causal attention", lengths=(3,)),
            refuse("go without caches, causal attention", cached=True),
            refuse("go without caches, causal attention", position_bias=normal(1, 2, 39)),
            refuse("text_q has 31 columns of float32, not 32 of float32", text_q=lambda q: q[:, 1:].copy()),
            refuse("v is [6, 32] beside k (6, 32), not (5, 32)", text_v=lambda v: v[1:]),
            refuse(
                "5 rows of text do not divide into 2 sequences",
                dict(sequences=2, text=3),
                text_q=lambda q: q[1:],
            ),
        ],
        limits=[
            limit(
                "text",
                4096,
                "at most 12288 keys for heads of 128",
                dry=True,
                queries=8100,
                heads=1,
                kv_heads=1,
                depth=128,
                dtype=BF16,
            ),
        ],
        two_sums=[*together("heads kv_heads", (4, 2), (4, 1), (1, 1), queries=200, text=[30, 128])],
        tolerance=compare_all,
        seeds=0,
    )


@pytest.mark.parametrize(("queries", "text"), [(128, 70), (256, 128)])
def test_joint_attention_has_the_bytes_of_rows_laid_end_to_end(queries: int, text: int) -> None:
    arguments = joint(queries, text, dtype=BF16)
    streams = arguments[0], *arguments[4:6]
    rows = [np.concatenate(pair) for pair in zip(streams, arguments[-4:-1])]
    both = in_order(
        kernels.attention_prefill,
        **dict(zip("qkv", rows)),
        **dict(k_cache=None, v_cache=None, scale=arguments[3], num_kv_heads=2, causal=False),
    )
    outputs = run(kernels.attention_prefill, arguments, "trn2")
    assert np.concatenate(outputs).tobytes() == run(kernels.attention_prefill, both, "trn2").tobytes()
