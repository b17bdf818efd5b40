"""Caches of int8, float8_e4m3 and float8_e5m2 with scales of their heads: what they hold, and attention with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import as_tuple, compare_all, copied, normal
from tests.kernels.bounds import rounding_bound
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, Undefined, refuse, together
from tests.kernels.divided import OverPositions
from tests.kernels.test_attention_block_decode import formed
from tests.kernels.test_attention_decode import READ_ONLY, step
from tests.kernels.test_attention_mixed import mixed
from tests.kernels.test_attention_prefill import arguments, continued
from tests.kernels.test_decoder_layer_decode import layer

FP8, E4M3FN, E5M2 = ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {np.int8: 127, FP8: 240, E4M3FN: 448, E5M2: 57344}
PROJECTED = kernels.attention_block_decode_reference, kernels.decoder_layer_decode_reference
SINKS = normal(12, 1, 4) * 3


def scaled(dtype: Any, kv_heads: int = 2) -> dict[str, Any]:
    """Return settings of caches of a dtype; a scale holds 1.5 to 2.5 standard deviations, so some elements clip."""
    factors = np.random.default_rng(3).uniform(1.5, 2.5, (2, 1, kv_heads)).astype(F32)

    def store(cache: np.ndarray) -> np.ndarray:
        numbers = np.clip(
            np.nan_to_num(cache.astype(F32)) * (LARGEST[dtype] / 2), *[-LARGEST[dtype], LARGEST[dtype]]
        )
        return (np.rint(numbers) if dtype is np.int8 else numbers).astype(dtype)

    k_scale, v_scale = factors / F32(LARGEST[dtype])
    return dict(k_cache=store, v_cache=store, k_scale=k_scale, v_scale=v_scale)


def order(stored: np.ndarray) -> np.ndarray:
    """Return integers that order stored numbers: neighbouring numbers have neighbouring ones."""
    bits = stored.view(np.int8).astype(np.int32)
    return bits if stored.dtype == np.int8 else np.where(bits < 0, -(bits & 127), bits)


def within(outputs: Sequence[np.ndarray], reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Assert outputs as near as numpy's; caches hold exactly the reference's numbers.

    Keys and values that a kernel projects itself differ by roundings, so a stored number may be a neighbour.
    """
    dtypes = [array.dtype if isinstance(array, np.ndarray) else None for array in inputs]

    def first(*operands: Any) -> tuple[np.ndarray, ...]:
        stored = [
            array.astype(dtype) if dtype in tuple(LARGEST) else array
            for array, dtype in zip(operands, dtypes)
        ]
        return as_tuple(reference(*stored))[:1]

    compare_all(outputs[:1], first, inputs)
    for cache, expected in zip(outputs[1:], as_tuple(reference(*copied(inputs)))[1:], strict=True):
        assert cache.dtype == expected.dtype
        assert np.abs(order(cache) - order(expected)).max() <= (reference in PROJECTED)


BOTH = [scaled(np.int8), scaled(FP8)]


def find_unseen(arguments: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Return the index of the elements of pages that no sequence has reached."""
    tables, positions = arguments["block_tables"], arguments["positions"][:, 0]
    shape = arguments["k_cache"].shape
    unseen = np.ones(shape[:2], bool)
    for table, position in zip(tables, positions):
        for index in range(position + 1):
            unseen[table[index // shape[1]], index % shape[1]] = False
    return np.nonzero(unseen)


IN_PAGES = dict(positions=128, block=16)


class TestDecode(KernelTests):
    case = KernelCase(
        kernels.attention_decode,
        step,
        values=[
            *(dict(half=8) | setting for setting in BOTH),
            dict(dtype=BF16) | BOTH[0],
            dict(kv_heads=1, new=3, half=4) | scaled(np.int8, 1),
            dict(new=2) | BOTH[0] | READ_ONLY,
            dict(half=8) | scaled(E5M2),
            dict(depth=130, new=2, window=5, softcap=2.0, sinks=SINKS) | BOTH[1],
            dict(firsts=(2100, 5), heads=24, positions=2304, new=3) | BOTH[0],
        ],
        every_chip=[IN_PAGES | dict(new=2, half=8) | setting for setting in BOTH],
        refusals=[
            refuse("k_scale and v_scale come together", BOTH[0], v_scale=lambda _: None),
            refuse(
                "caches of int8 take k_scale and v_scale",
                BOTH[0],
                k_scale=lambda _: None,
                v_scale=lambda _: None,
            ),
            refuse("k_scale is [1, 2], not (1, 1)", BOTH[0], k_scale=np.ones((1, 1), F32)),
            refuse("v_scale is [1, 2], not (2,)", BOTH[0], v_scale=np.ones(2, F32)),
            refuse(
                "scales go with caches of int8, float8_e4m3, float8_e4m3fn, float8_e5m2 or bfloat16, not float32",
                k_scale=np.ones((1, 2), F32),
                v_scale=np.ones((1, 2), F32),
            ),
            refuse("k_cache is int8, v_cache is float8_e4m3", BOTH[0], v_cache=BOTH[1]["v_cache"]),
        ],
        two_cores=[
            dict(firsts=(20, 7), half=8) | BOTH[0],
            dict(firsts=(100, 7, 30), heads=2, kv_heads=1) | IN_PAGES | scaled(FP8, 1),
        ],
        two_sums=[
            dict(firsts=(4000,), heads=6, kv_heads=3, depth=8, positions=4000 + 96) | scaled(np.int8, 3)
        ],
        ranks=[
            # each rank multiplies its own queries before they are gathered, and its own outputs once they are merged
            OverPositions(4, settings=dict(firsts=(0, 70, 297), heads=8, positions=304, new=3) | BOTH[0])
        ],
        undefined=[
            Undefined(
                dict(k_cache=find_unseen, v_cache=find_unseen),
                dict(firsts=(5, 20), dtype=BF16) | IN_PAGES | BOTH[1],
                kept=lambda _, outputs: outputs[:1],
            )
        ],
        tolerance=within,
    )


class TestPrefill(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        arguments,
        values=[
            *(dict(tokens=150, dtype=dtype) | setting for setting in BOTH for dtype in (F32, BF16)),
            dict(tokens=150, depth=192, sequences=3, window=20, softcap=2.0) | BOTH[0],
            dict(causal=False) | BOTH[0],
            dict(tokens=150) | BOTH[1] | READ_ONLY,
            dict(tokens=150) | scaled(E5M2),
        ],
        every_chip=[dict(tokens=1300, heads=1, kv_heads=1, dtype=BF16) | scaled(np.int8, 1)],
        tolerance=within,
    )


class TestPrefillAfterCachedPositions(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        continued,
        every_chip=together("page dtype", (None, F32), (16, F32), (128, BF16), garbage=0.0, **BOTH[0]),
        values=[dict(page=32, window=60, garbage=0.0) | BOTH[1]],
        tolerance=within,
        replays=False,
    )


class TestMixed(KernelTests):
    case = KernelCase(
        kernels.attention_mixed,
        mixed,
        every_chip=[dict(dtype=dtype) | setting for setting, dtype in zip(BOTH, (F32, BF16))],
        tolerance=within,
        replays=False,
    )


class TestBlockDecode(KernelTests):
    case = KernelCase(
        kernels.attention_block_decode,
        formed,
        every_chip=[BOTH[0]],
        values=[
            dict(new=3, block=16) | BOTH[1],
            dict(depth=192, half=40) | BOTH[0],
            dict(half=0, norms=False, dtype=BF16) | BOTH[0],
            dict(sequences=66, new=2, positions=8, kv=1) | scaled(np.int8, 1),
        ],
        tolerance=within,
    )


class TestDecoderLayer(KernelTests):
    case = KernelCase(
        kernels.decoder_layer_decode,
        layer,
        every_chip=[BOTH[0]],
        values=[dict(sequences=66, hidden=4096, inner=8, positions=8) | BOTH[1]],
        tolerance=within,
    )


def test_a_prompt_in_parts_equals_the_whole() -> None:
    """New tokens attend to the rounded keys and values of each other, as later tokens do."""
    case = TestPrefill.case
    inputs = case.arguments(dict(tokens=40, capacity=41) | BOTH[0])
    expected = case.run(inputs)
    _, k_cache, v_cache = case.run(inputs | {name: inputs[name][:25] for name in "qkv"})
    later = dict(
        prefix=25, positions=np.arange(25, 40, dtype=np.int32)[:, None], k_cache=k_cache, v_cache=v_cache
    )
    last = case.run(inputs | {name: inputs[name][25:] for name in "qkv"} | later)
    assert np.array_equal(expected[1][..., :40], last[1][..., :40])
    assert np.array_equal(expected[2][:, :, :40], last[2][:, :, :40])
    keys = expected[1][0, :, :, :40] * inputs["k_scale"].reshape(2, 1, 1)
    values = expected[2][0, :, :40] * inputs["v_scale"].reshape(2, 1, 1)
    for row in range(25, 40):
        for head in range(4):
            columns = slice(16 * head, 16 * head + 16)
            seen = keys[head // 2, :, : row + 1].T, values[head // 2, : row + 1]
            bound = rounding_bound(inputs["q"][row, columns].astype(np.float64), *seen, inputs["scale"])
            assert np.abs(expected[0][row, columns] - last[0][row - 25, columns]).max() <= bound


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        *(
            (table, dtype)
            for table in (TestDecode, TestPrefillAfterCachedPositions, TestMixed)
            for dtype in (F32, BF16)
        ),
        (TestBlockDecode, F32),
        (TestDecoderLayer, F32),
    ],
)
def test_caches_of_e4m3fn_on_a_chip_that_multiplies_them(table: type[KernelTests], dtype: Any) -> None:
    table.case.check(dict(dtype=dtype) | scaled(E4M3FN), "trn3")
